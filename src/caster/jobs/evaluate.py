"""Labelled target features or pictures in, the score of four classifiers out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster import state as states
from caster.adapter import Adapter
from caster.data import Pictures
from caster.errors import CasterError
from caster.estimator import Caster
from caster.evaluation import Evaluation, check_can_draw, evaluate, write_page
from caster.files import check_writable, replacing
from caster.frozen.arrays import FeatureFile, open_features
from caster.frozen.protocol import preprocessing_sha256
from caster.jobs.extract import extract
from caster.jobs.progress import Progress, silent

Rows = NDArray[np.intp]


def evaluate_file(
    state: Path,
    target: Path,
    page: Path,
    *,
    batch_size: int,
    seed: int | None,
    tau: float | None = None,
    progress: Progress = silent,
) -> Evaluation:
    """Score a file of labelled features, shuffled by a seed or in its own order."""
    _check_outputs(page, state, target)
    held = states.load(state)
    file = open_features(target, "features", "labels")
    clf = _with_tau(Caster.from_state(held), tau)
    chunks = _Stream(file, _logits(file), batch_size, seed, progress)
    found = evaluate(clf, chunks, name=str(target), digests={"state": states.digest(held)})
    _write(found, page)
    return found


def evaluate_pictures(
    adapter: Adapter,
    pictures: Pictures,
    page: Path,
    *,
    store: Path,
    batch_size: int,
    seed: int | None,
    tau: float | None = None,
    skip_unreadable: bool = False,
    progress: Progress = silent,
) -> tuple[Evaluation, list[str]]:
    """Score labelled pictures; also returns what was wrong with every picture skipped."""
    _check_outputs(page, Path(adapter.model.name), Path(pictures.name))
    features = extract(
        adapter.model,
        pictures,
        store,
        batch_size=batch_size,
        skip_unreadable=skip_unreadable,
        progress=progress,
    )
    logits = _logits(features)
    if adapter.head is None:
        logits = None
    elif logits is not None:
        logits = logits[:, np.asarray(adapter.head)]
    clf = _with_tau(adapter.clf, tau)
    chunks = _Stream(features, logits, batch_size, seed, progress)
    digests = {
        "model": adapter.model.sha256 or "",
        "preprocessing": preprocessing_sha256(adapter.model) or "",
        "pictures": pictures.sha256,
    }
    found = evaluate(clf, chunks, name=pictures.name, digests=digests)
    _write(found, page)
    return found, features.unreadable


class _Stream:
    """Batches of a labelled file in the order they are to be met."""

    def __init__(
        self,
        file: FeatureFile,
        logits: NDArray[Any] | None,
        batch_size: int,
        seed: int | None,
        progress: Progress,
    ) -> None:
        if batch_size < 1:
            raise CasterError(f"the batch size must be at least 1, not {batch_size}")
        self.features, self.labels = file.read("features"), file.read("labels")
        self.logits = logits
        self.batch_size, self.progress = batch_size, progress
        rows: Rows = np.arange(file.rows)
        self.order = rows if seed is None else np.random.default_rng(seed).permutation(rows)

    def __iter__(self) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]]:
        for start in range(0, len(self.order), self.batch_size):
            rows = self.order[start : start + self.batch_size]
            logits = None if self.logits is None else self.logits[rows]
            yield self.features[rows], self.labels[rows], logits
            self.progress("adapting", start + len(rows), len(self.order))


def _logits(file: FeatureFile) -> NDArray[Any] | None:
    return file.read("logits") if "logits" in file.names else None


def _with_tau(clf: Caster, tau: float | None) -> Caster:
    if tau is not None:
        clf.set_params(tau=tau)
    _ = clf.settings  # refuses a bad tau before any row is blamed for it
    return clf


def data_file(page: Path) -> Path:
    """Where the numbers of a page go: beside it, as JSON."""
    return page.with_suffix(".json")


def _check_outputs(page: Path, *inputs: Path) -> None:
    check_can_draw()
    if page.suffix not in (".html", ".htm"):
        raise CasterError(f"{page} must end in .html")
    for path in (page, data_file(page)):
        check_writable(path, *inputs)


def _write(found: Evaluation, page: Path) -> None:
    with replacing(data_file(page)) as temporary:
        temporary.write_text(json.dumps(found.to_json(), indent=1), encoding="utf-8")
    write_page(found, page)
