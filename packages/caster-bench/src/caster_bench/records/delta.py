"""A column told by where it is not another one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError

Column = NDArray[Any]


def unlike(column: Column, other: Column) -> tuple[NDArray[np.int32], Column]:  # (n,), (n,)
    """How many rows are skipped before each that differs, and what it holds: (m,) and (m,).

    >>> unlike(np.array([7, 7, 3, 7, 5]), np.array([7, 7, 7, 7, 7]))
    (array([2, 1], dtype=int32), array([3, 5]))
    """
    places = np.flatnonzero(column != other)
    return (np.diff(places, prepend=-1) - 1).astype(np.int32), column[places]


def restored(other: Column, gaps: Column, values: Column) -> Column:
    """The column that `unlike` told.

    >>> restored(np.array([7, 7, 7, 7, 7]), np.array([2, 1]), np.array([3, 5]))
    array([7, 7, 3, 7, 5])
    """
    places = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if len(gaps) != len(values) or np.any(gaps < 0) or np.any(places >= len(other)):
        raise CasterError("its columns are of different lengths")
    column = other.copy()
    column[places] = values
    return column
