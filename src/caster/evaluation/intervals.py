"""How far a share would move if other batches had come: percentile bootstrap over batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2_000
LEVEL = 0.95
SEED = 0


@dataclass(frozen=True)
class Interval:
    """From `low` to `high`, at the level of `LEVEL`."""

    low: float
    high: float


def bootstrap(
    counts: NDArray[np.int64],  # (batches, m), a column a classifier
    sizes: NDArray[np.int64],  # (batches,)
) -> list[Interval | None]:
    """An interval for the share of every column; None where there is only one batch.

    Whole batches are drawn, not samples: those of a batch share one map and one verdict, and
    are right or wrong together.

    >>> bootstrap(np.array([[10, 5], [10, 7]]), np.array([10, 10]))
    [Interval(low=1.0, high=1.0), Interval(low=0.5, high=0.7)]
    """
    n = len(sizes)
    if n == 1:
        return [None] * counts.shape[1]
    rng = np.random.default_rng(SEED)
    shares = np.empty((RESAMPLES, counts.shape[1]))
    for i in range(RESAMPLES):  # one at a time: all at once would not fit for many batches
        drawn = np.bincount(rng.integers(n, size=n), minlength=n)
        shares[i] = drawn @ counts / (drawn @ sizes)
    tail = (1.0 - LEVEL) / 2
    low, high = np.quantile(shares, [tail, 1.0 - tail], axis=0)
    return [Interval(float(a), float(b)) for a, b in zip(low, high, strict=True)]
