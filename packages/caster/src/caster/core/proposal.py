"""One target batch through Sec. 3 of the paper, up to but not including the decision."""

from __future__ import annotations

from dataclasses import dataclass

from array_api_compat import array_namespace

from caster.core.certificate import centroid_residuals, ratio
from caster.core.discriminant import confidence, transported_scores
from caster.core.linalg import Array
from caster.core.transport import estimate, pull
from caster.core.types import AffineMap, SourceMoments


@dataclass(frozen=True, eq=False)
class Proposal:
    """A transported classifier's answer for one batch, and the evidence to judge it by."""

    scores: Array  # (B, C), g_c
    assigned: Array  # (B,), class indices
    map: AffineMap
    evidence: Array  # (3,): ratio, confident samples, classes they occupy; one host transfer.
    # The ratio is NaN or infinite if any step failed numerically.


def propose(
    z: Array,  # (B, k), B >= 2
    moments: SourceMoments,  # restricted to the same k
    *,
    lam: float,
    beta: float,
    threshold: float,
    eps: float,
    metric: Array | None = None,  # (k, k), to measure residuals in; None: the margin's own
) -> Proposal:
    """Transport the source to the batch, classify it, and measure its certificate (Eqs. 3-9).

    Another `metric` than the margin's makes the ratio one of unlike things: an ablation.

    >>> import numpy as np
    >>> source = SourceMoments(U=np.eye(1), means=np.array([[-5.0], [5.0]]),
    ...                        covariances=np.ones((2, 1, 1)), counts=np.ones(2))
    >>> shifted = np.array([[1.0], [2.0], [11.0], [12.0]])
    >>> found = propose(shifted, source, lam=1.0, beta=1.0, threshold=0.9, eps=1e-12)
    >>> found.assigned, found.evidence.round(2)
    (array([0, 0, 1, 1]), array([0.01, 4.  , 2.  ]))
    """
    xp = array_namespace(z)
    fitted = estimate(z, moments, lam)
    pulled = pull(fitted, z)
    scores = transported_scores(pulled, fitted, moments, beta)
    assigned = xp.argmax(scores, axis=1)
    kept = confidence(scores) > threshold
    residuals, counts = centroid_residuals(pulled, assigned, kept, moments.means)
    r = ratio(residuals, moments.metric if metric is None else metric, moments.margin, eps)
    r = xp.where(xp.all(xp.isfinite(scores)), r, xp.nan)  # a row of NaN is not confident either
    occupied = xp.astype(counts > 0, counts.dtype)
    evidence = xp.stack([r, xp.sum(counts), xp.sum(occupied)])
    return Proposal(scores, assigned, fitted, evidence)
