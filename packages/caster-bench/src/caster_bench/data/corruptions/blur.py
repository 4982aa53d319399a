"""Blurs: Gaussian, defocus and frosted glass; motion and zoom have modules of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage, signal

from caster_bench.data.corruptions.make import Values
from caster_bench.data.corruptions.motion import motion_blur
from caster_bench.data.corruptions.zoom import zoom_blur

__all__ = ["defocus_blur", "gaussian_blur", "glass_blur", "motion_blur", "zoom_blur"]

Floats = NDArray[np.float64]
Rngs = Sequence[np.random.Generator]
FEW = 60  # weights of a kernel up to which adding is faster than Fourier transforms


def gaussian_blur(
    images: Values,
    constants: float,  # sigma
    rngs: Rngs,
) -> Values:
    """A Gaussian of the given sigma, cut at four sigmas; the edges go on as they are.

    >>> grey = np.full((1, 8, 8, 3), 0.5, dtype=np.float32)
    >>> bool((gaussian_blur(grey, 1.0, []) == grey).all())
    True
    """
    return blurred(images, constants)


def defocus_blur(
    images: Values,
    constants: tuple[float, float],  # radius of the disk, sigma of the blur of its edge
    rngs: Rngs,
) -> Values:
    """A lens out of focus: every point becomes a disk. The edges are mirrored.

    >>> dot = np.zeros((1, 9, 9, 3), dtype=np.float32)
    >>> dot[0, 4, 4] = 1
    >>> (defocus_blur(dot, (1, 0.1), [])[0, 3:6, 3:6, 0] * 5).round(2)
    array([[0., 1., 0.],
           [1., 1., 1.],
           [0., 1., 0.]], dtype=float32)
    """
    kernel = disk(*constants)
    if np.count_nonzero(kernel) <= FEW:
        few: Values = ndimage.correlate(images, kernel[np.newaxis, ..., np.newaxis], mode="mirror")
        return few
    reach = kernel.shape[0] // 2
    result = np.empty_like(images)
    for image, soft in zip(images, result, strict=True):  # one by one: the same bytes always
        padded = np.pad(image.astype(np.float64), ((reach,) * 2, (reach,) * 2, (0, 0)), "reflect")
        soft[...] = signal.fftconvolve(padded, kernel[..., np.newaxis], "valid", axes=(0, 1))
    return result


def disk(radius: float, sigma: float) -> Floats:
    """The weights of a disk whose jagged edge a small Gaussian has softened.

    The square it is drawn on has 17 pixels a side, or what a radius above 8 needs, and the small
    Gaussian mirrors its border. So the weights of a disk that reaches the border add up to more
    than one (1.3 % at a radius of 8): the published images are that much brighter.
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


def glass_blur(
    images: Values,
    constants: tuple[float, int, int],  # sigma, longest shift, rounds
    rngs: Rngs,
) -> Values:
    """Seen through frosted glass: blurred, pixels displaced at random, blurred again.

    The reference means to swap each pixel with a neighbour. Its two pixels are views of one array,
    so that what happens is a copy: the pixel takes the neighbour's colour and the neighbour keeps
    it. The published images were made that way, and so are these.

    >>> grey = np.full((1, 16, 16, 3), 0.2, dtype=np.float32)
    >>> bool((glass_blur(grey, (0.4, 1, 2), [np.random.default_rng(0)]) == grey).all())
    True
    """
    sigma, reach, rounds = constants
    # Whole bytes, as the reference truncates them between its two blurs.
    values = np.floor(blurred(images, sigma) * np.float32(255)) / np.float32(255)
    count, height, width, channels = values.shape
    pixels = values.reshape(count, height * width, channels)
    for image, rng in zip(pixels, rngs, strict=True):
        sources = np.arange(height * width)
        for _ in range(rounds):
            sources = sources[displaced(height, width, reach, rng)]
        image[...] = image[sources]
    return blurred(values, sigma)


def displaced(
    height: int, width: int, reach: int, rng: np.random.Generator
) -> NDArray[np.int64]:  # (H W,)
    """Which pixel each one has the colour of, after a round of displacement.

    One after another from the last pixel to the first, each takes the colour of one up to `reach`
    before or `reach - 1` after it, on both axes. Pixels near the borders stay.
    """
    rows = np.arange(height - reach, reach, -1)
    columns = np.arange(width - reach, reach, -1)
    shifts = rng.integers(-reach, reach, size=(len(rows), len(columns), 2))
    places = (rows[:, np.newaxis] * width + columns).ravel()
    sources = np.arange(height * width)
    sources[places] += (shifts[..., 0] + shifts[..., 1] * width).ravel()
    inside = np.zeros(height * width, dtype=np.bool_)
    inside[places] = True
    # A pixel further on had its turn before: its colour is that of its own source. Chains of such
    # sources are followed all at once, each step twice as far as the one before.
    done_before = inside & inside[sources] & (sources > np.arange(height * width))
    while done_before.any():
        after = sources[sources]
        done_after = done_before[sources]
        sources = np.where(done_before, after, sources)
        done_before &= done_after
    return sources


def blurred(
    images: NDArray[Any],  # (n, H, W) or (n, H, W, C)
    sigma: float,
) -> NDArray[Any]:
    """Rows and columns under a Gaussian, images and channels apart."""
    result: NDArray[Any] = ndimage.gaussian_filter(
        images, (sigma, sigma), mode="nearest", truncate=4.0, axes=(1, 2)
    )
    return result
