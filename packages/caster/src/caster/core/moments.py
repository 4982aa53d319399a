"""Class moments of streamed data, and the moments of a target batch.

`ClassScatter` (first pass, memory C*d + d^2) and `ClassMoments` (second pass, memory C*k^2) are
sums over samples: ``of`` sums a chunk, ``+`` merges two, and neither stores data. Merging follows
Chan, Golub and LeVeque: sums are centred, so a large common offset costs no precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Self

import numpy as np
from array_api_compat import device
from array_api_extra import one_hot
from scipy.sparse import csr_array

from caster.core.linalg import Array
from caster.core.namespaces import array_namespace, is_numpy_array
from caster.core.threads import threads_for

BLOCK_ELEMENTS = 2**21  # size of temporaries that fit a CPU's cache and that malloc reuses


@dataclass(frozen=True, eq=False)
class ClassScatter:
    """Counts, class means and the within-class scatter.

    >>> import numpy as np
    >>> h, y = np.array([[0.0, 1.0], [2.0, 1.0], [5.0, 5.0], [5.0, 7.0]]), np.array([0, 0, 1, 1])
    >>> whole = ClassScatter.of(h, y, n_classes=2)
    >>> parts = ClassScatter.of(h[:3], y[:3], 2) + ClassScatter.of(h[3:], y[3:], 2)
    >>> bool(np.allclose(whole.within, parts.within)), whole.means.tolist()
    (True, [[1.0, 1.0], [5.0, 6.0]])
    """

    counts: Array  # (C,), floating point
    means: Array  # (C, d); meaningless for a class without samples
    within: Array  # (d, d), sum over samples of (h - mu_c)(h - mu_c)'

    @classmethod
    def of(
        cls,
        h: Array,  # (n, d)
        y: Array,  # (n,), class indices
        n_classes: int,
    ) -> Self:
        """Sum one chunk: products in the chunk's dtype, accumulated in float64.

        Sums are relative to the first row, so that a common offset costs no precision.
        """
        xp = array_namespace(h, y)
        origin = h[:1, :]
        centred = h - origin  # a copy, changed in place from here on
        counts, means = class_means(centred, y, n_classes)
        own = xp.astype(means, h.dtype)
        for rows in row_blocks(h):
            centred[rows, :] -= xp.take(own, y[rows], axis=0)
        # Rescale: squares of 1e30 or 1e-30 leave the range of float32.
        scale = xp.maximum(xp.max(centred), -xp.min(centred))
        scale = xp.where(scale > 0, scale, xp.ones_like(scale))
        centred /= scale
        within = xp.astype(centred.T @ centred, xp.float64)
        within *= xp.astype(scale, xp.float64) ** 2
        return cls(counts, means + xp.astype(origin, xp.float64), within)

    def __add__(self, other: Self) -> Self:
        counts, means, step, weight = _merge_means(self, other)
        step *= array_namespace(weight).sqrt(weight)[:, None]
        within = step.T @ step  # NumPy computes half of a product with its own transpose
        within += self.within
        within += other.within
        return type(self)(counts, means, within)

    @property
    def total(self) -> float:
        """Number of samples."""
        return float(array_namespace(self.counts).sum(self.counts))

    @property
    def width(self) -> int:
        """Number of features d."""
        return int(self.means.shape[1])


@dataclass(frozen=True, eq=False)
class ClassMoments:
    """Counts, means and scatter of every class in projected features."""

    counts: Array  # (C,), floating
    means: Array  # (C, k)
    scatters: Array  # (C, k, k)

    @classmethod
    def of(
        cls,
        z: Array,  # (n, k)
        y: Array,  # (n,), class indices
        n_classes: int,
    ) -> Self:
        """Sum one chunk, accumulated in float64."""
        xp = array_namespace(z, y)
        k, order, where = z.shape[1], xp.argsort(y), device(z)
        by_class = xp.take(xp.astype(z, xp.float64), order, axis=0)  # a copy
        edges = xp.arange(n_classes + 1, dtype=y.dtype, device=where)
        ends = xp.searchsorted(xp.take(y, order), edges)
        means = xp.zeros((n_classes, k), dtype=xp.float64, device=where)
        scatters = xp.zeros((n_classes, k, k), dtype=xp.float64, device=where)
        with threads_for(n_classes):
            for c, (start, stop) in enumerate(pairwise(int(end) for end in ends)):
                if start < stop:
                    rows = by_class[start:stop, :]
                    means[c, :] = xp.mean(rows, axis=0)
                    rows -= means[c, :]
                    scatters[c, :, :] = rows.T @ rows
        return cls(xp.astype(ends[1:] - ends[:-1], xp.float64), means, scatters)

    def __add__(self, other: Self) -> Self:
        counts, means, step, weight = _merge_means(self, other)
        scatters = self.scatters + other.scatters
        add_outer(scatters, step, weight)
        return type(self)(counts, means, scatters)

    def include(
        self,
        z: Array,  # (n, k)
        y: Array,  # (n,), class indices
    ) -> None:
        """Add a chunk in place; unlike `self + of(z, y)`, this touches only the chunk's classes.

        >>> import numpy as np
        >>> z, y = np.array([[0.0], [2.0], [5.0]]), np.array([1, 1, 0])
        >>> moments = ClassMoments.of(z[:1], y[:1], n_classes=3)
        >>> moments.include(z[1:], y[1:])
        >>> moments.counts.tolist(), moments.means.tolist(), moments.scatters.ravel().tolist()
        ([1.0, 2.0, 0.0], [[5.0], [1.0], [0.0]], [0.0, 2.0, 0.0])
        """
        classes, own = array_namespace(z, y).unique_inverse(y)
        chunk = type(self).of(z, own, int(classes.shape[0]))
        update_rows(self, classes, chunk)

    def __sub__(self, other: Self) -> Self:
        """Remove samples; every class must keep at least one."""
        counts = self.counts - other.counts
        step = (self.means - other.means) * (self.counts / counts)[:, None]  # from other to rest
        scatters = self.scatters - other.scatters
        add_outer(scatters, step, -counts * other.counts / self.counts)
        return type(self)(counts, other.means + step, scatters)

    @property
    def covariances(self) -> Array:  # (C, k, k)
        """Class covariances, divided by n_c."""
        return self.scatters / self.counts[:, None, None]


def update_rows(total: Any, classes: Array, chunk: Any) -> None:  # (U,)
    """Merge the moments of some classes into those of all classes, in place."""
    held = [getattr(total, field.name) for field in fields(total)]
    merged = type(total)(*(part[classes, ...] for part in held)) + chunk
    for field, part in zip(fields(total), held, strict=True):
        part[classes, ...] = getattr(merged, field.name)


def row_blocks(array: Array) -> list[slice]:  # (n, ...)
    """Split rows into blocks of `BLOCK_ELEMENTS`.

    >>> import numpy as np
    >>> row_blocks(np.empty((5, BLOCK_ELEMENTS // 2)))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    n, *rest = array.shape
    step = max(1, BLOCK_ELEMENTS // math.prod(rest))
    return [slice(start, min(start + step, n)) for start in range(0, n, step)]


def class_means(
    rows: Array,  # (n, d)
    y: Array,  # (n,), class indices
    n_classes: int,
) -> tuple[Array, Array]:  # (C,), (C, d)
    """Sample count and mean of every class in float64; the mean of an absent class is zero."""
    xp = array_namespace(rows, y)
    if is_numpy_array(rows):  # with many classes, a dense product costs as much as the scatter
        ones, starts = np.ones(len(y), rows.dtype), np.arange(len(y) + 1)
        counts = np.bincount(y, minlength=n_classes).astype(np.float64)
        sums = csr_array((ones, y, starts), shape=(len(y), n_classes)).T @ rows
    else:
        member = one_hot(y, n_classes, dtype=rows.dtype)  # (n, C)
        counts = xp.astype(xp.sum(member, axis=0), xp.float64)
        sums = member.T @ rows
    return counts, xp.astype(sums, xp.float64) / xp.clip(counts, min=1.0)[:, None]


def _merge_means(
    a: ClassScatter | ClassMoments, b: ClassScatter | ClassMoments
) -> tuple[Array, Array, Array, Array]:
    """Merged counts and means, the step between the two means and its weight n_a n_b / n."""
    xp = array_namespace(a.means, b.means)
    counts = a.counts + b.counts
    share = b.counts / xp.clip(counts, min=1.0)
    step = b.means - a.means
    return counts, a.means + step * share[:, None], step, a.counts * share


def add_outer(scatters: Array, steps: Array, weights: Array) -> None:  # (C, k, k), (C, k), (C,)
    """Add the weighted outer product of each class's step in place, a few classes at a time."""
    for c in row_blocks(scatters):
        scatters[c, ...] += steps[c, :, None] * (steps[c, :] * weights[c, None])[:, None, :]


def batch_moments(z: Array) -> tuple[Array, Array]:  # (B, k) -> (k,), (k, k)
    """Mean m_t and covariance C_t of a target batch, divided by B.

    >>> import numpy as np
    >>> batch_moments(np.array([[0.0], [2.0]]))
    (array([1.]), array([[1.]]))
    """
    xp = array_namespace(z)
    mean = xp.sum(z, axis=0) / z.shape[0]
    centred = z - mean
    return mean, (centred.T @ centred) / z.shape[0]
