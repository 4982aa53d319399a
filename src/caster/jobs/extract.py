"""Features of pictures through a frozen model, read from disk where they are known already."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.arrays import to_numpy
from caster.data import Pictures
from caster.errors import CasterError
from caster.frozen.preprocessing import Preprocessing
from caster.frozen.protocol import FrozenModel
from caster.jobs.progress import Progress, silent
from caster.jobs.reading import read_batches
from caster.jobs.store import Entry, Filling, entry_key, filling, find
from caster.labels import Labels

STAGE = "through the model"


@dataclass(frozen=True, eq=False)
class PictureFeatures:
    """What a model makes of labelled pictures, as the feature file other jobs read."""

    path: Path
    pictures: Pictures
    entry: Entry

    @property
    def rows(self) -> int:
        """Pictures that could be read."""
        return self.entry.note.kept

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays there are."""
        return ("features", *(("logits",) if self.entry.has("logits") else ()), "labels")

    @property
    def unreadable(self) -> list[str]:
        """What is wrong with each picture that was skipped."""
        return list(self.entry.note.unreadable.values())

    def read(self, name: str) -> NDArray[Any]:
        """One whole array."""
        if name != "labels":
            return self.entry.array(name)
        if self.pictures.labels is None:
            raise CasterError(f"{self.pictures.name} has no labels")
        labels: Labels = self.pictures.labels[self.entry.array("rows")]
        return labels

    def chunks(self, names: tuple[str, ...], rows: int) -> Iterator[tuple[NDArray[Any], ...]]:
        """These arrays side by side, so many rows at a time."""
        arrays = [self.read(name) for name in names]
        for start in range(0, self.rows, rows):
            yield tuple(array[start : start + rows] for array in arrays)


def stated_preprocessing(model: FrozenModel) -> Preprocessing:
    """A model's preprocessing, without which no picture can be read for it."""
    if model.preprocessing is None:
        raise CasterError(
            f"nothing says how pictures become batches for {model.name}: give --preprocessing "
            "FILE.toml, or in-graph if the model resizes and normalises itself"
        )
    return model.preprocessing


def extract(
    model: FrozenModel,
    pictures: Pictures,
    store: Path,
    *,
    batch_size: int,
    skip_unreadable: bool = False,
    progress: Progress = silent,
) -> PictureFeatures:
    """Features and logits of all pictures, kept in the store for the next time."""
    preprocessing = stated_preprocessing(model)
    if model.sha256 is None:
        raise CasterError(f"{model.name} states no version: its features cannot be kept")
    key = entry_key(model.sha256, preprocessing.sha256, pictures.sha256)
    entry = find(store, key)
    if entry is None:
        with filling(store, key, len(pictures)) as partial:
            rows = range(partial.note.seen, len(pictures))
            batches = read_batches(
                pictures, preprocessing, rows, batch_size, skip_unreadable=skip_unreadable
            )
            progress(STAGE, partial.note.seen, len(pictures))
            for batch in batches:
                _append(partial, model, batch.rows, batch.prepared, batch.unreadable)
                progress(STAGE, partial.note.seen, len(pictures))
            model.verify()
        entry = Entry(store / key)
    features = PictureFeatures(Path(pictures.name), pictures, entry)
    _check(features, skip_unreadable)
    return features


def _append(
    partial: Filling,
    model: FrozenModel,
    rows: list[int],
    prepared: NDArray[Any] | None,
    unreadable: dict[int, str],
) -> None:
    columns: dict[str, NDArray[Any]] = {"rows": np.asarray(rows, dtype=np.int64)}
    if prepared is not None:
        outputs = model(prepared)
        columns["features"] = to_numpy(outputs.features)
        if outputs.logits is not None:
            columns["logits"] = to_numpy(outputs.logits)
    partial.append(columns, unreadable)


def _check(features: PictureFeatures, skip_unreadable: bool) -> None:
    """What an earlier run was asked to skip, this one may not have been."""
    if features.unreadable and not skip_unreadable:
        raise CasterError(f"{features.unreadable[0]}: repair it, or skip it with --skip-unreadable")
    if features.rows == 0:
        raise CasterError(f"none of the pictures of {features.pictures.name} can be read")
