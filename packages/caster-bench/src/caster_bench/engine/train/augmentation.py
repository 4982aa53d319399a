"""Augment training images on their device: crops, flips, RandAugment and random erasing.

RandAugment is our own: it augments a batch on the device that holds the images, where timm's takes
PIL images one by one: 3 to 4 times as long on a CPU core (`python benchmarks/training_speed.py`).
Brightness, contrast, colour and sharpness are left out, since the checkpoints are tested on
corruptions of that kind. Operations take uint8 images (B, C, H, W) and strengths (B,) from 0 to 1;
strength 0 changes nothing in operations that have a strength.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, pad

from caster_bench.engine.train.recipe import Recipe

CHUNK = 4096  # images augmented together
SPREAD = 0.5  # standard deviation of magnitudes, out of 10
APPLIED = 0.5  # probability that a drawn operation is applied
AREA, ASPECT = (0.02, 0.33), (0.3, 3.3)  # ranges of erased boxes
GREY = 128  # fill value outside the image
ROTATION, SHEAR, SHIFT = 30.0, 0.3, 0.3  # maxima: degrees; pixels per pixel; share of a side
ADDED = 110.0  # to dark pixels
LEVELS = 256


@dataclass(frozen=True, eq=False)
class Pool:
    """Training images on a device, padded for random crops."""

    padded: Tensor  # (N, S + 2 margin, S + 2 margin, 3), uint8
    labels: Tensor  # (N,), int64
    size: int
    shift: Tensor  # (3, 1, 1): a network takes pixels * scale + shift
    scale: Tensor

    @classmethod
    def of(
        cls,
        pixels: Tensor,  # (N, S, S, 3)
        labels: Tensor,
        mean: tuple[float, ...],
        std: tuple[float, ...],
    ) -> Pool:
        """Pad images by an eighth of a side in black."""
        size = pixels.shape[1]
        margin = size // 8
        scale, shift = affine(mean, std, pixels.device)
        padded = pad(pixels, (0, 0, margin, margin, margin, margin))
        return cls(padded, labels, size, shift, scale)

    def batch_size(self, recipe: Recipe) -> int:
        """Return the size of a batch: even, because mixup pairs its images."""
        return min(recipe.batch_size, len(self.labels)) // 2 * 2

    def batches(
        self, recipe: Recipe, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the normalised batches (B, 3, S, S) of an epoch and their labels.

        Images that do not fill a last batch are left out.
        """
        n, size = len(self.labels), self.batch_size(recipe)
        order = torch.randperm(n, generator=generator, device=self.labels.device)
        # Launching a kernel costs the same at any size, so augment many batches together.
        for rows in torch.split(order[: n // size * size], max(1, CHUNK // size) * size):
            images = self._crop(rows, recipe.flip, generator)
            for _ in range(recipe.operations):
                images = randaugment(images, recipe.magnitude, generator)
            pixels = images * self.scale + self.shift
            if recipe.erase:
                pixels = erase(pixels, recipe.erase, generator)
            parts = torch.split(pixels, size), torch.split(self.labels[rows], size)
            yield from zip(*parts, strict=True)

    def _crop(self, rows: Tensor, flip: bool, generator: torch.Generator) -> Tensor:
        """Take random crops, uint8 (B, 3, S, S), and flip half of them."""
        device, n = rows.device, len(rows)
        at = torch.arange(self.size, device=device)
        corners = self.padded.shape[1] - self.size + 1
        top, left = torch.randint(0, corners, (2, n, 1), generator=generator, device=device)
        columns = at.expand(n, -1)
        if flip:
            flipped = torch.rand(n, 1, generator=generator, device=device) < 0.5
            columns = torch.where(flipped, self.size - 1 - at, at)
        crops = self.padded[rows[:, None, None], (top + at)[:, :, None], (left + columns)[:, None]]
        return crops.permute(0, 3, 1, 2)


def affine(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:  # (3, 1, 1) each
    """Return the scale and shift that normalise pixels of 0 to 255, as `Preprocessing` does."""
    m, s = (torch.tensor(part, dtype=torch.float64).reshape(3, 1, 1) for part in (mean, std))
    return (1 / 255 / s).float().to(device), (-m / s).float().to(device)


def erase(batch: Tensor, share: float, generator: torch.Generator) -> Tensor:  # (B, 3, H, W)
    """Fill a random box with the mean colour, in a share of the images."""
    n, _, height, width = batch.shape
    draws = torch.rand(5, n, 1, generator=generator, device=batch.device)
    low, high = (torch.tensor(value).log() for value in ASPECT)
    area = (AREA[0] + (AREA[1] - AREA[0]) * draws[0]) * height * width
    aspect = (low + (high - low) * draws[1]).exp()
    rows = _interval((area * aspect).sqrt(), height, draws[2])
    columns = _interval((area / aspect).sqrt(), width, draws[3])
    box = rows[:, :, None] & columns[:, None, :] & (draws[4] < share)[:, :, None]
    return batch.masked_fill(box[:, None], 0.0)


def _interval(length: Tensor, side: int, position: Tensor) -> Tensor:  # (B, side)
    """Mask the pixels of an interval inside a side, at a position drawn from [0, 1)."""
    length = length.round().clamp(1, side)
    first = (position * (side - length + 1)).floor()
    at = torch.arange(side, device=position.device)
    return (at >= first) & (at < first + length)


# --- RandAugment -----------------------------------------------------------------------------


def randaugment(images: Tensor, magnitude: float, generator: torch.Generator) -> Tensor:
    """Apply one random operation per image, half of the time, at about this magnitude out of 10.

    Each operation gets an equal random share of the batch, so that no image is computed twice and
    the device is never waited for.
    """
    n, device = len(images), images.device
    order = torch.randperm(n, generator=generator, device=device)
    noise = torch.randn(n, generator=generator, device=device)
    strength = ((magnitude + SPREAD * noise) / 10).clamp(0, 1)
    applied = torch.rand(n, generator=generator, device=device) < APPLIED
    result = images.clone()
    for operation, rows in zip(OPERATIONS, order.tensor_split(len(OPERATIONS)), strict=True):
        if not len(rows):  # fewer images than operations
            continue
        chosen = images[rows]
        changed = operation(chosen, strength[rows])
        result[rows] = torch.where(applied[rows][:, None, None, None], changed, chosen)
    return result


def invert(images: Tensor, strength: Tensor) -> Tensor:
    """Invert all pixels."""
    return 255 - images


def solarise(images: Tensor, strength: Tensor) -> Tensor:
    """Invert bright pixels: at strength 1 all of them."""
    threshold = LEVELS * (1 - _each(strength))
    return torch.where(images < threshold, images, 255 - images)


def solarise_add(images: Tensor, strength: Tensor) -> Tensor:
    """Brighten dark pixels."""
    brighter = (images + (ADDED * _each(strength)).int()).clamp(max=255).to(torch.uint8)
    return torch.where(images < LEVELS // 2, brighter, images)


def posterise(images: Tensor, strength: Tensor) -> Tensor:
    """Keep only the highest bits: 8 down to 4."""
    dropped = (4 * _each(strength)).round().int()
    return ((images.int() >> dropped) << dropped).to(torch.uint8)


def autocontrast(images: Tensor, strength: Tensor) -> Tensor:
    """Stretch every channel from black to white."""
    low, high = (part[..., None, None].int() for part in images.flatten(2).aminmax(dim=2))
    stretched = (images.int() - low) * 255 // (high - low).clamp(min=1)
    return torch.where(high > low, stretched, images).to(torch.uint8)


def equalise(images: Tensor, strength: Tensor) -> Tensor:
    """Equalise the histogram of every channel, by Pillow's rule."""
    pixels = images.flatten(0, 1).flatten(1).long()  # (B * C, H * W)
    counts = pixels.new_zeros(len(pixels), LEVELS)
    counts.scatter_add_(1, pixels, torch.ones_like(pixels))
    brightest = counts.gather(1, pixels.amax(dim=1, keepdim=True))
    step = (counts.sum(dim=1, keepdim=True) - brightest) // (LEVELS - 1)
    below = counts.cumsum(dim=1) - counts
    table = (below + step // 2) // step.clamp(min=1)
    equal = table.clamp(max=LEVELS - 1).gather(1, pixels)
    return torch.where(step > 0, equal, pixels).view_as(images).to(torch.uint8)


def rotate(images: Tensor, strength: Tensor) -> Tensor:
    """Rotate about the centre."""
    angle = math.radians(ROTATION) * _signed(strength)
    return _warp(images, xx=angle.cos(), xy=-angle.sin(), yx=angle.sin(), yy=angle.cos())


def shear_x(images: Tensor, strength: Tensor) -> Tensor:
    """Shear horizontally."""
    return _warp(images, xy=SHEAR * _signed(strength))


def shear_y(images: Tensor, strength: Tensor) -> Tensor:
    """Shear vertically."""
    return _warp(images, yx=SHEAR * _signed(strength))


def translate_x(images: Tensor, strength: Tensor) -> Tensor:
    """Shift horizontally."""
    return _warp(images, x=2 * SHIFT * _signed(strength))


def translate_y(images: Tensor, strength: Tensor) -> Tensor:
    """Shift vertically."""
    return _warp(images, y=2 * SHIFT * _signed(strength))


OPERATIONS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    *(invert, solarise, solarise_add, posterise, autocontrast, equalise),
    *(rotate, shear_x, shear_y, translate_x, translate_y),
)
_ENTRIES = {"xx": (0, 0), "xy": (0, 1), "x": (0, 2), "yx": (1, 0), "yy": (1, 1), "y": (1, 2)}


def _warp(images: Tensor, **entries: Tensor) -> Tensor:
    """Warp by an affine map of coordinates in [-1, 1], grey outside the image."""
    maps = torch.eye(2, 3, device=images.device).repeat(len(images), 1, 1)
    for name, values in entries.items():
        row, column = _ENTRIES[name]
        maps[:, row, column] = values
    grid = affine_grid(maps, list(images.shape), align_corners=False)
    centred = images.float() - GREY  # grid_sample fills with zeros
    warped = grid_sample(centred, grid, "bilinear", "zeros", align_corners=False) + GREY
    return warped.round().clamp(0, 255).to(torch.uint8)


def _each(strength: Tensor) -> Tensor:  # (B,) -> (B, 1, 1, 1)
    return strength[:, None, None, None]


def _signed(strength: Tensor) -> Tensor:
    """Negate every second strength: images come in random order."""
    signs = torch.where(torch.arange(len(strength), device=strength.device) % 2 == 0, 1, -1)
    return signs * strength
