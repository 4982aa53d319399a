"""Images enlarged about their middle, as one sparse matrix over the pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from caster_bench.data.corruptions.make import Values

Floats = NDArray[np.float64]
AT_ONCE = 256  # columns of the product that still fit a core's cache at 32 pixels


def zoom_blur(
    images: Values,
    constants: tuple[float, float],  # end and step of the factors
    rngs: Sequence[np.random.Generator],
) -> Values:
    """The mean of the image and of its enlargements by 1, 1 + step, ... up to the end.

    The factors are counted as `numpy.arange` does in the reference, where rounding lets some of the
    ends in (1.06 and 1.11 in steps of 0.01) and leaves others out. The factor 1 is one of them, so
    the image itself counts twice.

    >>> grey = np.full((1, 8, 8, 3), 0.5, dtype=np.float32)
    >>> bool((zoom_blur(grey, (1.06, 0.01), []) == grey).all())
    True
    """
    return applied(mean_zoom(images.shape[1], images.shape[2], factors(*constants)), images)


def factors(end: float, step: float) -> tuple[float, ...]:
    """What zoom_blur enlarges by; the image itself is the first.

    >>> factors(1.5, 0.25)
    (1.0, 1.0, 1.25)
    """
    return (1.0, *(float(factor) for factor in np.arange(1, end, step)))


def zoomed(
    layers: Floats,  # (n, H, W)
    factor: float,
) -> Floats:  # (n, H, W)
    """The middle of each layer, enlarged to its whole size."""
    operator = mean_zoom(layers.shape[1], layers.shape[2], (float(factor),))
    return applied(operator, layers[..., np.newaxis])[..., 0]


def applied(operator: Any, images: NDArray[Any]) -> NDArray[Any]:
    """A matrix over the pixels (H W, H W) times every channel of every image (n, H, W, C)."""
    count, height, width, channels = images.shape
    result = np.empty_like(images)
    group = max(1, AT_ONCE // channels)
    for start in range(0, count, group):
        some = images[start : start + group]
        # In double precision: what is flat keeps its very byte when it is truncated later.
        columns = some.transpose(1, 2, 0, 3).reshape(height * width, -1).astype(np.float64)
        product = (operator @ columns).reshape(height, width, -1, channels)
        result[start : start + group] = product.transpose(2, 0, 1, 3)
    return result


@lru_cache(maxsize=2)  # tens of megabytes at 224 pixels
def mean_zoom(height: int, width: int, factors: tuple[float, ...]) -> Any:
    """The mean of several enlargements, as a sparse matrix (H W, H W)."""
    total = sparse.csr_array((height * width, height * width))
    for factor in factors:
        rows, columns = axis_zoom(height, factor), axis_zoom(width, factor)
        total = total + sparse.kron(rows, columns, format="csr")
    return total / len(factors)


def axis_zoom(size: int, factor: float) -> Any:
    """One axis enlarged linearly, as a sparse matrix (size, size).

    The middle `ceil(size / factor)` pixels become `round(that * factor)`, the first and the last
    of them kept where they are (as `scipy.ndimage.zoom` of order 1 does), and what is then too much
    is trimmed from both ends.
    """
    crop = math.ceil(size / factor)
    made = round(crop * factor)
    places = np.arange(size) + (made - size) // 2
    at = places * ((crop - 1) / max(made - 1, 1))
    below = np.minimum(at.astype(np.int64), max(crop - 2, 0))
    share = at - below  # of the neighbour above
    first = (size - crop) // 2 + below
    above = np.minimum(first + 1, size - 1)
    rows = np.arange(size)
    weights = np.concatenate([1 - share, share])
    kept = weights != 0
    where = (np.tile(rows, 2)[kept], np.concatenate([first, above])[kept])
    return sparse.csr_array((weights[kept], where), shape=(size, size))
