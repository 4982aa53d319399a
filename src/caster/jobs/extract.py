"""Features of pictures through a frozen model, read from disk where they are known already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from caster.adapter import gauge_for
from caster.config import PICTURES_AT_ONCE
from caster.data import Pictures, UnreadablePicture
from caster.errors import CasterError
from caster.frozen.preprocessing import Preprocessing
from caster.frozen.protocol import FrozenModel, Outputs
from caster.jobs.features import PictureFeatures
from caster.jobs.filling import Arrays
from caster.jobs.note import Note
from caster.jobs.progress import Progress, silent
from caster.jobs.reading import fit, read_batches, refuse_unreadable
from caster.jobs.running import run
from caster.jobs.store import entry_key, filling, find, keep, release
from caster.state import has_full

if TYPE_CHECKING:
    from caster.frozen.gauge import Gauge

STAGE = "through the model"

Check = Callable[[Outputs], object]  # raises what is wrong with a batch


def _nothing(outputs: Outputs) -> None:
    """Find nothing wrong."""


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
    batch_size: int = PICTURES_AT_ONCE,
    skip_unreadable: bool = False,
    check: Check = _nothing,
    layers: bool | Literal["full"] = False,
    passing: bool = False,
    progress: Progress = silent,
) -> PictureFeatures:
    """Features and logits of all pictures, kept in the store for the next time.

    `check` may refuse the first batch's, before the rest is worked on. With `layers` the model's
    layers are measured on the way, "full" with covariances where a site can have a full map;
    features that were kept without what is asked for are made anew. `passing`
    ones are for the caller alone, who gives them up by `forget`; those that are kept stay so.
    """
    key, total = _key(model, pictures), len(pictures)
    entry = find(store, key, total)
    if entry is not None and _outdated(entry.note, model, pictures, layers):
        entry = None
    if entry is not None and entry.note.passing and not passing:
        entry = keep(store, key, total)
    if entry is None:
        _fill(model, pictures, store, batch_size, skip_unreadable, check, layers, passing, progress)
        entry = find(store, key, total)
    if entry is None:
        raise CasterError(f"the features kept in {store} were taken away or damaged: run again")
    _refuse(entry.note.unreadable, skip_unreadable)
    if entry.note.kept == 0:
        raise CasterError(f"none of the pictures of {pictures.name} can be read")
    return PictureFeatures(Path(pictures.name), pictures, entry)


def forget(features: PictureFeatures, model: FrozenModel, store: Path) -> None:
    """Give up features, unless another job keeps them."""
    with suppress(CasterError):  # the job is done; what cannot be removed does no harm
        release(store, _key(model, features.pictures))


def _key(model: FrozenModel, pictures: Pictures) -> str:
    preprocessing = stated_preprocessing(model)
    if model.sha256 is None:
        raise CasterError(f"{model.name} states no version: its features cannot be kept")
    # The same weights, but other features.
    precision = " bf16" if getattr(model, "bf16", False) else ""
    return entry_key(model.sha256 + precision, preprocessing.sha256, pictures.sha256)


def _fill(
    model: FrozenModel,
    pictures: Pictures,
    store: Path,
    batch_size: int,
    skip_unreadable: bool,
    check: Check,
    layers: bool | Literal["full"],
    passing: bool,
    progress: Progress,
) -> None:
    def outdated(note: Note) -> bool:
        return _outdated(note, model, pictures, layers)

    key, of = _key(model, pictures), f"{model.name} on {pictures.name}"
    with filling(store, key, len(pictures), outdated, passing, of) as partial:
        if outdated(partial.note):
            partial.clear()
        _refuse(partial.note.unreadable, skip_unreadable)
        progress(STAGE, partial.note.seen, len(pictures))
        gauge = gauge_for(model, partial.note.layers, layers == "full") if layers else None
        batches = read_batches(
            pictures,
            stated_preprocessing(model),
            range(partial.note.seen, len(pictures)),
            batch_size,
            skip_unreadable=skip_unreadable,
        )
        with closing(batches):  # or an error would leave its threads at work
            for batch in batches:
                columns: Arrays = {"rows": np.asarray(batch.rows, dtype=np.int64)}
                if batch.rows:
                    outputs = run(model, batch, pictures.names, through=gauge)
                    check(outputs)
                    if layers == "full":
                        _check_full(model, gauge)
                    check = _nothing
                    columns = {**columns, **_columns(outputs)}
                partial.append(columns, batch.unreadable, None if gauge is None else gauge.sums)
                progress(STAGE, partial.note.seen, len(pictures))
        try:
            model.verify()
        except CasterError:
            partial.clear()  # whose features they are, nobody knows
            raise


def _check_full(model: FrozenModel, gauge: Gauge | None) -> None:
    if gauge is None or not has_full(gauge.sums):
        from caster.frozen.full_maps import MOST_CHANNELS

        raise CasterError(
            f"{model.name} has no site for full maps, which is one of several positions and at "
            f"most {MOST_CHANNELS} channels that is no BatchNorm's: leave out --full-maps"
        )


def _columns(outputs: Outputs) -> Arrays:
    logits = {} if outputs.logits is None else {"logits": outputs.logits}
    return {"features": outputs.features, **logits}


def _outdated(
    note: Note, model: FrozenModel, pictures: Pictures, layers: bool | Literal["full"]
) -> bool:
    """Whether what is kept is not what is asked for, and must be made anew."""
    measured = not layers or note.layers is not None
    if layers == "full":
        measured = has_full(note.layers)
    return (note.kept > 0 and not measured) or _repaired(model, pictures, note.unreadable)


def _repaired(model: FrozenModel, pictures: Pictures, unreadable: Mapping[str, str]) -> bool:
    """Whether a picture noted as unreadable can be read by now.

    A permission given, a decoder installed or a limit raised changes no file, and so not the
    pictures' digest.
    """
    for row in map(int, unreadable):
        try:
            fit(pictures.read(row), stated_preprocessing(model), pictures, row)
        except UnreadablePicture:
            continue
        return True
    return False


def _refuse(unreadable: Mapping[str, str], skip_unreadable: bool) -> None:
    """What an earlier run was asked to skip, this one may not have been."""
    if unreadable and not skip_unreadable:
        raise refuse_unreadable(next(iter(unreadable.values())))
