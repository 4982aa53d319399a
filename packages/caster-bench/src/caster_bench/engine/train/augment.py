"""Images as they are learnt from, on the device they are on: no two times the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from caster_bench.engine.train.operations import OPERATIONS
from caster_bench.engine.train.recipe import Recipe

AT_ONCE = 4096  # images that are changed together
SPREAD = 0.5  # of magnitudes, out of 10: not all images are changed alike
APPLIED = 0.5  # how often an operation is done when its turn comes
AREA, ASPECT = (0.02, 0.33), (0.3, 3.3)  # of boxes that are erased


@dataclass(frozen=True, eq=False)
class Pool:
    """Images to learn from, with a border to crop in."""

    padded: Tensor  # (N, S + 2 margin, S + 2 margin, 3), uint8
    codes: Tensor  # (N,), int64
    size: int
    shift: Tensor  # (3, 1, 1): pixels times scale plus shift are what a network takes
    scale: Tensor

    @classmethod
    def of(
        cls,
        pixels: Tensor,  # (N, S, S, 3)
        codes: Tensor,
        mean: tuple[float, ...],
        std: tuple[float, ...],
    ) -> Pool:
        """Images with a black border of an eighth of a side, where the tensors are."""
        size = pixels.shape[1]
        margin = size // 8
        scale, shift = affine(mean, std, pixels.device)
        padded = pad(pixels, (0, 0, margin, margin, margin, margin))
        return cls(padded, codes, size, shift, scale)

    def batches(
        self, recipe: Recipe, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Normalised batches (B, 3, S, S) and their classes: once through, less what is left."""
        n, size = len(self.codes), min(recipe.batch_size, len(self.codes))
        order = torch.randperm(n, generator=generator, device=self.codes.device)
        # Hundreds of small kernels cost their start, whatever they work on: so for many batches.
        for rows in torch.split(order[: n // size * size], max(1, AT_ONCE // size) * size):
            images = self._cropped(rows, recipe.flip, generator)
            for _ in range(recipe.operations):
                images = randaugment(images, recipe.magnitude, generator)
            pixels = images * self.scale + self.shift
            if recipe.erase:
                pixels = erase(pixels, recipe.erase, generator)
            parts = torch.split(pixels, size), torch.split(self.codes[rows], size)
            yield from zip(*parts, strict=True)

    def _cropped(self, rows: Tensor, flip: bool, generator: torch.Generator) -> Tensor:
        """(B, 3, S, S) of uint8: random crops, half of them turned left to right."""
        device, n = rows.device, len(rows)
        at = torch.arange(self.size, device=device)
        corners = self.padded.shape[1] - self.size + 1
        top, left = torch.randint(0, corners, (2, n, 1), generator=generator, device=device)
        columns = at.expand(n, -1)
        if flip:
            turned = torch.rand(n, 1, generator=generator, device=device) < 0.5
            columns = torch.where(turned, self.size - 1 - at, at)
        crops = self.padded[rows[:, None, None], (top + at)[:, :, None], (left + columns)[:, None]]
        return crops.permute(0, 3, 1, 2)


def affine(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:  # (3, 1, 1) each
    """Scale and shift that normalise pixels from 0 to 255, as `Preprocessing` does."""
    m, s = (torch.tensor(part, dtype=torch.float64).reshape(3, 1, 1) for part in (mean, std))
    return (1 / 255 / s).float().to(device), (-m / s).float().to(device)


def randaugment(images: Tensor, magnitude: float, generator: torch.Generator) -> Tensor:
    """One operation an image, each done half of the time, at about this magnitude out of 10.

    Every operation gets an equal share of the batch, chosen at random: no image is computed
    more than once, and the device is never waited for.
    """
    n, device = len(images), images.device
    order = torch.randperm(n, generator=generator, device=device)
    noise = torch.randn(n, generator=generator, device=device)
    strength = ((magnitude + SPREAD * noise) / 10).clamp(0, 1)
    done = torch.rand(n, generator=generator, device=device) < APPLIED
    result = images.clone()
    for operation, rows in zip(OPERATIONS, order.tensor_split(len(OPERATIONS)), strict=True):
        if not len(rows):  # fewer images than operations
            continue
        chosen = images[rows]
        changed = operation(chosen, strength[rows])
        result[rows] = torch.where(done[rows][:, None, None, None], changed, chosen)
    return result


def erase(batch: Tensor, share: float, generator: torch.Generator) -> Tensor:  # (B, 3, H, W)
    """A share of the images with a box of mean colour in them."""
    n, _, height, width = batch.shape
    draws = torch.rand(5, n, 1, generator=generator, device=batch.device)
    low, high = (torch.tensor(value).log() for value in ASPECT)
    area = (AREA[0] + (AREA[1] - AREA[0]) * draws[0]) * height * width
    aspect = (low + (high - low) * draws[1]).exp()
    rows = _inside((area * aspect).sqrt(), height, draws[2])
    columns = _inside((area / aspect).sqrt(), width, draws[3])
    box = rows[:, :, None] & columns[:, None, :] & (draws[4] < share)[:, :, None]
    return batch.masked_fill(box[:, None], 0.0)


def _inside(length: Tensor, side: int, context: Tensor) -> Tensor:  # (B, side)
    """Which of a side's pixels are in an interval at a random place, all of it inside."""
    length = length.round().clamp(1, side)
    first = (context * (side - length + 1)).floor()
    at = torch.arange(side, device=context.device)
    return (at >= first) & (at < first + length)
