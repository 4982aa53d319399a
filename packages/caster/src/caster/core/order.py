"""Detect batches whose classes are not mixed in the source's proportions.

Transport matches the moments of a batch with those of the whole source, so it stretches a batch of
few classes over all of them. The certificate cannot detect that if classes lie far apart: the
residuals are small after the stretch. The order of the frozen model's predictions can.

Both thresholds were chosen on the four spare corruptions with a ResNet-18 on CIFAR-10
(docs/small-sources.md). A network that collapses to one class under a severe shift looks like a
stream of one class. The two cannot be told apart, so such a batch is rejected too.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from caster.core.verdict import Verdict

MAX_NEIGHBOURS = 3.0  # excess of equal neighbours over chance, in standard errors
MAX_EXCESS = 0.15  # concentration of the predictions: 0 as in the source, 1 for a single class


def order_evidence(
    assigned: NDArray[np.integer],  # (B,), class indices in stream order, B >= 2
    priors: NDArray[np.floating],  # (C,), of the source
) -> tuple[float, float]:
    """Excess of equal neighbours over chance, in standard errors, and excess concentration.

    Chance means a random order of the same predictions, so a network biased towards one class does
    not look ordered. Concentration compares the probability that two samples get the same
    prediction with the probability that two source samples have the same class. On the host, which
    is faster than a GPU for so few numbers.

    >>> neighbours, excess = order_evidence(np.repeat(np.arange(4), 16), np.full(4, 0.25))
    >>> round(neighbours, 2), round(excess, 2)
    (13.31, -0.02)
    >>> order_evidence(np.zeros(64, dtype=int), np.full(4, 0.25))
    (0.0, 1.0)
    """
    B = len(assigned)
    counts = np.bincount(assigned).astype(priors.dtype)
    alike = (counts @ (counts - 1)) / (B * (B - 1))
    neighbours = np.count_nonzero(assigned[1:] == assigned[:-1]) / (B - 1)
    variance = max(alike * (1 - alike), np.finfo(priors.dtype).eps)
    expected = priors @ priors
    excess = (alike - expected) / (1 - expected)
    return float((neighbours - alike) / np.sqrt(variance / (B - 1))), float(excess)


def is_ordered(neighbours: float, excess: float) -> bool:
    """Whether the classes of a batch come in runs, or are too few for the source's mixture.

    >>> is_ordered(13.3, 0.0), is_ordered(0.0, 1.0), is_ordered(1.2, 0.05)
    (True, True, False)
    """
    return neighbours > MAX_NEIGHBOURS or excess > MAX_EXCESS


def safeguarded(
    verdict: Verdict,
    supported: bool,  # whether transport passed the source check
    chosen: NDArray[np.integer],  # (B,), the frozen model's class indices in stream order
    priors: NDArray[np.floating],  # (C,), of the source
) -> Verdict:
    """Reject a batch with a proposal that the certificate is known to accept in error."""
    if not supported:
        return replace(verdict, accepted=False, reason="source_check")
    if is_ordered(*order_evidence(chosen, priors)):
        return replace(verdict, accepted=False, reason="class_order")
    return verdict
