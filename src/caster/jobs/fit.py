"""A file of labelled features in, a state file out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from caster.config import CHUNK_ELEMENTS, Settings
from caster.estimator import Caster
from caster.files import check_writable
from caster.frozen.arrays import FeatureFile, open_features
from caster.jobs.progress import Progress, silent
from caster.labels import as_labels, unique_labels


def fit_file(source: Path, output: Path, settings: Settings, progress: Progress = silent) -> Caster:
    """Fit a state from a feature file, reading it twice and never whole, and save it."""
    check_writable(output, source)
    file = open_features(source, "features", "labels")
    classes = unique_labels(as_labels(file.read("labels")))
    clf = Caster(**vars(settings)).fit_stream(_Passes(file, progress), classes)
    clf.save(output)
    return clf


class _Passes:
    """The file's chunks, anew each time they are asked for."""

    def __init__(self, file: FeatureFile, progress: Progress) -> None:
        self.file, self.progress = file, progress
        self.started = 0

    def __iter__(self) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        self.started += 1
        stage = ("pass 1 of 2: subspace", "pass 2 of 2: moments")[self.started - 1]
        (first,) = next(self.file.chunks(("features",), 1))
        rows = max(1, CHUNK_ELEMENTS // max(1, first.size))
        done = 0
        self.progress(stage, done, self.file.rows)
        for features, labels in self.file.chunks(("features", "labels"), rows):
            yield features, labels
            done += len(labels)
            self.progress(stage, done, self.file.rows)
