"""Symmetric roots, Cholesky factors and the Mahalanobis norm, on any array namespace.

A failed computation returns NaN in every namespace; nothing here raises. JAX does the same, and on
a GPU the host would have to wait to detect a failure.

For NumPy the batched routines loop over SciPy's LAPACK and BLAS: on a thousand 63 x 63 float32
matrices that is twice as fast as NumPy's own batched routines. To both factor and solve a batch,
`factor_and_whiten` uses NumPy's batched products, which is twice as fast again and releases the
interpreter's lock (docs/performance.md).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import scipy.linalg
from array_api_compat import device, is_torch_array
from numpy.typing import NDArray

from caster.core.namespaces import array_namespace, is_numpy_array

LARGEST_CONDITION = 1e9  # condition number up to which Newton-Schulz iterations converge
MIN_PANEL = 64  # smallest number of columns of a triangular matrix to multiply at once
SMALL_ORDER = 24  # matrix order below which NumPy's own loop is faster
LEAF = 8  # order of the diagonal blocks that are factored row by row

Array = Any  # an array of any array-API namespace: the standard has no static type for one yet


def identity_like(matrix: Array) -> Array:  # (..., k, k) -> (k, k)
    """Identity matrix of the same order, namespace, dtype and device."""
    xp = array_namespace(matrix)
    return xp.eye(matrix.shape[-1], dtype=matrix.dtype, device=device(matrix))


def on_gpu(array: Array) -> bool:
    """Whether an array is a CUDA tensor: checking a result would block the host."""
    return is_torch_array(array) and array.device.type == "cuda"


def failures(xp: Any) -> tuple[type[Exception], ...]:
    """Exceptions for a failed computation: NumPy's, and the namespace's own."""
    numpy_error = scipy.linalg.LinAlgError
    return numpy_error, getattr(xp.linalg, "LinAlgError", numpy_error)


def symmetric_roots(matrix: Array, lam: float) -> tuple[Array, Array]:  # (k, k) -> (k, k), (k, k)
    """Symmetric root of a covariance plus lam I, and the root's inverse; NaN on failure.

    >>> import numpy as np
    >>> symmetric_roots(np.diag([3.0, 15.0]), 1.0)
    (array([[2., 0.],
           [0., 4.]]), array([[0.5 , 0.  ],
           [0.  , 0.25]]))
    """
    if on_gpu(matrix):
        return newton_schulz_roots(matrix + lam * identity_like(matrix))
    xp = array_namespace(matrix)
    try:
        values, V = xp.linalg.eigh(matrix)
    except failures(xp):  # no convergence, or a matrix that is not finite
        return (xp.full_like(matrix, xp.nan),) * 2
    # Rounding can make an eigenvalue near zero negative, and its root NaN.
    scales = xp.sqrt(xp.abs(values + lam))
    return (V * scales) @ V.T, (V / scales) @ V.T


def newton_schulz_roots(matrix: Array) -> tuple[Array, Array]:  # (..., k, k) -> two of these
    """Root of a positive definite matrix and its inverse, by products alone, in float64, batched.

    An eigendecomposition on a GPU blocks the host; products do not. Each step maps the root's
    eigenvalues, scaled into (0, 1], from x to a x (3 - (a x)^2) / 2, which is closer to 1. If the
    condition number is too large for the number of steps, both results are NaN.

    >>> import numpy as np
    >>> root, inverse = newton_schulz_roots(np.diag([4.0, 16.0]))
    >>> np.diag(root).round(9), np.diag(inverse).round(9)
    (array([2., 4.]), array([0.5 , 0.25]))
    """
    xp = array_namespace(matrix)
    wide = xp.astype(matrix, xp.float64)
    scale = xp.linalg.matrix_norm(wide, keepdims=True)
    identity = identity_like(wide)
    middle = 1.5 * identity
    # Y omits all scale factors so far, and Z includes those of T = 3/2 I - a^2/2 Z Y, which saves
    # two small kernel launches per step.
    steps = step_scales(LARGEST_CONDITION**-0.5)
    Y, Z = wide / scale, 0.5 * steps[0] ** 2 * identity
    for following in (*steps[1:], 1.0):
        T = middle - Z @ Y
        Y, Z = Y @ T, following**2 * (T @ Z)
    off = xp.max(xp.abs(2 * (Z @ Y) - identity), axis=(-2, -1), keepdims=True)
    scale = xp.where(off < 1e-6, xp.sqrt(scale), xp.nan)
    product = math.prod(steps)
    root, inverse = Y * (product * scale), Z * (2 / product / scale)
    return xp.astype(root, matrix.dtype), xp.astype(inverse, matrix.dtype)


@cache
def step_scales(low: float) -> tuple[float, ...]:
    """Scale factors a for eigenvalues from low to 1 (Chen and Chow 2014): half as many steps."""
    steps = []
    while low < 1 - 1e-12:
        # Both ends map to the same value; 1.7 keeps the upper end away from 0 and from rounding.
        a = min(1.7, math.sqrt(3 / (1 + low + low**2)))
        low = a * low * (3 - (a * low) ** 2) / 2
        steps.append(a)
    return tuple(steps)


def cholesky(
    matrices: Array,  # (..., k, k)
    *,
    overwrite: bool = False,  # reuse the memory of the matrices
) -> Array:  # (..., k, k)
    """Lower-triangular L with L L' = matrix, batched.

    >>> import numpy as np
    >>> cholesky(np.array([[4.0, 2.0], [2.0, 10.0]]))
    array([[2., 0.],
           [1., 3.]])

    The factor of a matrix that is not positive definite starts with NaN, so its solutions are NaN.
    In namespaces that raise, the whole batch of factors is NaN.
    """
    xp = array_namespace(matrices)
    if is_torch_array(matrices):
        factors, failed_at = xp.linalg.cholesky_ex(matrices)
        factors[..., 0, 0].masked_fill_(failed_at > 0, xp.nan)  # in place, without a copy
        return factors
    if not is_numpy_array(matrices) or matrices.shape[-1] < SMALL_ORDER:
        try:
            return xp.linalg.cholesky(matrices)
        except failures(xp):  # the exception does not say which matrix failed
            return xp.full_like(matrices, xp.nan)
    potrf = _lapack("potrf", matrices.dtype)
    factors = xp.array(matrices, order="C", copy=None if overwrite else True)
    for matrix in _stacked(factors):
        # LAPACK is column-major: the upper factor it leaves in place is our lower one.
        _, failed_at = potrf(matrix.T, lower=0, clean=1, overwrite_a=1)
        if failed_at:
            matrix[0, 0] = xp.nan
    return factors


def whiten(
    rows: Array,  # (..., n, k)
    factor: Array,  # (..., k, k)
    *,
    overwrite: bool = False,  # reuse the memory of the rows
) -> Array:  # (..., n, k)
    """Solve L w = x for every row x, batched: rows with covariance L L' get covariance I.

    >>> import numpy as np
    >>> whiten(np.array([[2.0, 7.0]]), np.array([[2.0, 0.0], [1.0, 3.0]]))
    array([[1., 2.]])
    """
    xp = array_namespace(rows)
    if not is_numpy_array(rows):
        return _whiten_in_namespace(rows, factor, overwrite)
    if rows.shape[-1] < SMALL_ORDER:
        return rows @ whiteners(factor)
    trsm = _blas("trsm", rows.dtype)
    whitened = xp.array(rows, order="C", copy=None if overwrite else True)
    for L, panel in zip(_stacked(factor), _stacked(whitened), strict=True):
        # BLAS is column-major too, and solves in place.
        trsm(1.0, L.T, panel.T, trans_a=1, overwrite_b=1)
    return whitened


def factor_and_whiten(systems: NDArray[Any]) -> None:  # (n, k, k + m)
    """Turn every [S | X] into [L' | L^-1 X] in place, where L L' = S; entries below L' are unused.

    >>> system = np.array([[[4.0, 2.0, 2.0], [2.0, 10.0, 7.0]]])
    >>> factor_and_whiten(system)
    >>> system[0, 0], system[0, 1, 1:]
    (array([2., 1., 1.]), array([3., 2.]))

    Only diagonal blocks are factored; products do the rest. A matrix that is not positive definite
    gives NaN.
    """
    for start in range(0, systems.shape[1], LEAF):
        rows, above = systems[:, start : start + LEAF, start:], systems[:, :start, start:]
        order = rows.shape[1]
        if start:
            rows -= above[:, :, :order].mT @ above
        rows[...] = _inverse_factors(rows[:, :, :order]) @ rows


def _inverse_factors(matrices: NDArray[Any]) -> NDArray[Any]:  # (n, b, b) -> (n, b, b)
    """L^-1 of every Cholesky factor L: eliminate [S | I], all matrices in every step."""
    n, b, _ = matrices.shape
    systems = np.zeros((b, 2 * b, n), dtype=matrices.dtype)
    systems[:, :b] = matrices.transpose(1, 2, 0)
    for j in range(b):
        used = slice(j, b + j + 1)  # earlier columns are done, later ones are zero
        systems[j, b + j] = 1.0
        systems[j, used] /= np.sqrt(systems[j, j])
        systems[j + 1 :, used] -= systems[j, j + 1 : b, None] * systems[j, used]
    return systems[:, b:].transpose(2, 0, 1)


def whiteners(factors: Array) -> Array:  # (..., d, d) -> (..., d, d)
    """W = L^-T, batched, so that x'W is white; for many rows, faster than `whiten`.

    >>> import numpy as np
    >>> whiteners(np.array([[2.0, 0.0], [1.0, 4.0]]))
    array([[ 0.5  , -0.125],
           [ 0.   ,  0.25 ]])
    """
    xp = array_namespace(factors)
    if not is_numpy_array(factors):
        return whiten(xp.broadcast_to(identity_like(factors), factors.shape), factors)
    trtri = _lapack("trtri", factors.dtype)
    found = xp.array(xp.matrix_transpose(factors), order="C", copy=True)
    for matrix in _stacked(found):
        _, singular_at = trtri(matrix.T, lower=1, overwrite_c=1)  # column-major: L, its inverse
        if singular_at:
            matrix[...] = xp.nan
    return found


def triangular_squares(rows: Array, matrices: Array) -> Array:  # (..., n, d), (..., d, d)
    """Squared length of every row times an upper-triangular matrix, batched: (..., n).

    >>> import numpy as np
    >>> triangular_squares(np.array([[1.0, 2.0]]), np.array([[3.0, 2.0], [0.0, 1.0]]))
    array([25.])
    """
    if not is_numpy_array(rows):
        return squares(rows @ matrices)
    # By panels of columns, to skip most of the zeros; narrower panels skip more but run slower.
    d = matrices.shape[-1]
    width = max(MIN_PANEL, d // 8)
    panels = (slice(start, start + width) for start in range(0, d, width))
    return sum(squares(rows[..., : p.stop] @ matrices[..., : p.stop, p]) for p in panels)


@cache
def _lapack(name: str, dtype: Any) -> Any:
    return scipy.linalg.get_lapack_funcs((name,), dtype=dtype)[0]


@cache
def _blas(name: str, dtype: Any) -> Any:
    return scipy.linalg.get_blas_funcs((name,), dtype=dtype)[0]


def _stacked(matrices: Array) -> Array:  # (..., n, k) -> (m, n, k)
    """View with a single batch axis; reshape(-1, ...) would fail for empty arrays."""
    return matrices.reshape(math.prod(matrices.shape[:-2]), *matrices.shape[-2:])


def _whiten_in_namespace(rows: Array, factor: Array, overwrite: bool) -> Array:
    xp = array_namespace(rows)
    if hasattr(xp.linalg, "solve_triangular"):
        upper = xp.matrix_transpose(factor)
        out = rows if overwrite else None
        return xp.linalg.solve_triangular(upper, rows, upper=True, left=False, out=out)
    # The standard has no triangular solve; the general one gives the same result more slowly.
    try:
        return xp.matrix_transpose(xp.linalg.solve(factor, xp.matrix_transpose(rows)))
    except failures(xp):  # singular to rounding
        return xp.full_like(rows, xp.nan)


def vector(*scalars: Array) -> Array:  # () each -> (n,)
    """Stack scalars; for NumPy without the overhead of its `stack`.

    >>> import numpy as np
    >>> vector(np.float32(1), np.float32(2)).dtype
    dtype('float32')
    """
    if is_numpy_array(scalars[0]):
        return np.array(scalars)
    return array_namespace(*scalars).stack(scalars)


def mahalanobis(rows: Array, factor: Array) -> Array:  # (..., n, k), (..., k, k) -> (..., n)
    """Norm of every row x in the metric of a covariance L L': ``sqrt(x' (L L')^-1 x)``.

    >>> import numpy as np
    >>> mahalanobis(np.array([[2.0, 0.0], [0.0, 3.0]]), np.diag([2.0, 3.0]))
    array([1., 1.])
    """
    return array_namespace(rows).sqrt(squares(whiten(rows, factor)))


def squares(rows: Array) -> Array:  # (..., n, k) -> (..., n)
    """Squared length of every row.

    >>> import numpy as np
    >>> squares(np.array([[3.0, 4.0]]))
    array([25.])
    """
    xp = array_namespace(rows)
    if is_numpy_array(rows):
        return xp.vecdot(rows, rows)
    return xp.linalg.vector_norm(rows, axis=-1) ** 2  # torch's vecdot runs many small products
