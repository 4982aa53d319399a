"""How far a mean would move if others had come: percentile bootstrap over batches or cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2_000
LEVEL = 0.95
SEED = 0
AT_ONCE = 2**18  # draws


@dataclass(frozen=True)
class Interval:
    """From `low` to `high`, at the level of `LEVEL`."""

    low: float
    high: float


def bootstrap(
    counts: NDArray[Any],  # (batches, m), a column a classifier
    sizes: NDArray[Any],  # (batches,)
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
    step = max(1, AT_ONCE // n)  # all at once would not fit for many batches
    for start in range(0, RESAMPLES, step):
        rows = np.arange(len(shares[start : start + step]))[:, None]
        places = rows * n + rng.integers(n, size=(len(rows), n))
        drawn = np.bincount(places.ravel(), minlength=len(rows) * n).reshape(-1, n)
        # not a matrix product: its last bits are another on every processor
        sums = (drawn[:, :, None] * counts).sum(axis=1)
        shares[start : start + step] = sums / (drawn * sizes).sum(axis=1)[:, None]
    return [between(column) for column in shares.T]


def between(drawn: NDArray[np.float64]) -> Interval:
    """Where the middle of what was drawn lies."""
    tail = (1.0 - LEVEL) / 2
    low, high = np.quantile(drawn, [tail, 1.0 - tail])
    return Interval(float(low), float(high))


def of_means(
    values: NDArray[np.float64],  # (cells, m)
) -> list[Interval | None]:
    """An interval for the mean of every column, from whole cells drawn anew.

    >>> of_means(np.array([[0.5, 1.0], [0.5, 3.0]]))
    [Interval(low=0.5, high=0.5), Interval(low=1.0, high=3.0)]
    """
    return bootstrap(values, np.ones(len(values)))


def of_statistic(
    rows: NDArray[np.float64],  # (cells, m)
    statistic: Callable[
        [NDArray[np.float64]], NDArray[np.float64]
    ],  # (draws, cells, m) -> (draws,)
) -> Interval | None:
    """An interval for what a function makes of all cells, from whole cells drawn anew.

    Draws of which it makes NaN are left out. None where there is only one cell, or nothing is made
    of any draw.

    >>> of_statistic(np.array([[1.0], [2.0], [9.0]]), lambda drawn: np.median(drawn, axis=(1, 2)))
    Interval(low=1.0, high=9.0)
    """
    n = len(rows)
    if n == 1:
        return None
    rng = np.random.default_rng(SEED)
    step = max(1, AT_ONCE // n)  # all at once would not fit for many cells
    counts = [min(step, RESAMPLES - start) for start in range(0, RESAMPLES, step)]
    found = [statistic(rows[rng.integers(n, size=(count, n))]) for count in counts]
    drawn = np.concatenate(found)
    told = drawn[~np.isnan(drawn)]
    return between(told) if len(told) else None
