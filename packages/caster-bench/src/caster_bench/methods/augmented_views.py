"""Random augmentation of preprocessed batches, with the ranges of CoTTA's reference code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import grid_sample, pad

from caster.errors import CasterError
from caster.models.preprocessing import Preprocessing
from caster.models.torch import TorchModel
from caster_bench.methods.gradient_method import GradientMethod
from caster_bench.methods.network import to_device
from caster_bench.methods.source import Source

BLUR_RADIUS = 2  # pixels
Numbers = float | Sequence[float]  # one for all channels, or one per channel


class ImageRange:
    """Validate image batches, and find the values of black and white in them.

    They come from the model's preprocessing if it has one, else from `mean` and `std`, else from
    the smallest and largest value of each batch.
    """

    def __init__(
        self, model: TorchModel, name: str, mean: Numbers | None, std: Numbers | None
    ) -> None:
        self._model = model
        self._name = name
        self._known = self._before_any_batch(mean, std)

    def image_batch(self, images: Any) -> Tensor:  # (B, C, H, W)
        """Move a batch to the model's device; reject what cannot be augmented."""
        batch = to_device(self._model, images)
        if batch.ndim != 4 or not batch.is_floating_point():
            kind = f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
            raise CasterError(
                f"{self._name} augments images of floats (samples, channels, height, width), "
                f"not {kind}"
            )
        channels = batch.shape[1]
        if self._known is not None and self._known.black.numel() not in (1, channels):
            raise CasterError(f"mean and std of {self._name} do not fit {channels} channels")
        return batch

    def of(self, batch: Tensor) -> PixelRange:
        """Values of black and white, on the device of a batch."""
        return PixelRange.of(batch) if self._known is None else self._known.to(batch)

    def _before_any_batch(self, mean: Numbers | None, std: Numbers | None) -> PixelRange | None:
        preprocessing = self._model.preprocessing
        if (mean is None) != (std is None):
            raise CasterError(f"{self._name} needs both mean and std, or neither")
        if mean is None or std is None:
            return None if preprocessing is None else PixelRange.of_preprocessing(preprocessing)
        if preprocessing is not None:
            raise CasterError(
                f"{self._model.name} has a preprocessing: do not pass mean and std to {self._name}"
            )
        if len({len(v) for v in (mean, std) if isinstance(v, Sequence)}) > 1:
            raise CasterError(f"mean and std of {self._name} must have one number per channel")
        scale = PixelRange.normalised(mean, std)
        span = scale.white - scale.black
        if not bool(((span > 0) & span.isfinite()).all()):
            raise CasterError(f"std of {self._name} must be above 0, not {std!r}")
        return scale


@dataclass(eq=False, repr=False, kw_only=True)
class AugmentingMethod(GradientMethod):
    """A gradient-based method that trains on augmented images.

    `mean` and `std` are for models without a preprocessing; see `ImageRange`.
    """

    mean: Numbers | None = None
    std: Numbers | None = None
    seed: int = 0

    def __post_init__(self, source: Source) -> None:
        super().__post_init__(source)
        self._range = ImageRange(self.model, self.name, self.mean, self.std)


@dataclass(frozen=True, eq=False)
class PixelRange:
    """The values of black and white in preprocessed batches.

    >>> normalised = PixelRange.normalised(mean=0.5, std=0.25)
    >>> normalised.pixels(torch.full((1, 3, 1, 1), -1.0)).unique().item()
    0.25
    """

    black: Tensor  # (), (1, 1, 1) or (C, 1, 1)
    white: Tensor
    bgr: bool = False  # channel order is blue, green, red

    @classmethod
    def normalised(cls, mean: Numbers, std: Numbers, largest: float = 1.0) -> Self:
        """The range of (pixel - mean) / std for pixels from 0 to `largest`."""
        shift, by = (torch.tensor(v, dtype=torch.float32).reshape(-1, 1, 1) for v in (mean, std))
        return cls((0 - shift) / by, (largest - shift) / by)

    @classmethod
    def of_preprocessing(cls, preprocessing: Preprocessing) -> Self:
        """The range that a preprocessing produces."""
        known = cls.normalised(preprocessing.mean, preprocessing.std, preprocessing.range)
        return replace(known, bgr=preprocessing.channels == "BGR")

    @classmethod
    def of(cls, batch: Tensor) -> Self:
        """Guess from a batch: its smallest value is black, its largest white."""
        black, white = torch.aminmax(batch.float())
        # A constant batch has no range; any will do.
        return cls(black, torch.where(white > black, white, black + 1))

    def to(self, batch: Tensor) -> Self:
        """Move to the device of a batch."""
        return replace(self, black=self.black.to(batch.device), white=self.white.to(batch.device))

    def pixels(self, batch: Tensor) -> Tensor:  # (B, C, H, W)
        """Convert a batch to RGB pixels in [0, 1], clipped."""
        values = ((batch.float() - self.black) / (self.white - self.black)).clamp(0, 1)
        return values.flip(1) if self.bgr else values

    def values(self, pixels: Tensor, like: Tensor) -> Tensor:  # (B, C, H, W)
        """Convert pixels back to the values and dtype of a batch."""
        pixels = pixels.flip(1) if self.bgr else pixels
        return torch.lerp(self.black, self.white, pixels).to(like.dtype)


@dataclass(frozen=True)
class Augmentation:
    """One augmentation for all images of a batch; the default is the identity.

    Ranges and order are those of CoTTA's reference code, which pads an image by its edge, rotates,
    blurs and crops it. Here the same pixels come from a single warp of the image.

    >>> Augmentation(flip=True)(torch.tensor([[[[0.25, 0.5]]]])).tolist()
    [[[[0.5, 0.25]]]]
    """

    brightness: float = 1.0
    contrast: float = 1.0
    saturation: float = 1.0
    hue: float = 0.0  # turns of the colour circle
    gamma: float = 1.0
    order: tuple[str, ...] = ("brightness", "contrast", "saturation", "hue", "gamma")
    angle: float = 0.0  # degrees, clockwise
    scale: float = 1.0
    shift: tuple[int, int] = (0, 0)  # pixels, to the right and down
    blur: float = 0.0  # standard deviation, pixels
    flip: bool = False  # left to right
    noise: float = 0.0  # standard deviation
    seed: int = 0  # of the noise
    reflect: bool = False  # continue the image as its mirror image, not by its edge

    @classmethod
    def draw(cls, generator: torch.Generator, height: int, width: int) -> Self:
        """Draw at random; the generator is on the CPU, so that all devices draw the same."""
        draws = iter(torch.rand(10, generator=generator).tolist())

        def between(low: float, high: float) -> float:
            return low + (high - low) * float(next(draws))

        # A sixteenth of the image as the reference pads it, by half its side all around.
        right, down = ((side + side // 2 * 2) / 16 for side in (width, height))
        order = torch.randperm(len(COLOURS), generator=generator).tolist()
        return cls(
            brightness=between(0.6, 1.4),
            contrast=between(0.7, 1.3),
            saturation=between(0.5, 1.5),
            hue=between(-0.06, 0.06),
            gamma=between(0.7, 1.3),
            order=tuple(tuple(COLOURS)[index] for index in order),
            angle=between(-15.0, 15.0),
            scale=between(0.9, 1.1),
            shift=(round(between(-right, right)), round(between(-down, down))),
            blur=between(0.001, 0.5),
            flip=bool(torch.rand((), generator=generator) < 0.5),
            noise=0.005,
            seed=draw_seed(generator),
        )

    def __call__(self, images: Tensor) -> Tensor:  # (B, C, H, W), pixels in [0, 1]
        """Augment every image."""
        for colour in self.order:
            images = COLOURS[colour](images, getattr(self, colour))
        margin = BLUR_RADIUS
        if self.reflect:
            half = min(images.shape[2:]) // 2
            images, margin = pad(images, 4 * (half,), "reflect"), margin - half
        images = blur(warp(images, self.angle, self.scale, self.shift, margin), self.blur)
        if self.flip:
            images = images.flip(3)
        if self.noise > 0:
            generator = torch.Generator(images.device).manual_seed(self.seed)
            drawn = torch.randn(images.shape, generator=generator, device=images.device)
            images = images + self.noise * drawn
        return images.clamp(0, 1)


def draw_seed(generator: torch.Generator) -> int:
    """Draw a seed for bulk draws on another device."""
    return int(torch.randint(2**62, (), generator=generator))


def brighten(images: Tensor, factor: float) -> Tensor:  # (B, C, H, W), as all below
    """Multiply all pixels by a factor."""
    return (images * factor).clamp(0, 1)


def contrast(images: Tensor, factor: float) -> Tensor:
    """Scale the difference to each image's mean grey."""
    mean = grey(images).mean((1, 2, 3), keepdim=True)
    return (factor * images + (1 - factor) * mean).clamp(0, 1)


def saturate(images: Tensor, factor: float) -> Tensor:
    """Scale the difference to each pixel's grey."""
    return (factor * images + (1 - factor) * grey(images)).clamp(0, 1)


def rotate_hue(images: Tensor, turn: float) -> Tensor:
    """Rotate hues at constant value and chroma; the identity unless there are three channels.

    >>> red = torch.tensor([1.0, 0.0, 0.0]).reshape(1, 3, 1, 1)
    >>> rotate_hue(red, 1 / 3).flatten().round().tolist()  # green
    [0.0, 1.0, 0.0]
    """
    if images.shape[1] != 3:
        return images
    red, green, blue = images.chunk(3, dim=1)
    value = images.amax(1, keepdim=True)
    chroma = value - images.amin(1, keepdim=True)
    divisor = torch.where(chroma > 0, chroma, 1)  # grey has no hue and stays as it is
    from_green = torch.where(
        value == green, (blue - red) / divisor + 2, (red - green) / divisor + 4
    )
    sixths = torch.where(value == red, (green - blue) / divisor, from_green)
    offset = torch.tensor([5.0, 3.0, 1.0], device=images.device).reshape(3, 1, 1)
    k = (offset + sixths + 6 * turn) % 6
    return value - chroma * torch.minimum(k, 4 - k).clamp(0, 1)


def apply_gamma(images: Tensor, gamma: float) -> Tensor:
    """Raise pixels to a power, clipped just above 0 as in the reference."""
    return images.clamp(1e-8, 1) ** gamma


def grey(images: Tensor) -> Tensor:  # (B, 1, H, W)
    """Luma of RGB images; the channel mean of others."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    red, green, blue = images.chunk(3, dim=1)
    return 0.2989 * red + 0.587 * green + 0.114 * blue


COLOURS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "brightness": brighten,
    "contrast": contrast,
    "saturation": saturate,
    "hue": rotate_hue,
    "gamma": apply_gamma,
}


def warp(
    images: Tensor,
    angle: float,
    scale: float,
    shift: tuple[int, int],
    margin: int = 0,
) -> Tensor:  # (B, C, H + 2 margin, W + 2 margin)
    """Rotate and scale images about their centre, then shift them; edges are replicated.

    `margin` adds pixels on every side, or removes them if it is negative.
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
    """Pixel centres relative to the middle of the image."""
    return torch.arange(-margin, side + margin, device=device) + (0.5 - side / 2)


def blur(images: Tensor, sigma: float) -> Tensor:  # (B, C, H + 4, W + 4) -> (B, C, H, W)
    """Gaussian blur with a 5 x 5 kernel, which consumes a margin of two pixels."""
    radius = BLUR_RADIUS
    height, width = (side - 2 * radius for side in images.shape[2:])
    if sigma == 0:
        return images[:, :, radius : radius + height, radius : radius + width]
    bell = [math.exp(-0.5 * (k / sigma) ** 2) for k in range(-radius, radius + 1)]
    weights = [value / sum(bell) for value in bell]
    # Sums of slices: a convolution may round to TF32.
    rows = reduce(add, (w * images[:, :, i : i + height] for i, w in enumerate(weights)))
    return reduce(add, (w * rows[..., i : i + width] for i, w in enumerate(weights)))
