"""The decision: coverage first, then the ratio against its threshold."""

from __future__ import annotations

import math

from caster.core.types import Reason, Verdict


def decide(
    ratio: float,
    confident: float,
    classes: float,
    *,
    n_classes: int,
    tau: float,
    min_samples: int,
    min_classes: int,
) -> Verdict:
    """Accept a transport iff its coverage suffices and r_t <= tau, and say why.

    `min_classes` is capped by the number of classes there are. A ratio that is not finite means
    that the transport could not be computed.

    >>> decide(0.3, 40, 8, n_classes=10, tau=0.8, min_samples=8, min_classes=2).reason
    'accepted'
    >>> decide(1.7, 40, 8, n_classes=10, tau=0.8, min_samples=8, min_classes=2).reason
    'ratio'
    """
    reason: Reason
    if math.isnan(ratio) or (confident and math.isinf(ratio)):
        return refuse("numerical")
    if confident == 0:
        return refuse("no_confident_class")
    if confident < min_samples:
        reason = "min_samples"
    elif classes < min(min_classes, n_classes):
        reason = "min_classes"
    elif ratio > tau:
        reason = "ratio"
    else:
        reason = "accepted"
    return Verdict(reason == "accepted", reason, ratio, int(confident), int(classes))


def refuse(reason: Reason) -> Verdict:
    """The verdict on a batch whose certificate cannot be measured.

    >>> refuse("batch_too_small")
    Verdict(accepted=False, reason='batch_too_small', ratio=inf, confident=0, classes=0)
    """
    return Verdict(accepted=False, reason=reason, ratio=float("inf"), confident=0, classes=0)
