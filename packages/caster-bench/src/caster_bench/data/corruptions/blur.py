"""Blurs: Gaussian, defocus, frosted glass, motion and zoom."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage, signal, sparse

from caster_bench.data.corruptions.constants import Rngs, Values

Floats = NDArray[np.float64]
FEW_WEIGHTS = 60  # of a kernel: up to here summing is faster than Fourier transforms
CHUNK_COLUMNS = 256  # of the zoom product: what fits a core's cache at 32 pixels


def gaussian_blur(images: Values, sigma: float, rngs: Rngs) -> Values:
    """Apply a Gaussian, cut at four sigmas, with edge pixels repeated.

    >>> grey = np.full((1, 8, 8, 3), 0.5, dtype=np.float32)
    >>> bool((gaussian_blur(grey, 1.0, []) == grey).all())
    True
    """
    return gaussian_filter(images, sigma)


def gaussian_filter(
    images: NDArray[Any],  # (n, H, W) or (n, H, W, C)
    sigma: float,
) -> NDArray[Any]:
    """Apply a Gaussian to rows and columns, separately per image and channel."""
    result: NDArray[Any] = ndimage.gaussian_filter(
        images, (sigma, sigma), mode="nearest", truncate=4.0, axes=(1, 2)
    )
    return result


# Defocus


def defocus_blur(
    images: Values,
    constants: tuple[float, float],  # disk radius, sigma of the blur of its edge
    rngs: Rngs,
) -> Values:
    """Blur by a disk, as a lens out of focus, with mirrored edges.

    >>> dot = np.zeros((1, 9, 9, 3), dtype=np.float32)
    >>> dot[0, 4, 4] = 1
    >>> (defocus_blur(dot, (1, 0.1), [])[0, 3:6, 3:6, 0] * 5).round(2)
    array([[0., 1., 0.],
           [1., 1., 1.],
           [0., 1., 0.]], dtype=float32)
    """
    kernel = disk(*constants)
    if np.count_nonzero(kernel) <= FEW_WEIGHTS:
        few: Values = ndimage.correlate(images, kernel[np.newaxis, ..., np.newaxis], mode="mirror")
        return few
    reach = kernel.shape[0] // 2
    result = np.empty_like(images)
    for image, soft in zip(images, result, strict=True):  # one by one, so bytes never change
        padded = np.pad(image.astype(np.float64), ((reach,) * 2, (reach,) * 2, (0, 0)), "reflect")
        soft[...] = signal.fftconvolve(padded, kernel[..., np.newaxis], "valid", axes=(0, 1))
    return result


def disk(radius: float, sigma: float) -> Floats:
    """Compute the weights of a disk whose jagged edge is softened by a small Gaussian.

    It is drawn on a square of 17 pixels a side, or more for a radius above 8, and the Gaussian
    mirrors its border. So the weights of a disk that touches the border sum to more than one (1.3 %
    at a radius of 8), and the published images are that much brighter.
    """
    reach, half = (8, 1) if radius <= 8 else (int(radius), 2)
    steps = np.arange(-reach, reach + 1)
    jagged = (steps[:, np.newaxis] ** 2 + steps**2 <= radius**2).astype(np.float64)
    soft = np.exp(-(np.arange(-half, half + 1) ** 2) / (2 * sigma**2))
    soft /= soft.sum()
    kernel: Floats = jagged / jagged.sum()
    for axis in (0, 1):
        kernel = ndimage.correlate1d(kernel, soft, axis=axis, mode="mirror")
    return kernel


# Frosted glass


def glass_blur(
    images: Values,
    constants: tuple[float, int, int],  # sigma, longest shift, rounds
    rngs: Rngs,
) -> Values:
    """Blur, displace pixels at random, and blur again.

    The reference means to swap each pixel with a neighbour, but its two pixels are views of one
    array, so it copies: the pixel takes the neighbour's colour, and the neighbour keeps it. The
    published images were made that way, and so are these.

    >>> grey = np.full((1, 16, 16, 3), 0.2, dtype=np.float32)
    >>> bool((glass_blur(grey, (0.4, 1, 2), [np.random.default_rng(0)]) == grey).all())
    True
    """
    sigma, reach, rounds = constants
    # Integers, as the reference truncates to bytes between its two blurs.
    values = np.floor(gaussian_filter(images, sigma) * np.float32(255)) / np.float32(255)
    count, height, width, channels = values.shape
    pixels = values.reshape(count, height * width, channels)
    for image, rng in zip(pixels, rngs, strict=True):
        sources = np.arange(height * width)
        for _ in range(rounds):
            sources = sources[displaced(height, width, reach, rng)]
        image[...] = image[sources]
    return gaussian_filter(values, sigma)


def displaced(
    height: int, width: int, reach: int, rng: np.random.Generator
) -> NDArray[np.int64]:  # (H W,)
    """Return the pixel that each pixel takes its colour from in one round of displacement.

    From the last pixel to the first, each takes the colour of one up to `reach` before or
    `reach - 1` after it, on both axes. Pixels near the borders stay.
    """
    rows = np.arange(height - reach, reach, -1)
    columns = np.arange(width - reach, reach, -1)
    shifts = rng.integers(-reach, reach, size=(len(rows), len(columns), 2))
    moved = (rows[:, np.newaxis] * width + columns).ravel()
    sources = np.arange(height * width)
    sources[moved] += (shifts[..., 0] + shifts[..., 1] * width).ravel()
    inside = np.zeros(height * width, dtype=np.bool_)
    inside[moved] = True
    # A source further on was displaced before, so its colour is that of its own source. Follow
    # all such chains at once, doubling the distance in each step.
    chained = inside & inside[sources] & (sources > np.arange(height * width))
    while chained.any():
        after, chained_after = sources[sources], chained[sources]
        sources = np.where(chained, after, sources)
        chained &= chained_after
    return sources


# Motion


def motion_blur(
    images: Values,
    constants: tuple[float, float],  # radius, sigma
    rngs: Rngs,
) -> Values:
    """Smear along a line, -45 to 45 degrees from the horizontal.

    The result is rounded to bytes: the reference reads it from an 8-bit PNG, and the truncation at
    the end must not darken it.

    >>> grey = np.full((1, 32, 32, 3), 0.2, dtype=np.float32)
    >>> bool((motion_blur(grey, (6, 1), [np.random.default_rng(0)]) == grey).all())
    True
    """
    angles = np.array([rng.uniform(-45, 45) for rng in rngs])
    smeared = smear(images, *constants, angles)
    rounded: Values = np.rint(smeared * np.float32(255)) / np.float32(255)
    return rounded


def smear(
    images: Values,  # (n, H, W, C)
    radius: float,
    sigma: float,
    angles: Floats,  # (n,) degrees, clockwise from the right, as rows count downwards
) -> Values:
    """Sum weighted pixels along a line that starts at each pixel.

    As ImageMagick's `MotionBlurImage`: each step goes to the nearest pixel, and edge pixels repeat.
    """
    weights = half_gaussian(radius, sigma)
    reach = len(weights) - 1
    edges = ((0, 0), (reach, reach), (reach, reach), (0, 0))
    padded = np.pad(images, edges, mode="edge")
    height, width = images.shape[1:3]
    result = np.empty_like(images)
    term = np.empty_like(images[0])
    steps = np.arange(len(weights))
    for image, total, angle in zip(padded, result, np.deg2rad(angles), strict=True):
        rows = reach + _nearest(steps * np.sin(angle))
        columns = reach + _nearest(steps * np.cos(angle))
        total[...] = 0
        for weight, row, column in zip(weights, rows, columns, strict=True):
            np.multiply(image[row : row + height, column : column + width], weight, out=term)
            total += term
    return result


def half_gaussian(radius: float, sigma: float) -> NDArray[np.float32]:  # (2 * radius + 1,)
    """Compute the weights of a line: half a Gaussian, heaviest at the pixel itself."""
    steps = np.arange(2 * math.ceil(radius) + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    weights /= weights.sum()
    return np.asarray(weights, dtype=np.float32)


def _nearest(values: Floats) -> NDArray[np.int64]:
    """Round to the nearest integer, ties down."""
    return np.ceil(values - 0.5).astype(np.int64)


# Zoom: enlargement about the centre, as one sparse matrix over the pixels


def zoom_blur(
    images: Values,
    constants: tuple[float, float],  # end and step of the factors
    rngs: Rngs,
) -> Values:
    """Average the image and its enlargements by 1, 1 + step, ... up to the end.

    `numpy.arange` counts the factors as in the reference, where rounding includes some ends (1.06
    and 1.11 in steps of 0.01) and excludes others. Factor 1 is among them, so the image itself
    counts twice.

    >>> grey = np.full((1, 8, 8, 3), 0.5, dtype=np.float32)
    >>> bool((zoom_blur(grey, (1.06, 0.01), []) == grey).all())
    True
    """
    end, step = constants
    factors = (1.0, *(float(factor) for factor in np.arange(1, end, step)))
    return _apply(_mean_zoom(images.shape[1], images.shape[2], factors), images)


def zoom(
    layers: Floats,  # (n, H, W)
    factor: float,
) -> Floats:  # (n, H, W)
    """Enlarge the centre of each layer to its full size."""
    matrix = _mean_zoom(layers.shape[1], layers.shape[2], (float(factor),))
    return _apply(matrix, layers[..., np.newaxis])[..., 0]


def _apply(matrix: Any, images: NDArray[Any]) -> NDArray[Any]:
    """Multiply every channel of every image (n, H, W, C) by a matrix (H W, H W)."""
    count, height, width, channels = images.shape
    result = np.empty_like(images)
    group = max(1, CHUNK_COLUMNS // channels)
    for start in range(0, count, group):
        some = images[start : start + group]
        # In double precision, so that flat regions keep their exact byte when truncated later.
        columns = some.transpose(1, 2, 0, 3).reshape(height * width, -1).astype(np.float64)
        product = (matrix @ columns).reshape(height, width, -1, channels)
        result[start : start + group] = product.transpose(2, 0, 1, 3)
    return result


@lru_cache(maxsize=2)  # tens of megabytes at 224 pixels
def _mean_zoom(height: int, width: int, factors: tuple[float, ...]) -> Any:
    """Build the mean of several enlargements as a sparse matrix (H W, H W)."""
    total = sparse.csr_array((height * width, height * width))
    for factor in factors:
        rows, columns = axis_zoom(height, factor), axis_zoom(width, factor)
        total = total + sparse.kron(rows, columns, format="csr")
    return total / len(factors)


def axis_zoom(size: int, factor: float) -> Any:
    """Build the linear enlargement of one axis as a sparse matrix (size, size).

    The middle `ceil(size / factor)` pixels become `round(that * factor)`, with the first and last
    kept in position (as `scipy.ndimage.zoom` of order 1), and both ends are trimmed to size.
    """
    crop = math.ceil(size / factor)
    enlarged = round(crop * factor)
    wanted = np.arange(size) + (enlarged - size) // 2
    at = wanted * ((crop - 1) / max(enlarged - 1, 1))
    below = np.minimum(at.astype(np.int64), max(crop - 2, 0))
    share = at - below  # of the neighbour above
    first = (size - crop) // 2 + below
    above = np.minimum(first + 1, size - 1)
    rows = np.arange(size)
    weights = np.concatenate([1 - share, share])
    kept = weights != 0
    where = (np.tile(rows, 2)[kept], np.concatenate([first, above])[kept])
    return sparse.csr_array((weights[kept], where), shape=(size, size))
