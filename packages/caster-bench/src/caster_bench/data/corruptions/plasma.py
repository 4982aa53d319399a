"""Plasma fractals: the clouds that fog is made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
WIBBLE = 100.0  # of the first step; only its decay matters, for a map is scaled in the end


def plasma(
    size: int,  # of a side, a power of two
    decay: float,
    rngs: Sequence[np.random.Generator],
) -> Floats:  # (n, size, size)
    """Height maps from 0 to 1 by the diamond-square algorithm, their opposite edges joined.

    Every step sets the points halfway between those known to the mean of four of them and noise:
    the wibble times a uniform number within plus or minus the wibble. It is divided by the decay
    from step to step, so the noise falls with the square of the decay.

    >>> heights = plasma(8, 2.0, [np.random.default_rng(0)])
    >>> heights.shape, float(heights.min()), float(heights.max())
    ((1, 8, 8), 0.0, 1.0)
    """
    heights = np.zeros((len(rngs), size, size))
    noise = 2 * np.stack([rng.random(size * size - 1) for rng in rngs]) - 1
    wibble, step, used = WIBBLE, size, 0
    while step >= 2:
        half, count = step // 2, size // step
        fresh = wibble**2 * noise[:, used : used + 3 * count**2]
        squares, above, left = fresh.reshape(len(rngs), 3, count, count).swapaxes(0, 1)
        corners = heights[:, ::step, ::step]
        pairs = corners + np.roll(corners, -1, axis=1)
        middles = (pairs + np.roll(pairs, -1, axis=2)) / 4 + squares
        heights[:, half::step, half::step] = middles
        beside = corners + np.roll(corners, -1, axis=2)
        heights[:, ::step, half::step] = (
            middles + np.roll(middles, 1, axis=1) + beside
        ) / 4 + above
        heights[:, half::step, ::step] = (middles + np.roll(middles, 1, axis=2) + pairs) / 4 + left
        wibble, step, used = wibble / decay, half, used + 3 * count**2
    heights -= heights.min(axis=(1, 2), keepdims=True)
    heights /= heights.max(axis=(1, 2), keepdims=True)
    return heights


def size_for(height: int, width: int) -> int:
    """The smallest power of two that covers an image: 32 for 32 pixels, 256 for 224.

    >>> size_for(32, 32), size_for(224, 224), size_for(33, 47)
    (32, 256, 64)
    """
    return 1 << max(1, (max(height, width) - 1).bit_length())
