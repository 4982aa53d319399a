"""Affine statistics transport: estimate the map (Eq. 3), pull target features back (Eq. 6).

Class moments are never pushed forward (Eq. 4): `discriminant` scores pulled-back features instead.
"""

from __future__ import annotations

from array_api_extra import create_diagonal

from caster.core.linalg import Array, symmetric_roots
from caster.core.moments import batch_moments
from caster.core.namespaces import array_namespace
from caster.core.types import AffineMap, SourceMoments


def whiten_colour(
    C_t: Array,  # (k, k)
    source: SourceMoments,
    lam: float,
) -> tuple[Array, Array]:  # (k, k), (k, k)
    """Whiten-colour map A = (C_t + lam I)^1/2 (C_s + lam I)^-1/2 (Eq. 3), and its inverse."""
    target, target_inverse = symmetric_roots(C_t, lam)
    root, inverse = source.roots(lam)
    return target @ inverse, root @ target_inverse


def whiten_colour_diagonal(
    C_t: Array,  # (k, k)
    source: SourceMoments,
    lam: float,
) -> tuple[Array, Array]:  # (k, k), (k, k)
    """Diagonal analogue of Eq. 3: the map and its inverse from the variances alone."""
    xp = array_namespace(C_t)
    target, variance = (xp.linalg.diagonal(C) + lam for C in (C_t, source.covariance))
    a = xp.sqrt(target / variance)
    return create_diagonal(a), create_diagonal(1.0 / a)


def is_diagonal(batch_size: int, k: int) -> bool:
    """Whether a batch is too small to support the k^2 parameters of a full map.

    >>> is_diagonal(64, k=9), is_diagonal(64, k=63)
    (False, True)
    """
    return batch_size < 2 * k


def estimate(
    z: Array,  # (B, k), target batch
    moments: SourceMoments,  # restricted to the same k
    lam: float,
) -> AffineMap:
    """Estimate the map A_t, b_t from the source's global moments to the batch's (Eq. 3).

    >>> import numpy as np
    >>> source = SourceMoments(U=np.eye(1), means=np.array([[-1.0], [1.0]]),
    ...                        covariances=np.full((2, 1, 1), 0.25), counts=np.ones(2))
    >>> fitted = estimate(np.array([[1.0], [3.0], [5.0], [7.0]]), source, lam=0.0)
    >>> fitted.A, fitted.b
    (array([[2.]]), array([4.]))
    """
    m_t, C_t = batch_moments(z)
    diagonal = is_diagonal(*z.shape)
    A, inverse = (whiten_colour_diagonal if diagonal else whiten_colour)(C_t, moments, lam)
    return AffineMap(A, m_t - A @ moments.mean, inverse, diagonal)


def pull(fitted: AffineMap, z: Array) -> Array:  # (n, k) -> (n, k)
    """Map target features back to source coordinates: A^-1 (z - b) (Eq. 6).

    >>> import numpy as np
    >>> A, b, inverse = np.array([[2.0]]), np.array([4.0]), np.array([[0.5]])
    >>> pull(AffineMap(A, b, inverse, diagonal=True), np.array([[8.0]]))
    array([[2.]])
    """
    return (z - fitted.b) @ fitted.inverse.T
