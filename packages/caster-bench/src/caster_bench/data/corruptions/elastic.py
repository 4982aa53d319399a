"""Images drawn on rubber: a random affine map and a smooth random displacement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter1d

from caster_bench.data.corruptions.make import Values

Rngs = Sequence[np.random.Generator]
Places = NDArray[np.float64]
Indices = NDArray[np.int64]


def elastic_transform(
    images: Values,  # (n, H, W, 3)
    constants: tuple[float, float, float],  # length and sigma of the displacement, shift of corners
    rngs: Rngs,
) -> Values:
    """A random affine map, then every pixel displaced by a smooth random field.

    Both resample bilinearly; beyond its border the image is mirrored, for the affine map without
    repeating the border's pixels and for the displacement with repeating them, as published. The
    displacement is in float64: the threads of a matrix product must not decide a pixel.
    OpenCV, which the reference calls, rounds the places of the affine map to 1/32 of a pixel; here
    they are exact.

    >>> grey = np.full((1, 8, 9, 3), 0.5, dtype=np.float32)
    >>> bool((elastic_transform(grey, (3, 2, 1), [np.random.default_rng(0)]) == grey).all())
    True
    """
    length, sigma, shift = constants
    _, height, width, _ = images.shape
    tops, lefts = _affine_map(height, width, shift, rngs)
    images = _bilinear(images, tops, lefts, mirrored)
    if length == 0:  # the mildest of CIFAR-C is the affine map alone
        return images
    noise = np.stack([rng.uniform(-1, 1, size=(2, height, width)) for rng in rngs])
    field = length * (smoothing(height, sigma) @ noise @ smoothing(width, sigma).T)
    rows, columns = np.ogrid[:height, :width]
    return _bilinear(images, rows + field[:, 1], columns + field[:, 0], reflected)


def _affine_map(
    height: int, width: int, shift: float, rngs: Rngs
) -> tuple[Places, Places]:  # (n, H, W) rows and columns
    """Where pixels come from, if three corners of the middle go to random places nearby."""
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
    rows: Places,  # (n, H, W), anywhere
    columns: Places,  # (n, H, W), anywhere
    fold: Callable[[Indices, int], Indices],
) -> Values:
    """The images at places between and beyond their pixels."""
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


def mirrored(
    index: Any,  # whole numbers, an array or a tensor
    side: int,
) -> Any:  # of the same kind
    """Indices beyond a side folded back, the border's pixel once: c b | a b c | b a.

    >>> mirrored(np.arange(-3, 5), 3)
    array([1, 2, 1, 0, 1, 2, 1, 0])
    """
    last = side - 1
    period = max(2 * last, 1)  # a side of one pixel has nothing but it
    return abs((index + last) % period - last)


def reflected(index: Any, side: int) -> Any:
    """Indices beyond a side folded back, the border's pixel twice: c b a | a b c | c b a.

    >>> reflected(np.arange(-3, 6), 3)
    array([2, 1, 0, 0, 1, 2, 2, 1, 0])
    """
    return mirrored(2 * index + 1, 2 * side + 1) >> 1  # mirrored half a pixel beyond the border


@lru_cache(maxsize=8)
def smoothing(side: int, sigma: float) -> NDArray[np.float64]:  # (side, side)
    """The Gaussian filter as a matrix: its widest reaches over four sides, in one product."""
    return np.asarray(gaussian_filter1d(np.eye(side), sigma, axis=0, mode="reflect", truncate=3))
