"""Symmetric matrices as their upper triangles: what of them must be kept."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def packed(
    matrices: NDArray[Any],  # (..., k, k)
) -> NDArray[Any]:  # (..., k (k + 1) / 2)
    """The upper triangles of symmetric matrices, row by row.

    >>> packed(np.array([[1.0, 2.0], [2.0, 3.0]]))
    array([1., 2., 3.])
    """
    upper: NDArray[Any] = matrices[..., *np.triu_indices(matrices.shape[-1])]
    return upper


def unpacked(
    triangles: NDArray[Any],  # (..., k (k + 1) / 2)
    k: int,
) -> NDArray[Any]:  # (..., k, k)
    """Symmetric matrices of their upper triangles, row by row.

    >>> unpacked(np.array([1.0, 2.0, 3.0]), 2)
    array([[1., 2.],
           [2., 3.]])
    """
    rows, columns = np.triu_indices(k)
    matrices = np.empty((*triangles.shape[:-1], k, k), dtype=triangles.dtype)
    matrices[..., rows, columns] = triangles
    matrices[..., columns, rows] = triangles
    return matrices
