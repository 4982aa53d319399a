"""Digital corruptions: contrast, saturation, elastic deformation, pixelation and JPEG."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter1d

from caster.errors import CasterError
from caster_bench.data.corruptions.constants import Rngs, Values

if TYPE_CHECKING:
    from PIL.Image import Image

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


def contrast(images: Values, factor: float, rngs: Rngs) -> Values:
    """Move every channel towards its mean over the image."""
    # Integers have the same sum in any order, so the result does not depend on the batch.
    sums = _levels(images).sum(axis=(1, 2), keepdims=True, dtype=np.int64)
    mean: Values = (sums / (255 * images.shape[1] * images.shape[2])).astype(np.float32)
    return (images - mean) * np.float32(factor) + mean


def saturate(
    images: Values,  # (n, H, W, 3)
    constants: tuple[float, float],  # factor and offset of HSV's saturation
    rngs: Rngs,
) -> Values:
    """Change the saturation of HSV, keeping hue and value; grey counts as hue red."""
    factor, offset = (np.float32(constant) for constant in constants)
    value = channel_maximum(images)
    below = value - images
    depth = channel_maximum(below)  # the saturation is depth / value
    saturation: Values = np.divide(depth, value, out=np.zeros_like(value), where=value > 0)
    deeper: Values = value * np.clip(saturation * factor + offset, 0, 1)
    scale: Values = np.divide(deeper, depth, out=np.zeros_like(depth), where=depth > 0)
    red = np.array([0, 1, 1], dtype=np.float32)
    return value - np.where(depth > 0, below * scale, deeper * red)


def channel_maximum(values: Values) -> Values:  # (n, H, W, 1)
    """Take the maximum of the three channels; `max` takes ten times as long on so short an axis."""
    return np.maximum(np.maximum(values[..., :1], values[..., 1:2]), values[..., 2:])


# Elastic deformation


def elastic_transform(
    images: Values,  # (n, H, W, 3)
    constants: tuple[float, float, float],  # length and sigma of the displacement, corner shift
    rngs: Rngs,
) -> Values:
    """Apply a random affine map, then displace every pixel by a smooth random field.

    Both resample bilinearly. Beyond the border the image is mirrored: the affine map does not
    repeat border pixels, the displacement does, as published. The displacement is in float64, so
    that the threads of a matrix product cannot change a pixel. OpenCV, which the reference calls,
    rounds the coordinates of the affine map to 1/32 of a pixel; here they are exact.

    >>> grey = np.full((1, 8, 9, 3), 0.5, dtype=np.float32)
    >>> bool((elastic_transform(grey, (3, 2, 1), [np.random.default_rng(0)]) == grey).all())
    True
    """
    length, sigma, shift = constants
    _, height, width, _ = images.shape
    rows, columns = _affine_map(height, width, shift, rngs)
    images = _bilinear(images, rows, columns, mirrored)
    if length == 0:  # CIFAR-C's severity 1 is the affine map alone
        return images
    noise = np.stack([rng.uniform(-1, 1, size=(2, height, width)) for rng in rngs])
    field = length * (_smoothing(height, sigma) @ noise @ _smoothing(width, sigma).T)
    y, x = np.ogrid[:height, :width]
    return _bilinear(images, y + field[:, 1], x + field[:, 0], reflected)


def _affine_map(
    height: int, width: int, shift: float, rngs: Rngs
) -> tuple[Floats, Floats]:  # (n, H, W) rows and columns
    """Compute source coordinates of the map that shifts three corners of the centre at random."""
    x, y = width // 2, height // 2
    square = max(min(height, width) // 3, 1)
    corners = np.array(
        [[x + square, y + square], [x + square, y - square], [x - square, y - square]]
    )
    moved = corners + np.stack([rng.uniform(-shift, shift, size=(3, 2)) for rng in rngs])
    ones = np.ones((len(moved), 3, 1))
    back = np.linalg.solve(np.concatenate([moved, ones], axis=2), corners)  # (n, 3, 2)
    rows, columns = np.ogrid[:height, :width]
    by_x, by_y, by_one = back.transpose(1, 2, 0)[..., np.newaxis, np.newaxis]  # (2, n, 1, 1) each
    lefts, tops = columns * by_x + rows * by_y + by_one
    return tops, lefts


def _bilinear(
    images: Values,  # (n, H, W, 3)
    rows: Floats,  # (n, H, W), any numbers
    columns: Floats,  # (n, H, W), any numbers
    fold: Callable[[Indices, int], Indices],
) -> Values:
    """Sample the images between and beyond their pixels."""
    count, height, width, _ = images.shape
    tops, lefts = np.floor(rows), np.floor(columns)
    down = (rows - tops).astype(np.float32)[..., np.newaxis]
    right = (columns - lefts).astype(np.float32)[..., np.newaxis]
    top, left = tops.astype(np.int64), lefts.astype(np.int64)
    near, far = fold(left, width), fold(left + 1, width)
    pixels = images.reshape(-1, 3)
    first = height * np.arange(count)[:, np.newaxis, np.newaxis]

    def along(row: Indices) -> Values:
        start = (first + fold(row, height)) * width
        one: Values = pixels.take(start + near, axis=0)
        other: Values = pixels.take(start + far, axis=0)
        return one + (other - one) * right

    upper = along(top)
    return upper + (along(top + 1) - upper) * down


def mirrored(index: Indices, side: int) -> Indices:
    """Fold indices at the border without repeating its pixel: c b | a b c | b a.

    >>> mirrored(np.arange(-3, 5), 3)
    array([1, 2, 1, 0, 1, 2, 1, 0])
    """
    last = side - 1
    period = max(2 * last, 1)  # a side of one pixel has nothing but it
    return abs((index + last) % period - last)


def reflected(index: Indices, side: int) -> Indices:
    """Fold indices at the border, repeating its pixel: c b a | a b c | c b a.

    >>> reflected(np.arange(-3, 6), 3)
    array([2, 1, 0, 0, 1, 2, 2, 1, 0])
    """
    return mirrored(2 * index + 1, 2 * side + 1) >> 1  # mirrored half a pixel beyond the border


@lru_cache(maxsize=8)
def _smoothing(side: int, sigma: float) -> Floats:  # (side, side)
    """Build the Gaussian filter as a matrix: the widest spans four sides, in one product."""
    return np.asarray(gaussian_filter1d(np.eye(side), sigma, axis=0, mode="reflect", truncate=3))


# Pixelation and JPEG, by Pillow


def pixelate(images: Values, factor: float, rngs: Rngs) -> Values:
    """Shrink and enlarge again by box averages."""
    image = require_pillow()
    height, width = images.shape[1:3]
    small = max(int(width * factor), 1), max(int(height * factor), 1)

    def blocks(pixels: Image) -> Image:
        box = image.Resampling.BOX
        return pixels.resize(small, box).resize((width, height), box)

    return _each(images, blocks)


def jpeg_compression(images: Values, quality: int, rngs: Rngs) -> Values:
    """Encode as JPEG and decode."""
    image = require_pillow()

    def recoded(pixels: Image) -> Image:
        file = BytesIO()
        pixels.save(file, "JPEG", quality=quality)
        decoded: Image = image.open(file, formats=["JPEG"])
        return decoded

    return _each(images, recoded)


def _each(images: Values, change: Callable[[Image], Image]) -> Values:
    """Change images one by one with Pillow."""
    image = require_pillow()
    levels = _levels(images)
    for pixels in levels:
        pixels[...] = change(image.fromarray(pixels))
    return np.divide(levels, 255, dtype=np.float32)


def _levels(images: Values) -> NDArray[np.uint8]:
    """Recover the 256 levels of the input."""
    return np.rint(images * 255).astype(np.uint8)


def require_pillow() -> Any:
    """Import `PIL.Image`, or say how to install it."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise CasterError(
            "pixelate and jpeg_compression need Pillow: pip install 'caster-tta[images]'"
        ) from None
    return Image
