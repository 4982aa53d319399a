"""What RandAugment does to images: one small function an operation, a strength an image.

Images are uint8 (B, C, H, W), strengths (B,) from 0 to 1, where 0 leaves an image as it is if
the operation has a strength at all. Brightness, contrast, colour and sharpness, which belong to
RandAugment, are left out: under other names they are corruptions that the checkpoints are to be
tested on, and must not have met.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import affine_grid, grid_sample

if TYPE_CHECKING:
    from torch import Tensor

GREY = 128  # beyond the edge
TURN, SHEAR, SHIFT = 30.0, 0.3, 0.3  # degrees; pixels a pixel; of a side
ADDED = 110.0  # to dark pixels
LEVELS = 256

Operation = Callable[["Tensor", "Tensor"], "Tensor"]


def invert(images: Tensor, strength: Tensor) -> Tensor:
    """A negative."""
    return 255 - images


def solarise(images: Tensor, strength: Tensor) -> Tensor:
    """A negative of the bright pixels: from white alone to all of them."""
    threshold = LEVELS * (1 - _each(strength))
    return torch.where(images < threshold, images, 255 - images)


def solarise_add(images: Tensor, strength: Tensor) -> Tensor:
    """Dark pixels made brighter."""
    brighter = (images + (ADDED * _each(strength)).int()).clamp(max=255).to(torch.uint8)
    return torch.where(images < LEVELS // 2, brighter, images)


def posterise(images: Tensor, strength: Tensor) -> Tensor:
    """The highest bits alone: 8 of them down to 4."""
    dropped = (4 * _each(strength)).round().int()
    return ((images.int() >> dropped) << dropped).to(torch.uint8)


def autocontrast(images: Tensor, strength: Tensor) -> Tensor:
    """Every channel stretched from black to white."""
    low, high = (part[..., None, None].int() for part in images.flatten(2).aminmax(dim=2))
    stretched = (images.int() - low) * 255 // (high - low).clamp(min=1)
    return torch.where(high > low, stretched, images).to(torch.uint8)


def equalise(images: Tensor, strength: Tensor) -> Tensor:
    """Every channel with as many dark as bright pixels, by Pillow's rule."""
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
    """Turned about the middle, every second image to the other side."""
    angle = math.radians(TURN) * _signed(strength)
    return _moved(images, xx=angle.cos(), xy=-angle.sin(), yx=angle.sin(), yy=angle.cos())


def shear_x(images: Tensor, strength: Tensor) -> Tensor:
    """Rows shifted the more, the further from the middle."""
    return _moved(images, xy=SHEAR * _signed(strength))


def shear_y(images: Tensor, strength: Tensor) -> Tensor:
    """Columns shifted the more, the further from the middle."""
    return _moved(images, yx=SHEAR * _signed(strength))


def translate_x(images: Tensor, strength: Tensor) -> Tensor:
    """Shifted sideways."""
    return _moved(images, x=2 * SHIFT * _signed(strength))


def translate_y(images: Tensor, strength: Tensor) -> Tensor:
    """Shifted up or down."""
    return _moved(images, y=2 * SHIFT * _signed(strength))


OPERATIONS: tuple[Operation, ...] = (
    invert,
    solarise,
    solarise_add,
    posterise,
    autocontrast,
    equalise,
    rotate,
    shear_x,
    shear_y,
    translate_x,
    translate_y,
)


def _moved(images: Tensor, **parts: Tensor) -> Tensor:
    """Every pixel from where an affine map of coordinates in [-1, 1] says, grey from outside."""
    maps = torch.eye(2, 3, device=images.device).repeat(len(images), 1, 1)
    context = {"xx": (0, 0), "xy": (0, 1), "x": (0, 2), "yx": (1, 0), "yy": (1, 1), "y": (1, 2)}
    for name, values in parts.items():
        row, column = context[name]
        maps[:, row, column] = values
    grid = affine_grid(maps, list(images.shape), align_corners=False)
    centred = images.float() - GREY  # zeros come from outside
    moved = grid_sample(centred, grid, "bilinear", "zeros", align_corners=False) + GREY
    return moved.round().clamp(0, 255).to(torch.uint8)


def _each(strength: Tensor) -> Tensor:  # (B,) -> (B, 1, 1, 1)
    return strength[:, None, None, None]


def _signed(strength: Tensor) -> Tensor:
    """Every second one negative: images come in random order."""
    return torch.where(torch.arange(len(strength), device=strength.device) % 2 == 0, 1, -1) * (
        strength
    )
