"""Rank correlation with average ranks: acceptance rates tie often."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from caster.report.intervals import Interval, of_statistic

Values = Sequence[float] | NDArray[np.float64]
FEWEST = 3  # pairs that a correlation takes to mean anything


def spearman(first: Values, second: Values) -> float | None:
    """Correlation of the ranks; None where it means nothing: all are equal, or fewer than three.

    >>> spearman([1, 2, 3, 4], [10, 20, 20, 50])
    0.948...
    """
    found = float(_correlations(np.column_stack([first, second])[None])[0])
    return None if np.isnan(found) else found


def correlation_interval(first: Values, second: Values) -> Interval | None:
    """Of the correlation, from pairs drawn anew; None where there is no correlation."""
    if spearman(first, second) is None:
        return None
    return of_statistic(np.column_stack([first, second]), _correlations)


def _correlations(pairs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of many draws, NaN where there is none: (draws, pairs, 2) -> (draws,)."""
    n = pairs.shape[1]
    if n < FEWEST:
        return np.full(len(pairs), np.nan)
    # twice the distance from the middle rank: whole numbers, whose sums have no last bits to lose
    off = np.rint(2 * rankdata(pairs, axis=1) - n - 1).astype(np.int64)
    both, first, second = (
        (off[..., a] * off[..., b]).sum(axis=1) for a, b in ((0, 1), (0, 0), (1, 1))
    )
    spread = first.astype(float) * second
    return np.where(spread > 0, both / np.sqrt(np.where(spread > 0, spread, 1.0)), np.nan)
