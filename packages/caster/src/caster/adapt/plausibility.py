"""Detect implausible samples, by their activations at the first site.

An attacker who shares a stream can shift its statistics with extreme input values, but images have
a bounded range. A sample outside that range, with more energy in a channel of the first site than
the most extreme images have, cannot be an image under any shift.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from caster.adapt.layer_passes import Range
from caster.core.arrays import like
from caster.core.channels import ChannelMoments
from caster.core.linalg import Array

MARGIN = 2.0  # limit on a channel's energy, relative to that of extreme images
SLACK = 1e-3  # tolerance for rounding, relative to the range
GREYS = 9  # constant images from the lowest value to the highest, for layers that raise contrast
UNKNOWN_RANGE = 100.0  # limit relative to the source's variance, if the image range is unknown
BLOCKS = (4, 16, 64)  # blocks per side of random images; single pixels are drawn too
DRAWS = 4  # random images per size of blocks


def plausible(energies: Array, limits: Array) -> Array:  # (n, c), (c,) -> (n,)
    """Whether all channels of a sample are within their limits; False for NaN.

    >>> plausible(np.array([[1.0, 2.0], [1.0, np.nan]]), np.array([2.0, 2.0]))
    array([ True, False])
    """
    return array_namespace(energies).all(energies <= limits, axis=1)


def broad_limits(source: ChannelMoments) -> Array:  # (c,)
    """Limits derived from the source's moments alone."""
    xp = array_namespace(source.variance)
    variance = xp.astype(source.variance, xp.float32)
    return xp.clip(variance, min=xp.mean(variance)) * UNKNOWN_RANGE


def sharp_limits(energies: Array, source: ChannelMoments) -> Array:  # (n, c) -> (c,)
    """Limits derived from the energies of extreme images."""
    xp = array_namespace(energies)
    variance = xp.astype(like(source.variance, energies), energies.dtype)
    return MARGIN * xp.maximum(xp.max(energies, axis=0), variance)


def within(value_range: Range, batch: Array) -> Array:  # (n, ...) -> (n,)
    """Whether all values of a sample are in the range of images.

    >>> within((0.0, 1.0), np.array([[0.0, 1.0], [0.5, 2.0]]))
    array([ True, False])
    """
    xp = array_namespace(batch)
    low, high = (like(np.asarray(end, np.float32), batch) for end in value_range)
    slack = SLACK * (high - low)
    inside = (batch >= low - slack) & (batch <= high + slack)
    return xp.all(xp.reshape(inside, (batch.shape[0], -1)), axis=1)


def extremes(value_range: Range, shape: tuple[int, ...], channels: int = 0) -> NDArray[np.float32]:
    """Generate extreme images of a shape: constant ones, random blocks, random pixels.

    `channels` is the channel axis of images with three axes.

    >>> found = extremes((0.0, 1.0), (3, 8, 8))
    >>> found.shape, found.min(), found.max()
    ((23, 3, 8, 8), np.float32(0.0), np.float32(1.0))
    """
    rng = np.random.default_rng(0)

    def drawn(*sizes: int) -> NDArray[Any]:
        return rng.integers(2, size=(DRAWS, *sizes)).astype(np.float32)

    greys = np.linspace(0, 1, GREYS, dtype=np.float32).reshape(-1, *(1 for _ in shape))
    parts = [np.broadcast_to(greys, (GREYS, *shape)), drawn(*shape)]
    if len(shape) == 3:
        count, *sides = np.moveaxis(np.empty(shape), channels, 0).shape
        made = []
        if 1 < count <= 3:
            corners = np.array(list(product((0.0, 1.0), repeat=count))[1:-1], np.float32)
            made.append(np.broadcast_to(corners[:, :, None, None], (len(corners), count, *sides)))
        for blocks in (blocks for blocks in BLOCKS if blocks < min(sides)):
            rows, columns = (np.arange(side) * blocks // side for side in sides)
            made.append(drawn(count, blocks, blocks)[:, :, rows[:, None], columns])
        parts += [np.moveaxis(part, 1, channels + 1) for part in made]
    low, high = (np.asarray(end, np.float32) for end in value_range)
    return np.asarray(low + (high - low) * np.concatenate(parts))
