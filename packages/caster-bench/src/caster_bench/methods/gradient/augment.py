"""CoTTA's augmentations, of a whole batch at once: colours, a small affine map, blur and noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

REACH = 2  # pixels a blur looks to either side


def brighten(images: Tensor, factor: float) -> Tensor:  # (B, C, H, W), as all below
    """All pixels times a factor."""
    return (images * factor).clamp(0, 1)


def contrast(images: Tensor, factor: float) -> Tensor:
    """Away from every image's mean grey by a factor."""
    mean = grey(images).mean((1, 2, 3), keepdim=True)
    return (factor * images + (1 - factor) * mean).clamp(0, 1)


def saturate(images: Tensor, factor: float) -> Tensor:
    """Away from every pixel's grey by a factor."""
    return (factor * images + (1 - factor) * grey(images)).clamp(0, 1)


def turn_hue(images: Tensor, turn: float) -> Tensor:
    """Colours turned on the circle, value and chroma kept; nothing without three channels.

    >>> red = torch.tensor([1.0, 0.0, 0.0]).reshape(1, 3, 1, 1)
    >>> turn_hue(red, 1 / 3).flatten().round().tolist()  # green
    [0.0, 1.0, 0.0]
    """
    if images.shape[1] != 3:
        return images
    red, green, blue = images.chunk(3, dim=1)
    value = images.amax(1, keepdim=True)
    chroma = value - images.amin(1, keepdim=True)
    some = torch.where(chroma > 0, chroma, 1)  # a grey has no hue, and stays as it is
    from_green = torch.where(value == green, (blue - red) / some + 2, (red - green) / some + 4)
    sixths = torch.where(value == red, (green - blue) / some, from_green)
    place = torch.tensor([5.0, 3.0, 1.0], device=images.device).reshape(3, 1, 1)
    k = (place + sixths + 6 * turn) % 6
    return value - chroma * torch.minimum(k, 4 - k).clamp(0, 1)


def raise_to(images: Tensor, gamma: float) -> Tensor:
    """Pixels to a power; not quite from 0, as in the reference."""
    return images.clamp(1e-8, 1) ** gamma


def grey(images: Tensor) -> Tensor:  # (B, 1, H, W)
    """How bright pixels are: red, green and blue by their weight, other channels by their mean."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    red, green, blue = images.chunk(3, dim=1)
    return 0.2989 * red + 0.587 * green + 0.114 * blue


def warp(
    images: Tensor,
    angle: float,
    scale: float,
    shift: tuple[int, int],
    margin: int = 0,
) -> Tensor:  # (B, C, H + 2 margin, W + 2 margin)
    """Images turned and scaled about their centre, then shifted; the edge goes on beyond it.

    With `margin` more pixels on every side.
    """
    height, width = images.shape[2:]
    down = _offsets(height, margin, images.device)[:, None] - shift[1]
    right = _offsets(width, margin, images.device)[None, :] - shift[0]
    cos, sin = math.cos(math.radians(angle)) / scale, math.sin(math.radians(angle)) / scale
    x, y = cos * right + sin * down, cos * down - sin * right  # where a pixel comes from
    grid = torch.stack([2 / width * x, 2 / height * y], dim=2)
    grid = grid.expand(len(images), *grid.shape)
    return grid_sample(images, grid, "bilinear", "border", align_corners=False)


def _offsets(side: int, margin: int, device: torch.device) -> Tensor:
    """Pixel centres, measured from the middle of the image."""
    return torch.arange(-margin, side + margin, device=device) + (0.5 - side / 2)


def blur(images: Tensor, sigma: float) -> Tensor:  # (B, C, H + 4, W + 4) -> (B, C, H, W)
    """Gaussian mean of 5 x 5 pixels, which uses up a margin of two."""
    height, width = (side - 2 * REACH for side in images.shape[2:])
    if sigma == 0:
        return images[:, :, REACH : REACH + height, REACH : REACH + width]
    bell = [math.exp(-0.5 * (k / sigma) ** 2) for k in range(-REACH, REACH + 1)]
    weights = [value / sum(bell) for value in bell]
    # Sums of slices: a convolution may round to TF32.
    rows = reduce(add, (w * images[:, :, i : i + height] for i, w in enumerate(weights)))
    return reduce(add, (w * rows[..., i : i + width] for i, w in enumerate(weights)))


COLOURS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "brightness": brighten,
    "contrast": contrast,
    "saturation": saturate,
    "hue": turn_hue,
    "gamma": raise_to,
}


@dataclass(frozen=True)
class Augmentation:
    """One augmentation, the same for every image of a batch; as constructed it changes nothing.

    Ranges and order are those of CoTTA's reference code. That pads an image by its edge, turns,
    blurs and crops it; here the same pixels come from one map of the image itself.

    >>> Augmentation(flip=True)(torch.tensor([[[[0.25, 0.5]]]])).tolist()
    [[[[0.5, 0.25]]]]
    """

    brightness: float = 1.0
    contrast: float = 1.0
    saturation: float = 1.0
    hue: float = 0.0  # turns of the colour circle
    gamma: float = 1.0
    order: tuple[str, ...] = tuple(COLOURS)  # of the five above
    angle: float = 0.0  # degrees, clockwise
    scale: float = 1.0
    shift: tuple[int, int] = (0, 0)  # pixels, to the right and down
    blur: float = 0.0  # standard deviation, pixels
    flip: bool = False  # left to right
    noise: float = 0.0  # standard deviation
    seed: int = 0  # of the noise

    @classmethod
    def draw(cls, generator: torch.Generator, height: int, width: int) -> Self:
        """One at random; the generator is on the CPU, so that all devices draw the same."""
        draws = iter(torch.rand(10, generator=generator).tolist())

        def between(low: float, high: float) -> float:
            return low + (high - low) * float(next(draws))

        # A sixteenth of the image as the reference pads it, by half a side all around.
        right, down = ((side + side // 2 * 2) / 16 for side in (width, height))
        order = torch.randperm(len(COLOURS), generator=generator).tolist()
        return cls(
            brightness=between(0.6, 1.4),
            contrast=between(0.7, 1.3),
            saturation=between(0.5, 1.5),
            hue=between(-0.06, 0.06),
            gamma=between(0.7, 1.3),
            order=tuple(tuple(COLOURS)[place] for place in order),
            angle=between(-15.0, 15.0),
            scale=between(0.9, 1.1),
            shift=(round(between(-right, right)), round(between(-down, down))),
            blur=between(0.001, 0.5),
            flip=bool(torch.rand((), generator=generator) < 0.5),
            noise=0.005,
            seed=draw_seed(generator),
        )

    def __call__(self, images: Tensor) -> Tensor:  # (B, C, H, W) pixels in [0, 1], in and out
        """Every image augmented."""
        for colour in self.order:
            images = COLOURS[colour](images, getattr(self, colour))
        images = blur(warp(images, self.angle, self.scale, self.shift, REACH), self.blur)
        if self.flip:
            images = images.flip(3)
        if self.noise > 0:
            own = torch.Generator(images.device).manual_seed(self.seed)
            drawn = torch.randn(images.shape, generator=own, device=images.device)
            images = images + self.noise * drawn
        return images.clamp(0, 1)


def draw_seed(generator: torch.Generator) -> int:
    """A seed for what is drawn in bulk, on the device that needs it."""
    return int(torch.randint(2**62, (), generator=generator))
