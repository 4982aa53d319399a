"""Extract features of images, cached so that `fit` and `evaluate` run the model only once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from caster.adapt.image_batches import (
    Measure,
    read_batches,
    require_preprocessing,
    resize,
    run,
    unreadable_error,
)
from caster.config import IMAGES_AT_ONCE
from caster.errors import CasterError
from caster.io import Progress, silent
from caster.io.feature_cache import Entry, EntryWriter, Manifest, entry_key, find_entry, write_entry
from caster.io.image_files import UnreadableImage
from caster.io.images import Images
from caster.io.labels import Labels
from caster.io.layer_arrays import Layers
from caster.models.protocol import FrozenModel, Outputs, has_layers, is_torch

if TYPE_CHECKING:
    from caster.models.activation_statistics import ActivationStatistics
    from caster.models.onnx.layers import OnnxStatistics

    Statistics = ActivationStatistics | OnnxStatistics

STAGE = "through the model"

Check = Callable[[Outputs], object]  # raises if the first batch is not usable


@dataclass(frozen=True, eq=False)
class ImageFeatures:
    """Cached features of images, read like a feature file."""

    path: Path
    images: Images
    entry: Entry

    @property
    def rows(self) -> int:
        """Number of images that could be read."""
        return self.entry.manifest.kept

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays."""
        logits = ("logits",) if "logits" in self.entry.arrays else ()
        labels = () if self.images.labels is None else ("labels",)
        return ("features", *logits, *labels)

    @property
    def unreadable(self) -> list[str]:
        """Error message of each skipped image."""
        return list(self.entry.manifest.unreadable.values())

    @property
    def image_rows(self) -> NDArray[Any]:
        """Index of the image of every row."""
        return self.entry.arrays["rows"]

    @property
    def outputs(self) -> Outputs:
        """All outputs of the model."""
        return Outputs(self.entry.arrays["features"], self.entry.arrays.get("logits"))

    @property
    def layers(self) -> Layers | None:
        """Sums over the model's layers; None if they were not measured."""
        return self.entry.manifest.layers

    def read(self, name: str) -> NDArray[Any]:
        """Read a whole array."""
        if name != "labels":
            return self.entry.arrays[name]
        if self.images.labels is None:
            raise CasterError(f"{self.images.name} has no labels")
        labels: Labels = self.images.labels[self.image_rows]
        return labels

    def chunks(self, names: tuple[str, ...], rows: int) -> Iterator[tuple[NDArray[Any], ...]]:
        """Yield these arrays together, in chunks of rows."""
        arrays = [self.read(name) for name in names]
        for start in range(0, self.rows, rows):
            yield tuple(array[start : start + rows] for array in arrays)


@contextmanager
def continues_from_cache() -> Iterator[None]:
    """Say on Ctrl-C that the same command continues, with the features cached so far."""
    try:
        yield
    except KeyboardInterrupt:
        hint = "no output was written; run the same command to continue"
        raise KeyboardInterrupt(hint) from None


@continues_from_cache()
def extract(
    model: FrozenModel,
    images: Images,
    store: Path,
    *,
    batch_size: int = IMAGES_AT_ONCE,
    skip_unreadable: bool = False,
    check: Check | None = None,
    targets: NDArray[np.int64] | None = None,
    progress: Progress = silent,
    allow_empty: bool = False,
) -> ImageFeatures:
    """Features and logits of all images, from the cache or computed and cached.

    `check` may reject the outputs of the first batch. With `targets`, the class index of every
    image, the same pass collects layer statistics; cached features without them are recomputed.
    """
    key, total = _key(model, images), len(images)

    def outdated(manifest: Manifest) -> bool:  # layers are missing, or images became readable
        unmeasured = targets is not None and manifest.layers is None
        return (manifest.kept > 0 and unmeasured) or _repaired(model, images, manifest.unreadable)

    entry = find_entry(store, key, total)
    if entry is None or outdated(entry.manifest):
        with write_entry(store, key, total, outdated, f"{model.name} on {images.name}") as partial:
            if outdated(partial.manifest):
                partial.clear()
            _fill(partial, model, images, batch_size, skip_unreadable, check, targets, progress)
        entry = find_entry(store, key, total)
    if entry is None:
        raise CasterError(f"the features cached in {store} were removed or damaged: run again")
    _check_skipped(entry.manifest.unreadable, skip_unreadable)
    if entry.manifest.kept == 0 and not allow_empty:
        raise CasterError(f"none of the images of {images.name} can be read")
    return ImageFeatures(Path(images.name), images, entry)


def activation_statistics_for(model: FrozenModel, past: Layers | None = None) -> Statistics:
    """Activation statistics of a model's layers, continued from `past` if given."""
    if is_torch(model):
        from caster.models.activation_statistics import ActivationStatistics

        return ActivationStatistics(model, past)
    if has_layers(model):
        from caster.models.onnx.layers import OnnxStatistics

        return OnnxStatistics(model, past)
    raise CasterError(
        f"layers need a torch module or an ONNX file, and {model.name} is neither: fit without "
        "{argument}",
        argument="layers",
    )


def _key(model: FrozenModel, images: Images) -> str:
    preprocessing = require_preprocessing(model)
    if model.sha256 is None:
        raise CasterError(f"{model.name} has no version: its features cannot be cached")
    # In bfloat16, the same weights give other features.
    precision = " bf16" if getattr(model, "bf16", False) else ""
    return entry_key(model.sha256 + precision, preprocessing.sha256, images.sha256)


def _fill(
    partial: EntryWriter,
    model: FrozenModel,
    images: Images,
    batch_size: int,
    skip_unreadable: bool,
    check: Check | None,
    targets: NDArray[np.int64] | None,
    progress: Progress,
) -> None:
    """Run the model on images that are not cached, from where an earlier run stopped."""
    _check_skipped(partial.manifest.unreadable, skip_unreadable)
    progress(STAGE, partial.manifest.seen, len(images))
    statistics, measure = None, None
    if targets is not None:
        statistics = activation_statistics_for(model, partial.manifest.layers)
        measure = _measuring(statistics, targets)
    batches = read_batches(
        images,
        require_preprocessing(model),
        range(partial.manifest.seen, len(images)),
        batch_size,
        skip_unreadable=skip_unreadable,
    )
    with closing(batches):  # an error would leave its threads running
        for batch in batches:
            columns: dict[str, NDArray[Any]] = {"rows": np.asarray(batch.rows, dtype=np.int64)}
            if batch.rows:
                outputs = run(model, batch, images.names, measure)
                if check is not None:
                    check(outputs)
                    check = None
                logits = {} if outputs.logits is None else {"logits": outputs.logits}
                columns |= {"features": outputs.features, **logits}
            sums = None if statistics is None else statistics.sums
            partial.append(columns, batch.unreadable, sums)
            progress(STAGE, partial.manifest.seen, len(images))
    try:
        model.verify()
    except CasterError:
        partial.clear()  # it is unknown which weights produced these features
        raise


def _measuring(statistics: Statistics, targets: NDArray[np.int64]) -> Measure:
    return lambda prepared, rows: statistics(prepared, targets[rows])


def _repaired(model: FrozenModel, images: Images, unreadable: Mapping[str, str]) -> bool:
    """Whether an image recorded as unreadable can be read now.

    New permissions, decoders or limits change no file, and so do not change the digest.
    """
    for row in map(int, unreadable):
        try:
            resize(images.read(row), require_preprocessing(model), images, row)
        except UnreadableImage:
            continue
        return True
    return False


def _check_skipped(unreadable: Mapping[str, str], skip_unreadable: bool) -> None:
    """Raise if an earlier run skipped images, unless this run skips them too."""
    if unreadable and not skip_unreadable:
        raise unreadable_error(next(iter(unreadable.values())))
