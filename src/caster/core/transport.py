"""Affine statistics transport: estimate the map, push source moments, pull target features."""

from __future__ import annotations

from array_api_compat import array_namespace

from caster.core.linalg import Array, identity_like, inverse_symmetric_root, symmetric_root
from caster.core.moments import batch_moments
from caster.core.types import AffineMap


def whiten_colour(C_t: Array, C_s: Array, lam: float) -> Array:  # (k, k), (k, k) -> (k, k)
    """Whiten-colour map A = (C_t + lam I)^1/2 (C_s + lam I)^-1/2 (Eq. 3)."""
    ridge = lam * identity_like(C_s)
    return symmetric_root(C_t + ridge) @ inverse_symmetric_root(C_s + ridge)


def whiten_colour_diagonal(C_t: Array, C_s: Array, lam: float) -> Array:  # -> (k, k)
    """Diagonal analogue of Eq. 3: the same map from the variances alone."""
    xp = array_namespace(C_t)
    target, source = (xp.linalg.diagonal(C) + lam for C in (C_t, C_s))
    return xp.sqrt(target / source) * identity_like(C_s)


def estimate(
    z: Array,  # (B, k), target batch
    mean: Array,  # (k,), m_s
    covariance: Array,  # (k, k), C_s
    lam: float,
) -> AffineMap:
    """The map that carries the source's global moments to the batch's (Eq. 3).

    >>> import numpy as np
    >>> z = np.array([[1.0], [3.0], [5.0], [7.0]])
    >>> fitted = estimate(z, mean=np.array([0.0]), covariance=np.array([[1.25]]), lam=0.0)
    >>> fitted.A, fitted.b
    (array([[2.]]), array([4.]))
    """
    m_t, C_t = batch_moments(z)
    batch_size, k = z.shape
    diagonal = batch_size < 2 * k  # too few samples to support the k^2 parameters of a full map
    A = (whiten_colour_diagonal if diagonal else whiten_colour)(C_t, covariance, lam)
    return AffineMap(A, m_t - A @ mean, diagonal)


def push(
    fitted: AffineMap,
    means: Array,  # (C, k)
    covariances: Array,  # (C, k, k)
    beta: float,
) -> tuple[Array, Array]:  # (C, k), (C, k, k)
    """Transport class moments: A mu + b and A Sigma A' + beta I (Eq. 4)."""
    xp = array_namespace(means)
    A = fitted.A
    if fitted.diagonal:
        a = xp.linalg.diagonal(A)
        pushed = covariances * (a[:, None] * a[None, :])
    else:
        pushed = A @ covariances @ A.T
    return means @ A.T + fitted.b, pushed + beta * identity_like(A)


def pull(fitted: AffineMap, z: Array) -> Array:  # (n, k) -> (n, k)
    """Inverse transport of target features, A^-1 (z - b) (Eq. 6).

    >>> import numpy as np
    >>> pull(AffineMap(np.array([[2.0]]), np.array([4.0]), diagonal=True), np.array([[8.0]]))
    array([[2.]])
    """
    xp = array_namespace(z)
    if fitted.diagonal:
        return (z - fitted.b) / xp.linalg.diagonal(fitted.A)
    return xp.linalg.solve(fitted.A, (z - fitted.b).T).T
