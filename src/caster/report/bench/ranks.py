"""Rank correlation with average ranks: acceptance rates tie often."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def average_ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Places from 1; those of equal values shared between them.

    >>> average_ranks([0.0, 3.0, 0.0, 5.0])
    array([1.5, 3. , 1.5, 4. ])
    """
    _, place, count = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    shared: NDArray[np.float64] = (np.cumsum(count) - (count - 1) / 2)[place]
    return shared


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Correlation of the ranks; None where it means nothing: all are equal, or fewer than three.

    >>> spearman([1, 2, 3, 4], [10, 20, 20, 50])
    0.948...
    """
    a, b = average_ranks(first), average_ranks(second)
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])
