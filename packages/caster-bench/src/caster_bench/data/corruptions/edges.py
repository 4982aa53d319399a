"""Canny's edges, with the rules of OpenCV, for many small images at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

Grey = NDArray[np.uint8]  # (n, H, W)
Mask = NDArray[np.bool_]  # (n, H, W)
FLAT = np.tan(np.pi / 8)  # slope up to which a direction counts as level
NEIGHBOURS = np.stack([np.zeros((3, 3)), np.ones((3, 3)), np.zeros((3, 3))])  # never across images


def canny(layers: Grey, low: float, high: float) -> Mask:
    """Where a thin edge runs.

    Sobel gradients of three by three, their strength |dx| + |dy|; a pixel is thin where it is the
    strongest along its gradient, and an edge where it is stronger than `low` and touches, through
    others of that kind, one that is stronger than `high`.

    >>> step = np.zeros((1, 4, 6), dtype=np.uint8)
    >>> step[:, :, 3:] = 200
    >>> canny(step, 50, 150)[0, 1].astype(int)
    array([0, 0, 1, 0, 0, 0])
    """
    values = layers.astype(np.int32)
    across = _sobel(values, axis=2)
    down = _sobel(values, axis=1)
    strength = np.abs(across) + np.abs(down)
    candidates = _thin(strength, across, down) & (strength > low)
    parts, count = ndimage.label(candidates, structure=NEIGHBOURS)
    strong = np.zeros(count + 1, dtype=np.bool_)
    strong[parts[candidates & (strength > high)]] = True
    edges: Mask = strong[parts]
    return edges


def _sobel(values: NDArray[np.int32], axis: int) -> NDArray[np.int32]:
    other = 3 - axis
    slope = ndimage.correlate1d(values, [-1, 0, 1], axis=axis, mode="nearest")
    smooth: NDArray[np.int32] = ndimage.correlate1d(slope, [1, 2, 1], axis=other, mode="nearest")
    return smooth


def _thin(strength: NDArray[np.int32], across: NDArray[np.int32], down: NDArray[np.int32]) -> Mask:
    """Strongest along the gradient, of the four directions the nearest one; outside is zero."""
    height, width = strength.shape[1:]
    around = np.pad(strength, ((0, 0), (1, 1), (1, 1)))

    def at(row: int, column: int) -> NDArray[np.int32]:
        return around[:, 1 + row : 1 + row + height, 1 + column : 1 + column + width]

    x, y = np.abs(across), np.abs(down)
    level, upright = y < FLAT * x, y > (FLAT + 2) * x
    # Of two equal neighbours on a line the first wins, else neither edge of a plateau would.
    on_level = (strength > at(0, -1)) & (strength >= at(0, 1))
    on_upright = (strength > at(-1, 0)) & (strength >= at(1, 0))
    falling = (strength > at(-1, -1)) & (strength > at(1, 1))
    rising = (strength > at(-1, 1)) & (strength > at(1, -1))
    slanted = np.where((across ^ down) < 0, rising, falling)
    thin: Mask = np.where(level, on_level, np.where(upright, on_upright, slanted))
    return thin
