"""Covariances in files: upper triangles only, and checked to be positive semidefinite."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.core.linalg import cholesky
from caster.errors import CasterError

AT_ONCE = 16  # matrices checked together: they fit a cache


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


def check_semidefinite(
    covariances: NDArray[Any],  # (n, k, k), symmetric
    rounding: float,  # of their traces: what rounding may take from an eigenvalue
    name: str,
) -> None:
    """Raise if a covariance has an eigenvalue below zero by more than rounding.

    >>> check_semidefinite(np.array([[[1.0, 2.0], [2.0, 1.0]]]), 1e-6, "covariances")
    Traceback (most recent call last):
        ...
    caster.errors.CasterError: its covariances are not positive semidefinite
    """
    tiny = np.finfo(np.float32).tiny  # a class or channel may not vary at all
    identity = np.eye(covariances.shape[-1])
    for start in range(0, len(covariances), AT_ONCE):
        some = covariances[start : start + AT_ONCE].astype(np.float64)
        traces = np.trace(some, axis1=1, axis2=2)
        factors = cholesky(some + (rounding * traces + tiny)[:, None, None] * identity)
        if not np.isfinite(factors).all():
            raise CasterError(f"its {name} are not positive semidefinite")
