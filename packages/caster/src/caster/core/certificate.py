"""The transportability certificate: centroid residuals over the class margin (Eqs. 7-9)."""

from __future__ import annotations

from array_api_compat import device

from caster.core.linalg import Array, mahalanobis, whiten
from caster.core.namespaces import array_namespace


def centroid_residuals(
    pulled: Array,  # (B, k), target features in source coordinates
    assigned: Array,  # (B,), pseudo-class indices
    kept: Array,  # (B,), boolean: confident samples
    means: Array,  # (C, k)
) -> tuple[Array, Array]:  # (C, k), (C,)
    """delta_c, the centroid of each pseudo-class minus its source mean (Eq. 7), and counts.

    Only kept samples count; a class without any has count 0 and residual 0.

    >>> import numpy as np
    >>> pulled, assigned = np.array([[1.0], [3.0], [9.0]]), np.array([0, 0, 1])
    >>> kept, means = np.array([True, True, False]), np.array([[1.5], [8.0]])
    >>> centroid_residuals(pulled, assigned, kept, means)
    (array([[0.5],
           [0. ]]), array([2., 0.]))
    """
    xp = array_namespace(pulled)
    classes = xp.arange(means.shape[0], dtype=assigned.dtype, device=device(assigned))
    member = xp.astype((assigned == classes[:, None]) & kept, pulled.dtype)  # (C, B)
    counts = xp.sum(member, axis=1)
    occupied = counts[:, None] > 0
    centroids = (member @ pulled) / xp.where(occupied, counts[:, None], 1.0)
    return xp.where(occupied, centroids - means, 0.0), counts


def margin(means: Array, metric: Array) -> Array:  # (C, k), (k, k) -> ()
    """gamma_s, the smallest distance between two class means (Eq. 8).

    `metric` is the Cholesky factor of the pooled within-class covariance.

    Differences are taken class by class: expanding the square is faster, but loses precision for
    classes that are close together, which matter most.

    >>> import numpy as np
    >>> float(margin(np.array([[0.0], [4.0], [10.0]]), metric=np.array([[2.0]])))
    2.0
    """
    xp = array_namespace(means)
    whitened = whiten(means, metric)
    steps = (whitened[c + 1 :, :] - whitened[c, :] for c in range(means.shape[0] - 1))
    return xp.sqrt(xp.min(xp.stack([xp.min(xp.sum(step * step, axis=1)) for step in steps])))


def ratio(
    residuals: Array,  # (C, k)
    metric: Array,  # (k, k), the factor that `margin` was measured with
    margin: float,
    eps: float,
) -> Array:  # ()
    """r_t, the largest residual over the margin, both in the same metric (Eq. 9).

    >>> import numpy as np
    >>> float(ratio(np.array([[1.0], [0.0]]), np.array([[2.0]]), margin=2.0, eps=0.0))
    0.25
    """
    xp = array_namespace(residuals)
    return xp.max(mahalanobis(residuals, metric)) / (margin + eps)
