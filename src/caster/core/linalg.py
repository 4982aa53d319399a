"""Symmetric roots, Cholesky factors and the Mahalanobis norm, on any array namespace."""

from __future__ import annotations

from typing import Any

import scipy.linalg
from array_api_compat import array_namespace, device, is_numpy_array

Array = Any  # an array of any array-API namespace: the standard has no static type for one yet


def identity_like(matrix: Array) -> Array:  # (..., k, k) -> (k, k)
    """The identity of a matrix's order, in its namespace, dtype and device."""
    xp = array_namespace(matrix)
    return xp.eye(matrix.shape[-1], dtype=matrix.dtype, device=device(matrix))


def symmetric_root(matrix: Array) -> Array:  # (k, k) -> (k, k)
    """Symmetric positive-semidefinite square root of a symmetric matrix.

    >>> import numpy as np
    >>> symmetric_root(np.diag([4.0, 9.0]))
    array([[2., 0.],
           [0., 3.]])
    """
    xp = array_namespace(matrix)
    values, vectors = xp.linalg.eigh(matrix)
    # Rounding can push a zero eigenvalue just below zero, where a root is NaN.
    return (vectors * xp.sqrt(xp.abs(values))) @ vectors.T


def inverse_symmetric_root(matrix: Array) -> Array:  # (k, k) -> (k, k)
    """Symmetric root of the inverse of a symmetric positive-definite matrix.

    >>> import numpy as np
    >>> inverse_symmetric_root(np.diag([4.0, 16.0]))
    array([[0.5 , 0.  ],
           [0.  , 0.25]])
    """
    xp = array_namespace(matrix)
    values, vectors = xp.linalg.eigh(matrix)
    return (vectors / xp.sqrt(values)) @ vectors.T


def whiten(rows: Array, factor: Array) -> Array:  # (..., n, k), (..., k, k) -> (..., n, k)
    """Solve L w = x for every row x, batched: rows of covariance L L' get covariance I.

    >>> import numpy as np
    >>> whiten(np.array([[2.0, 7.0]]), np.array([[2.0, 0.0], [1.0, 3.0]]))
    array([[1., 2.]])
    """
    xp = array_namespace(rows)
    if is_numpy_array(rows):
        return _whiten_in_blas(rows, factor)
    transposed = xp.matrix_transpose(factor)
    if hasattr(xp.linalg, "solve_triangular"):
        return xp.linalg.solve_triangular(transposed, rows, upper=True, left=False)
    # The standard has no triangular solve: the general one gives the same answer for more work.
    return xp.matrix_transpose(xp.linalg.solve(factor, xp.matrix_transpose(rows)))


def _whiten_in_blas(rows: Array, factor: Array) -> Array:
    """The same in NumPy: SciPy's batched solver spends most of its time between the matrices."""
    xp = array_namespace(rows)
    (trsm,) = scipy.linalg.get_blas_funcs(("trsm",), (factor, rows))
    whitened = xp.array(rows, order="C")
    k = rows.shape[-1]
    factors, panels = xp.reshape(factor, (-1, k, k)), xp.reshape(whitened, (-1, *rows.shape[-2:]))
    for L, panel in zip(factors, panels, strict=True):
        # BLAS counts by columns, so both are handed over transposed; the panel is solved in place.
        trsm(1.0, L.T, panel.T, trans_a=1, overwrite_b=1)
    return whitened


def mahalanobis(rows: Array, covariance: Array) -> Array:  # (n, k), (k, k) -> (n,)
    """Norm of every row x in the metric of a covariance: ``sqrt(x' covariance^-1 x)``.

    >>> import numpy as np
    >>> mahalanobis(np.array([[2.0, 0.0], [0.0, 3.0]]), np.diag([4.0, 9.0]))
    array([1., 1.])
    """
    xp = array_namespace(rows)
    whitened = whiten(rows, xp.linalg.cholesky(covariance))
    return xp.sqrt(xp.sum(whitened * whitened, axis=-1))
