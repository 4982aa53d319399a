"""Gaussian discriminant scores, and how confident they are."""

from __future__ import annotations

from array_api_compat import array_namespace

from caster.core.linalg import Array, whiten


def gaussian_scores(
    z: Array,  # (B, k)
    means: Array,  # (C, k)
    covariances: Array,  # (C, k, k), positive definite
    priors: Array,  # (C,)
) -> Array:  # (B, C)
    """g_c(z): Gaussian log density, less its constant, plus log prior (Eq. 5).

    >>> import numpy as np
    >>> means, covariances = np.array([[0.0], [4.0]]), np.ones((2, 1, 1))
    >>> gaussian_scores(np.array([[0.0], [3.0]]), means, covariances, np.ones(2)).tolist()
    [[0.0, -8.0], [-4.5, -0.5]]
    """
    xp = array_namespace(z)
    factor = xp.linalg.cholesky(covariances)
    whitened = whiten(z[None, :, :] - means[:, None, :], factor)  # (C, B, k)
    distance = xp.sum(whitened * whitened, axis=-1)  # (C, B)
    half_log_det = xp.sum(xp.log(xp.linalg.diagonal(factor)), axis=-1)  # (C,)
    return -0.5 * distance.T + (xp.log(priors) - half_log_det)


def confidence(scores: Array) -> Array:  # (B, C) -> (B,)
    """Largest softmax probability of every row of scores.

    >>> import numpy as np
    >>> confidence(np.array([[0.0, 0.0], [0.0, -np.inf]]))
    array([0.5, 1. ])
    """
    xp = array_namespace(scores)
    return 1.0 / xp.sum(xp.exp(scores - xp.max(scores, axis=1, keepdims=True)), axis=1)
