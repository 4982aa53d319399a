"""One transport tried on projected features, and judged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from caster.config import Settings
from caster.core.arrays import to_numpy
from caster.core.gate import decide
from caster.core.linalg import Array
from caster.core.proposal import Proposal, propose
from caster.core.types import SourceMoments, Verdict


def try_transport(
    z: Array,  # (B, k), B >= 2
    moments: SourceMoments,  # restricted to the same k
    settings: Settings,
    metric: Array | None = None,
) -> tuple[Proposal, Verdict]:
    """The transported classifier's answer for a batch, and whether the batch supports it."""
    with np.errstate(all="ignore"):  # a numerical failure is in the verdict
        proposal = transport(z, moments, settings, metric)
    return proposal, judge(to_numpy(proposal.evidence).tolist(), moments.n_classes, settings)


def transport(
    z: Array, moments: SourceMoments, settings: Settings, metric: Array | None = None
) -> Proposal:
    """`propose` with these settings."""
    return propose(
        z,
        moments,
        lam=settings.lam,
        beta=settings.beta,
        threshold=settings.confidence,
        eps=settings.eps,
        metric=metric,
    )


def judge(evidence: Sequence[float], n_classes: int, settings: Settings) -> Verdict:
    """`decide` with these settings."""
    return decide(
        *evidence,
        n_classes=n_classes,
        tau=settings.tau,
        min_samples=settings.min_samples,
        min_classes=settings.min_classes,
    )
