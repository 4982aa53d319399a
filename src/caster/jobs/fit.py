"""Labelled features or pictures in, a state file out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from caster import state as states
from caster.adapter import bound_state
from caster.config import CHUNK_ELEMENTS, Settings
from caster.data import Pictures
from caster.estimator import Caster
from caster.files import check_writable
from caster.frozen.arrays import FeatureFile, open_features
from caster.frozen.heads import head_columns
from caster.frozen.protocol import FrozenModel
from caster.jobs.extract import extract
from caster.jobs.progress import Progress, silent
from caster.labels import Labels, as_labels, unique_labels


def fit_file(source: Path, output: Path, settings: Settings, progress: Progress = silent) -> Caster:
    """Fit a state from a feature file, reading it twice and never whole, and save it."""
    check_writable(output, source)
    file = open_features(source, "features", "labels")
    clf = _fit(file, unique_labels(as_labels(file.read("labels"))), settings, progress)
    clf.save(output)
    return clf


def fit_pictures(
    model: FrozenModel,
    pictures: Pictures,
    output: Path,
    settings: Settings,
    *,
    store: Path,
    batch_size: int,
    named_classes: list[str] | None = None,
    use_head: bool = True,
    skip_unreadable: bool = False,
    progress: Progress = silent,
) -> tuple[Caster, list[str]]:
    """Fit a state from labelled pictures, bound to the model, and save it.

    `named_classes` are the model's outputs in their order; without `use_head` they are other
    classes than the data's. Also returns what was wrong with every picture skipped.
    """
    check_writable(output, model.name, pictures.name)
    features = extract(
        model,
        pictures,
        store,
        batch_size=batch_size,
        skip_unreadable=skip_unreadable,
        progress=progress,
    )
    classes = pictures.classes
    if classes is None:
        classes = unique_labels(as_labels(features.read("labels")))
    head = None
    if use_head and "logits" in features.names:
        head = head_columns(classes, features.read("logits").shape[1], named_classes)
    clf = _fit(features, classes, settings, progress)
    states.save(bound_state(clf, model, head), output)
    return clf, features.unreadable


def _fit(file: FeatureFile, classes: Labels, settings: Settings, progress: Progress) -> Caster:
    return Caster(**vars(settings)).fit_stream(_Passes(file, progress), classes)


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
