"""Transport one target batch as in Sec. 3 of the paper, and compute its evidence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from caster.config import Settings
from caster.core.arrays import to_numpy
from caster.core.certificate import centroid_residuals, ratio
from caster.core.discriminant import (
    RidgedScores,
    confidence,
    ridged_scores,
    transported_scores,
)
from caster.core.linalg import Array, vector
from caster.core.namespaces import array_namespace
from caster.core.transport import estimate, pull
from caster.core.types import AffineMap, SourceMoments
from caster.core.verdict import Verdict, decide


@dataclass(frozen=True, eq=False)
class Proposal:
    """The transported classifier's answer to one batch, and the evidence for its verdict."""

    scores: Array  # (B, C), g_c
    assigned: Array  # (B,), class indices
    map: AffineMap
    # (3,): r_t, confident samples, classes they occupy, in one array for one transfer to the host.
    # The ratio is NaN or infinite if any step failed numerically.
    evidence: Array


def propose(
    z: Array,  # (B, k), B >= 2
    moments: SourceMoments,  # restricted to the same k
    settings: Settings,
    metric: Array | None = None,  # (k, k), for the residuals; None: the margin's own
    score: RidgedScores = ridged_scores,  # or an equivalent kernel for a GPU
) -> Proposal:
    """Transport the source to the batch, classify it, and compute its certificate (Eqs. 3-9).

    Another `metric` than the margin's is for an ablation: it makes the ratio dimensionally
    inconsistent.

    >>> source = SourceMoments(U=np.eye(1), means=np.array([[-5.0], [5.0]]),
    ...                        covariances=np.ones((2, 1, 1)), counts=np.ones(2))
    >>> found = propose(np.array([[1.0], [2.0], [11.0], [12.0]]), source, Settings())
    >>> found.assigned, found.evidence.round(2)
    (array([0, 0, 1, 1]), array([0.01, 4.  , 2.  ]))
    """
    xp = array_namespace(z)
    fitted = estimate(z, moments, settings.lam)
    pulled = pull(fitted, z)
    scores = transported_scores(pulled, fitted, moments, settings.beta, score)
    assigned = xp.argmax(scores, axis=1)
    kept = confidence(scores) > settings.confidence
    delta, counts = centroid_residuals(pulled, assigned, kept, moments.means)
    metric = moments.metric if metric is None else metric
    r_t = ratio(delta, metric, moments.margin, settings.eps)
    r_t = xp.where(xp.all(xp.isfinite(scores)), r_t, xp.nan)  # NaN rows would just not count
    occupied = xp.astype(counts > 0, counts.dtype)
    evidence = vector(r_t, xp.sum(counts), xp.sum(occupied))
    return Proposal(scores, assigned, fitted, evidence)


def try_transport(
    z: Array,  # (B, k), B >= 2
    moments: SourceMoments,  # restricted to the same k
    settings: Settings,
    metric: Array | None = None,  # as in `propose`
) -> tuple[Proposal, Verdict]:
    """Propose a transport, and decide whether the batch supports it."""
    with np.errstate(all="ignore"):  # the verdict reports a numerical failure
        proposal = propose(z, moments, settings, metric)
    return proposal, decide(to_numpy(proposal.evidence).tolist(), moments.n_classes, settings)
