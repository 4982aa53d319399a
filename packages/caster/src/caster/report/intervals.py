"""Confidence intervals of means: percentile bootstrap over batches or cells.

Unlike `scipy.stats.bootstrap`, it weights batches by size, and sums counts instead of copying
resamples; reports of stored records also rely on its exact draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2_000
LEVEL = 0.95
SEED = 0
DRAWS_AT_ONCE = 2**18  # draws in memory at once


@dataclass(frozen=True)
class Interval:
    """Interval from `low` to `high` at level `LEVEL`."""

    low: float
    high: float


def bootstrap(
    counts: NDArray[Any],  # (batches, m), one column per classifier
    sizes: NDArray[Any],  # (batches,)
) -> list[Interval | None]:
    """Interval of the share of every column; None for a single batch.

    Whole batches are drawn, not samples: the samples of a batch share one map and one verdict, so
    their errors are correlated.

    >>> bootstrap(np.array([[10, 5], [10, 7]]), np.array([10, 10]))
    [Interval(low=1.0, high=1.0), Interval(low=0.5, high=0.7)]
    """
    n = len(sizes)
    if n == 1:
        return [None] * counts.shape[1]
    rng = np.random.default_rng(SEED)
    shares = np.empty((RESAMPLES, counts.shape[1]))
    step = max(1, DRAWS_AT_ONCE // n)
    for start in range(0, RESAMPLES, step):
        rows = np.arange(len(shares[start : start + step]))[:, None]
        cells = rows * n + rng.integers(n, size=(len(rows), n))
        drawn = np.bincount(cells.ravel(), minlength=len(rows) * n).reshape(-1, n)
        # not a matrix product, whose last bits depend on the processor
        sums = (drawn[:, :, None] * counts).sum(axis=1)
        shares[start : start + step] = sums / (drawn * sizes).sum(axis=1)[:, None]
    return [between(column) for column in shares.T]


def between(drawn: NDArray[np.float64]) -> Interval:
    """Percentile interval of a bootstrap distribution."""
    tail = (1.0 - LEVEL) / 2
    low, high = np.quantile(drawn, [tail, 1.0 - tail])
    return Interval(float(low), float(high))
