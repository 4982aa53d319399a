"""How many classes batches hold beside what they would at random, from the raw rows alone.

`caster_bench.data.streams` says the same when a stream is made; a report must not take its word.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import hypergeom

from caster_bench.records import Batches, Samples

LOW = 0.5  # the share of what is expected at random at which a stream counts as class-ordered


@dataclass(frozen=True)
class Diversity:
    """Classes of every batch, and beside chance."""

    classes: NDArray[np.int64]  # (T,)
    relative: float  # classes beyond the first, as a share of those at random
    relative_unlike: float  # pairs of different classes, likewise
    judged: bool  # whether there is more than one batch a leg, and one class, to judge by

    @property
    def is_low(self) -> bool:
        """Whether batches hold few classes because of their order."""
        return self.judged and min(self.relative, self.relative_unlike) <= LOW


def diversity_of(samples: Samples, batches: Batches, legs: int) -> Diversity:
    """Of a stream that goes through its pictures in so many legs.

    >>> from caster_bench.records import as_batches, as_samples
    >>> rows = as_samples(dict(index=[0, 1, 2, 3], label=[0, 0, 1, 1], frozen=[0] * 4,
    ...                        prediction=[0] * 4, batch=[0, 0, 1, 1]))
    >>> none = dict.fromkeys(["ratio", "confident", "confident_classes"], [None, None])
    >>> two = as_batches(dict(batch=[0, 1], size=[2, 2], classes=[1, 1], accepted=[True] * 2,
    ...                       reason=["x"] * 2, seconds=[0.0] * 2) | none)
    >>> diversity_of(rows, two, 1).is_low
    True
    """
    width = int(samples.label.max()) + 1
    where = samples.batch.astype(np.int64) * width + samples.label
    table = np.bincount(where, minlength=len(batches.size) * width).reshape(-1, width)  # (T, C)
    counts = table.sum(axis=0) // legs  # of the pictures a batch is taken from
    classes = (table > 0).sum(axis=1)
    sizes = batches.size.astype(np.int64)
    met = float(np.average(classes, weights=sizes)) - 1
    expected = float(np.average(_expected(sizes, counts), weights=sizes)) - 1
    pairs = np.where(sizes > 1, sizes, 0)
    held, at_random = _unlike(table, sizes), float(_unlike(counts, counts.sum()))
    several = len(sizes) > legs and np.count_nonzero(counts) > 1 and pairs.any()
    return Diversity(
        classes=classes,
        relative=met / expected if expected > 1e-9 else 1.0,
        relative_unlike=float(np.average(held, weights=pairs)) / at_random if several else 1.0,
        judged=bool(several),
    )


def _unlike(table: NDArray[np.int64], n: NDArray[np.int64]) -> NDArray[np.float64]:
    """Share of the pairs of n pictures that differ in class: table (..., C), n (...)."""
    alike = (table * (table - 1)).sum(axis=-1)
    return np.asarray(1 - alike / np.maximum(n * (n - 1), 1))


def _expected(sizes: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """How many classes a random batch of every size holds: (T,), (C,) -> (T,)."""
    distinct, which = np.unique(sizes, return_inverse=True)
    present = counts[counts > 0]
    absent = hypergeom.pmf(0, present.sum(), present, distinct[:, None])  # (sizes, C)
    return np.asarray((1 - absent).sum(axis=1))[which]
