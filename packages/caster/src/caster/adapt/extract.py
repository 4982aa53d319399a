"""Features of images through a frozen model, read from disk where they are known already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from caster.adapt.adapter import activation_statistics_for
from caster.adapt.features import ImageArrayFeatures
from caster.adapt.reading import fit, read_batches, refuse_unreadable
from caster.adapt.running import run
from caster.config import IMAGES_AT_ONCE
from caster.errors import CasterError
from caster.io.decode import UnreadableImage
from caster.io.feature_cache import entry_key, filling, find, keep, release
from caster.io.filling import Arrays
from caster.io.images import Images
from caster.io.note import Note
from caster.io.progress import Progress, silent
from caster.models.preprocessing import Preprocessing
from caster.models.protocol import FrozenModel, Outputs
from caster.state import has_full

if TYPE_CHECKING:
    from caster.models.activation_statistics import ActivationStatistics

STAGE = "through the model"

Check = Callable[[Outputs], object]  # raises what is wrong with a batch


def _nothing(outputs: Outputs) -> None:
    """Find nothing wrong."""


def stated_preprocessing(model: FrozenModel) -> Preprocessing:
    """A model's preprocessing, without which no image can be read for it."""
    if model.preprocessing is None:
        raise CasterError(
            f"nothing says how images become batches for {model.name}: give --preprocessing "
            "FILE.toml, or in-graph if the model resizes and normalises itself"
        )
    return model.preprocessing


def extract(
    model: FrozenModel,
    images: Images,
    store: Path,
    *,
    batch_size: int = IMAGES_AT_ONCE,
    skip_unreadable: bool = False,
    check: Check = _nothing,
    layers: bool | Literal["full"] = False,
    passing: bool = False,
    progress: Progress = silent,
) -> ImageArrayFeatures:
    """Features and logits of all images, kept in the store for the next time.

    `check` may refuse the first batch's, before the rest is worked on. With `layers` the model's
    layers are measured on the way, "full" with covariances where a site can have a full map;
    features that were kept without what is asked for are made anew. `passing`
    ones are for the caller alone, who gives them up by `forget`; those that are kept stay so.
    """
    key, total = _key(model, images), len(images)
    entry = find(store, key, total)
    if entry is not None and _outdated(entry.note, model, images, layers):
        entry = None
    if entry is not None and entry.note.passing and not passing:
        entry = keep(store, key, total)
    if entry is None:
        _fill(model, images, store, batch_size, skip_unreadable, check, layers, passing, progress)
        entry = find(store, key, total)
    if entry is None:
        raise CasterError(f"the features kept in {store} were taken away or damaged: run again")
    _refuse(entry.note.unreadable, skip_unreadable)
    if entry.note.kept == 0:
        raise CasterError(f"none of the images of {images.name} can be read")
    return ImageArrayFeatures(Path(images.name), images, entry)


def forget(features: ImageArrayFeatures, model: FrozenModel, store: Path) -> None:
    """Give up features, unless another job keeps them."""
    with suppress(CasterError):  # the job is done; what cannot be removed does no harm
        release(store, _key(model, features.images))


def _key(model: FrozenModel, images: Images) -> str:
    preprocessing = stated_preprocessing(model)
    if model.sha256 is None:
        raise CasterError(f"{model.name} states no version: its features cannot be kept")
    # The same weights, but other features.
    precision = " bf16" if getattr(model, "bf16", False) else ""
    return entry_key(model.sha256 + precision, preprocessing.sha256, images.sha256)


def _fill(
    model: FrozenModel,
    images: Images,
    store: Path,
    batch_size: int,
    skip_unreadable: bool,
    check: Check,
    layers: bool | Literal["full"],
    passing: bool,
    progress: Progress,
) -> None:
    def outdated(note: Note) -> bool:
        return _outdated(note, model, images, layers)

    key, of = _key(model, images), f"{model.name} on {images.name}"
    with filling(store, key, len(images), outdated, passing, of) as partial:
        if outdated(partial.note):
            partial.clear()
        _refuse(partial.note.unreadable, skip_unreadable)
        progress(STAGE, partial.note.seen, len(images))
        statistics = (
            activation_statistics_for(model, partial.note.layers, layers == "full")
            if layers
            else None
        )
        batches = read_batches(
            images,
            stated_preprocessing(model),
            range(partial.note.seen, len(images)),
            batch_size,
            skip_unreadable=skip_unreadable,
        )
        with closing(batches):  # or an error would leave its threads at work
            for batch in batches:
                columns: Arrays = {"rows": np.asarray(batch.rows, dtype=np.int64)}
                if batch.rows:
                    outputs = run(model, batch, images.names, through=statistics)
                    check(outputs)
                    if layers == "full":
                        _check_full(model, statistics)
                    check = _nothing
                    columns = {**columns, **_columns(outputs)}
                partial.append(
                    columns, batch.unreadable, None if statistics is None else statistics.sums
                )
                progress(STAGE, partial.note.seen, len(images))
        try:
            model.verify()
        except CasterError:
            partial.clear()  # whose features they are, nobody knows
            raise


def _check_full(model: FrozenModel, statistics: ActivationStatistics | None) -> None:
    if statistics is None or not has_full(statistics.sums):
        from caster.models.full_maps import MOST_CHANNELS

        raise CasterError(
            f"{model.name} has no site for full maps, which is one of several positions and at "
            f"most {MOST_CHANNELS} channels that is no BatchNorm's: leave out --full-maps"
        )


def _columns(outputs: Outputs) -> Arrays:
    logits = {} if outputs.logits is None else {"logits": outputs.logits}
    return {"features": outputs.features, **logits}


def _outdated(
    note: Note, model: FrozenModel, images: Images, layers: bool | Literal["full"]
) -> bool:
    """Whether what is kept is not what is asked for, and must be made anew."""
    measured = not layers or note.layers is not None
    if layers == "full":
        measured = has_full(note.layers)
    return (note.kept > 0 and not measured) or _repaired(model, images, note.unreadable)


def _repaired(model: FrozenModel, images: Images, unreadable: Mapping[str, str]) -> bool:
    """Whether an image noted as unreadable can be read by now.

    A permission given, a decoder installed or a limit raised changes no file, and so not the
    images' digest.
    """
    for row in map(int, unreadable):
        try:
            fit(images.read(row), stated_preprocessing(model), images, row)
        except UnreadableImage:
            continue
        return True
    return False


def _refuse(unreadable: Mapping[str, str], skip_unreadable: bool) -> None:
    """What an earlier run was asked to skip, this one may not have been."""
    if unreadable and not skip_unreadable:
        raise refuse_unreadable(next(iter(unreadable.values())))
