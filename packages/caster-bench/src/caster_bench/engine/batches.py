"""The batches of a stream as a model takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.config import IMAGES_AT_ONCE
from caster.errors import CasterError
from caster.models.protocol import FrozenModel
from caster_bench.data.streams import Batch, Condition, Stream, make_stream
from caster_bench.engine.settings import stream_settings
from caster_bench.engine.shared_images import Codes, Pixels
from caster_bench.sweeps import Spec

HOLD = 2**29  # bytes of prepared batches that are kept from one method to the next
Prepare = Callable[[Pixels], Any]  # (B, H, W, 3) -> what the model takes


def stream_of(spec: Spec, codes: Codes) -> Stream:
    """The stream of a cell; labels plan it, and go no further than the record."""
    return make_stream(codes, stream_settings(spec))


class Prepared:
    """A stream's batches, prepared: those of a small stream once for all methods."""

    def __init__(
        self,
        stream: Stream,
        pixels: Mapping[Condition | None, Pixels],
        prepare: Prepare,
        hold: bool = True,
    ) -> None:
        self.plan: list[Batch] = list(stream)
        self._pixels, self._prepare = pixels, prepare
        shape = next(iter(pixels.values())).shape[1:]
        floats = 4 * sum(len(batch.rows) for batch in self.plan) * int(np.prod(shape))
        self._held: list[Any] | None = [None] * len(self.plan) if hold and floats <= HOLD else None

    def __iter__(self) -> Iterator[Any]:
        for at, batch in enumerate(self.plan):
            if self._held is None:
                yield self._made(batch)
                continue
            if self._held[at] is None:
                self._held[at] = self._made(batch)
            yield self._held[at]

    def _made(self, batch: Batch) -> Any:
        """What the model takes of a batch, every part of it under its own condition."""
        parts = batch.parts()
        if len(parts) == 1:
            return self._prepare(self._pixels[parts[0][0]][batch.rows])
        shape = next(iter(self._pixels.values())).shape[1:]
        images = np.empty((len(batch.rows), *shape), dtype=np.uint8)
        for condition, places in parts:
            images[places] = self._pixels[condition][batch.rows[places]]
        return self._prepare(images)


@dataclass(eq=False)
class Labelled:
    """Labelled source batches, made anew whenever they are read: only their images are held."""

    pixels: Pixels
    codes: Codes
    prepare: Prepare
    reads: int = 0  # how often they have been, in whole or in part

    def __iter__(self) -> Iterator[tuple[Any, Codes]]:
        self.reads += 1
        for start in range(0, len(self.codes), IMAGES_AT_ONCE):
            rows = slice(start, start + IMAGES_AT_ONCE)
            yield self.prepare(np.array(self.pixels[rows])), self.codes[rows]


def preparing(model: FrozenModel) -> Prepare:
    """What prepares images for a model; for a torch module on its device, byte by byte sent."""
    stated = model.preprocessing
    if stated is None:
        raise CasterError(f"{model.name} does not say how images become batches")
    if not hasattr(model, "module") or stated.dtype != "float32":
        return stated.batch
    import torch

    if stated.range == 255 and set(stated.mean) == {0} and set(stated.std) == {1}:
        return stated.batch  # pixels as they are
    device = model.device  # type: ignore[attr-defined]
    std = np.asarray(stated.std, dtype=np.float64)

    def channels(values: NDArray[np.float64]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.float32)).reshape(1, 3, 1, 1).to(device)

    scale, shift = channels(stated.range / 255 / std), channels(-np.asarray(stated.mean) / std)

    def prepare(pixels: Pixels) -> torch.Tensor:
        placed = torch.from_numpy(np.ascontiguousarray(pixels)).to(device)
        placed = placed.flip(-1) if stated.channels == "BGR" else placed
        # Two roundings, as in Preprocessing: not one of a fused product and sum.
        return placed.permute(0, 3, 1, 2).contiguous().mul(scale).add(shift)

    return prepare
