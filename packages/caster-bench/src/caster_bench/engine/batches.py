"""Batches of a stream or a source, preprocessed for a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.config import IMAGES_AT_ONCE
from caster.errors import CasterError
from caster.models.protocol import FrozenModel
from caster_bench.data.streams import Batch, Condition, Stream
from caster_bench.engine.shared_images import ClassIndices, Pixels

CACHE_BYTES = 2**29  # preprocessed batches kept from one method to the next
Preprocess = Callable[[Pixels], Any]  # (B, H, W, 3) -> a batch for the model


class StreamBatches:
    """The preprocessed batches of a stream; those of a small stream are cached for all methods."""

    def __init__(
        self,
        stream: Stream,
        pixels: Mapping[Condition | None, Pixels],
        preprocess: Preprocess,
        cache: bool,
    ) -> None:
        self.plan: list[Batch] = list(stream)
        self._pixels, self._preprocess = pixels, preprocess
        self._shape = next(iter(pixels.values())).shape[1:]
        size = 4 * sum(len(batch.rows) for batch in self.plan) * int(np.prod(self._shape))
        cached = cache and size <= CACHE_BYTES
        self._cache: list[Any] | None = [None] * len(self.plan) if cached else None

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.plan):
            if self._cache is None:
                yield self._make(batch)
                continue
            if self._cache[number] is None:
                self._cache[number] = self._make(batch)
            yield self._cache[number]

    def _make(self, batch: Batch) -> Any:
        """Preprocess a batch, each part of it under its own condition."""
        parts = batch.parts()
        if len(parts) == 1:
            return self._preprocess(self._pixels[parts[0][0]][batch.rows])
        images = np.empty((len(batch.rows), *self._shape), dtype=np.uint8)
        for condition, rows in parts:
            images[rows] = self._pixels[condition][batch.rows[rows]]
        return self._preprocess(images)


@dataclass(eq=False)
class LabelledBatches:
    """Labelled source batches, preprocessed again on every pass to save memory."""

    pixels: Pixels
    labels: ClassIndices
    preprocess: Preprocess
    reads: int = 0  # passes begun so far

    def __iter__(self) -> Iterator[tuple[Any, ClassIndices]]:
        self.reads += 1
        for start in range(0, len(self.labels), IMAGES_AT_ONCE):
            rows = slice(start, start + IMAGES_AT_ONCE)
            yield self.preprocess(np.array(self.pixels[rows])), self.labels[rows]


def preprocessor(model: FrozenModel) -> Preprocess:
    """Return the function that turns pixels into batches; for a torch module, on its device."""
    stated = model.preprocessing
    if stated is None:
        raise CasterError(f"{model.name} does not say how images become batches")
    if not hasattr(model, "module") or stated.dtype != "float32" or stated.depth != 3:
        return stated.batch
    import torch

    if stated.range == 255 and set(stated.mean) == {0} and set(stated.std) == {1}:
        return stated.batch  # raw pixels
    device = model.device  # type: ignore[attr-defined]
    std = np.asarray(stated.std, dtype=np.float64)

    def channels(values: NDArray[np.float64]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.float32)).reshape(1, 3, 1, 1).to(device)

    scale, shift = channels(stated.range / 255 / std), channels(-np.asarray(stated.mean) / std)

    def preprocess(pixels: Pixels) -> torch.Tensor:
        images = torch.from_numpy(np.ascontiguousarray(pixels)).to(device)
        images = images.flip(-1) if stated.channels == "BGR" else images
        # Round twice, as Preprocessing does; a fused multiply-add would round once.
        return images.permute(0, 3, 1, 2).contiguous().mul(scale).add(shift)

    return preprocess
