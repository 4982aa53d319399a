"""Motion blur as ImageMagick defines it, without ImageMagick."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from caster_bench.data.corruptions.make import Values

Floats = NDArray[np.float64]


def motion_blur(
    images: Values,
    constants: tuple[float, float],  # radius and sigma
    rngs: Sequence[np.random.Generator],
) -> Values:
    """Smeared along a line, at an angle of -45 to 45 degrees from the horizontal.

    The result is rounded to whole bytes: the reference takes it from an 8-bit PNG, so the
    truncation at the end must not darken it.

    >>> grey = np.full((1, 32, 32, 3), 0.2, dtype=np.float32)
    >>> bool((motion_blur(grey, (6, 1), [np.random.default_rng(0)]) == grey).all())
    True
    """
    angles = np.array([rng.uniform(-45, 45) for rng in rngs])
    blurred = smeared(images, *constants, angles)
    rounded: Values = np.rint(blurred * np.float32(255)) / np.float32(255)
    return rounded


def smeared(
    images: Values,  # (n, H, W, C)
    radius: float,
    sigma: float,
    angles: Floats,  # (n,) degrees, clockwise from the right, as rows count downwards
) -> Values:
    """A weighted sum of pixels along a line that starts at each pixel.

    As in ImageMagick's `MotionBlurImage`: each step goes to the nearest pixel, and past an edge
    the pixels of the edge go on.
    """
    weights = half_gaussian(radius, sigma)
    reach = len(weights) - 1
    edges = ((0, 0), (reach, reach), (reach, reach), (0, 0))
    padded = np.pad(images, edges, mode="edge")
    height, width = images.shape[1:3]
    result = np.empty_like(images)
    term = np.empty_like(images[0])
    for image, total, angle in zip(padded, result, np.deg2rad(angles), strict=True):
        steps = np.arange(len(weights))
        rows = reach + nearest(steps * np.sin(angle))
        columns = reach + nearest(steps * np.cos(angle))
        total[...] = 0
        for weight, row, column in zip(weights, rows, columns, strict=True):
            np.multiply(image[row : row + height, column : column + width], weight, out=term)
            total += term
    return result


def half_gaussian(radius: float, sigma: float) -> NDArray[np.float32]:  # (2 * radius + 1,)
    """The weights of a line: half a Gaussian that is heaviest at the pixel itself."""
    steps = np.arange(2 * math.ceil(radius) + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    weights /= weights.sum()
    return np.asarray(weights, dtype=np.float32)


def nearest(values: Floats) -> NDArray[np.int64]:
    """The nearest whole numbers; of two, the lower."""
    return np.ceil(values - 0.5).astype(np.int64)
