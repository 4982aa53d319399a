"""Gaussian discriminant scores (Eqs. 4 and 5) and their confidence."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from caster.core.arrays import as_real_array, to_numpy
from caster.core.linalg import (
    SMALL_ORDER,
    Array,
    cholesky,
    factor_and_whiten,
    identity_like,
    squares,
    triangular_squares,
    whiten,
)
from caster.core.namespaces import array_namespace, is_numpy_array
from caster.core.threads import parallel_map
from caster.core.types import AffineMap, SourceMoments

RidgedScores = Callable[[Array, SourceMoments, Array], Array]


def gaussian_scores(
    z: Array,  # (B, k)
    means: Array,  # (C, k)
    covariances: Array,  # (C, k, k)
    ridge: Array,  # (k, k), added to each of them
    priors: Array,  # (C,)
) -> Array:  # (B, C)
    """g_c(z), the Gaussian log density without its constant, plus the log prior (Eq. 5).

    >>> import numpy as np
    >>> means, covariances = np.array([[0.0], [4.0]]), np.ones((2, 1, 1))
    >>> z, ridge, priors = np.array([[0.0], [3.0]]), np.zeros((1, 1)), np.ones(2)
    >>> gaussian_scores(z, means, covariances, ridge, priors).tolist()
    [[0.0, -8.0], [-4.5, -0.5]]
    """
    xp = array_namespace(z)
    batch_size, k = z.shape
    if is_numpy_array(z) and k >= SMALL_ORDER:
        systems = xp.empty((means.shape[0], k, k + batch_size), dtype=z.dtype)
        factor, columns = systems[:, :, :k], systems[:, :, k:]
        xp.add(covariances, ridge, out=factor)
        xp.subtract(xp.ascontiguousarray(z.T), means[:, :, None], out=columns)
        factor_and_whiten(systems)
        distance = xp.einsum("ckb,ckb->cb", columns, columns)
    else:
        factor = cholesky(covariances + ridge, overwrite=True)
        rows = whiten(z[None, :, :] - means[:, None, :], factor, overwrite=True)  # (C, B, k)
        distance = squares(rows)
    half_log_det = xp.sum(xp.log(xp.linalg.diagonal(factor)), axis=-1)  # (C,)
    return -0.5 * distance.T + (xp.log(priors) - half_log_det)


def ridged_scores(
    z: Array,  # (B, k)
    moments: SourceMoments,  # restricted to the same k
    ridge: Array,  # (k, k)
) -> Array:  # (B, C)
    """g_c with class covariances Sigma_c + ridge, blocks of classes in parallel.

    In source coordinates the ridge almost vanishes if the target's scale is far larger than the
    source's; `slack` then keeps the covariance of a small class positive definite despite rounding.
    """
    ridge = ridge + moments.slack

    def block(c: slice) -> Array:  # (B, C')
        covariances, means = moments.covariances[c, :, :], moments.means[c, :]
        return gaussian_scores(z, means, covariances, ridge, moments.priors[c])

    return _blockwise(block, z, moments)


def source_scores(
    z: Array,  # (B, k)
    moments: SourceMoments,  # restricted to the same k
    beta: float,
) -> Array:  # (B, C)
    """g_c of the source's own classes (Eq. 5 without a map), with covariances Sigma_c + beta I.

    Whitening does not depend on the batch and is cached, except on a GPU, which has less memory.
    """
    if not is_numpy_array(z):
        return ridged_scores(z, moments, beta * identity_like(moments.within))
    W, at_mean = moments.whiteners(beta)

    def block(c: slice) -> Array:  # (B, C')
        distance = triangular_squares(z - moments.means[c, None, :], W[c])  # (C', B)
        return at_mean[c] - 0.5 * distance.T

    return _blockwise(block, z, moments)


def _blockwise(
    scores: Callable[[slice], Array], z: Array, moments: SourceMoments
) -> Array:  # (B, C)
    several = parallel_map if is_numpy_array(z) else map
    blocks = list(several(scores, _class_blocks(z, moments.n_classes)))
    return blocks[0] if len(blocks) == 1 else array_namespace(z).concat(blocks, axis=1)


def transported_scores(
    pulled: Array,  # (B, k), target features in source coordinates
    fitted: AffineMap,
    moments: SourceMoments,
    beta: float,
    score: RidgedScores = ridged_scores,
) -> Array:  # (B, C)
    """g_c of the transported classes (Eqs. 4 and 5), computed in source coordinates.

    Covariance A Sigma A' + beta I at z and Sigma + beta (A'A)^-1 at A^-1 (z - b) give the same
    score up to log |det A|. The second form adds one matrix to all class covariances; the first
    needs two products of k x k matrices per class.
    """
    ridge = beta * (fitted.inverse @ fitted.inverse.T)
    return score(pulled, moments, ridge) - _log_det(fitted)


def _log_det(fitted: AffineMap) -> Array:  # ()
    """log |det A|; on a GPU, factoring a diagonal A would take a tenth of a batch's time."""
    xp = array_namespace(fitted.A)
    if fitted.diagonal:
        return xp.sum(xp.log(xp.linalg.diagonal(fitted.A)))
    return xp.linalg.slogdet(fitted.A).logabsdet


def _class_blocks(z: Array, n_classes: int) -> list[slice]:
    """Split the classes into blocks whose temporaries fit a CPU's cache, or 40 MiB on a GPU."""
    batch_size, k = z.shape
    budget = 2**21 if is_numpy_array(z) else 2**23  # a thousand classes of 64 samples at once
    step = max(1, budget // (k * (k + batch_size)))
    return [slice(c, min(c + step, n_classes)) for c in range(0, n_classes, step)]


def probabilities(scores: Array) -> Array:  # (B, C) -> (B, C)
    """Softmax of every row of scores.

    >>> import numpy as np
    >>> probabilities(np.array([[0.0, 0.0], [0.0, -np.inf]]))
    array([[0.5, 0.5],
           [1. , 0. ]])
    """
    xp = array_namespace(scores)
    powers = xp.exp(scores - xp.max(scores, axis=1, keepdims=True))
    return powers / xp.sum(powers, axis=1, keepdims=True)


def host_probabilities(scores: Array) -> NDArray[np.float64]:  # (B, C) -> (B, C)
    """Softmax of scores on any device, in NumPy and float64."""
    return np.asarray(probabilities(to_numpy(as_real_array(scores)).astype(np.float64)))


def confidence(scores: Array) -> Array:  # (B, C) -> (B,)
    """Largest softmax probability of every row of scores.

    >>> import numpy as np
    >>> confidence(np.array([[0.0, 0.0], [0.0, -np.inf]]))
    array([0.5, 1. ])
    """
    xp = array_namespace(scores)
    return 1.0 / xp.sum(xp.exp(scores - xp.max(scores, axis=1, keepdims=True)), axis=1)
