"""Accept or reject a batch, with a reason: check coverage first, then the ratio against tau."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from caster.config import Settings
from caster.core.notebook import html_table

Reason = Literal[
    "accepted",
    "ratio",
    "min_samples",
    "min_classes",
    "no_confident_class",
    "batch_too_small",
    "numerical",
    "implausible",
    "source_check",
    "class_order",
    "rest",
    "feedback",
]

REASONS: dict[Reason, str] = {  # from the certificate and safeguards of last-layer transport
    "accepted": "transport is used",
    "ratio": "certificate above tau",
    "min_samples": "too few confident samples",
    "min_classes": "confident samples in too few classes",
    "no_confident_class": "no confident sample at all",
    "batch_too_small": "a batch of one",
    "numerical": "the transport cannot be computed at this precision",
    "source_check": "transport is off for this state: it falls short of the head on the source",
    "class_order": "classes come in runs, or are too few for the mixture of the source",
}
OTHER_REASONS: dict[Reason, str] = {  # from streams and aligned layers
    "implausible": "no sample of the batch could be an image",
    "rest": "not compared, the last verdict still applies",
    "feedback": "labels of the stream decided",
}
UNTRANSPORTED: frozenset[Reason] = frozenset({"batch_too_small", "numerical"})


@dataclass(frozen=True)
class Verdict:
    """Decision to accept or reject the adaptation to a batch, and its reason.

    >>> Verdict(accepted=False, reason="ratio", ratio=1.2).has_proposal
    True
    """

    accepted: bool
    reason: Reason
    ratio: float  # the certificate; infinite if it cannot be computed, NaN if not measured
    confident: int = 0  # samples above the confidence threshold
    classes: int = 0  # pseudo-classes that they occupy

    def __repr__(self) -> str:
        measured = f", confident={self.confident}, classes={self.classes}" if self.confident else ""
        head = f"accepted={self.accepted}, reason={self.reason!r}, ratio={self.ratio:.4g}"
        return f"Verdict({head}{measured})"

    def _repr_html_(self) -> str:
        return html_table("Verdict", self.summary())

    def summary(self) -> dict[str, str]:
        """Decision, reason and evidence, in words.

        >>> Verdict(accepted=False, reason="ratio", ratio=1.2).summary()
        {'verdict': 'rejected: certificate above tau', 'ratio': '1.2'}
        """
        decided = "accepted" if self.accepted else "rejected"
        words = REASONS | OTHER_REASONS
        why = "" if self.reason == decided else f": {words.get(self.reason, self.reason)}"
        ratio = "not measured" if math.isnan(self.ratio) else f"{self.ratio:.4g}"
        found = {"verdict": decided + why, "ratio": ratio}
        if self.confident:
            found["confident samples"] = f"{self.confident}, in {self.classes} classes"
        return found

    @property
    def has_proposal(self) -> bool:
        """Whether the batch has an adapted answer, accepted or not."""
        return self.reason not in UNTRANSPORTED


def decide(
    evidence: Sequence[float],  # (3,): r_t, confident samples, classes they occupy
    n_classes: int,
    settings: Settings,
) -> Verdict:
    """Accept a transport if its coverage suffices and r_t <= tau.

    `min_classes` is capped at the number of classes. A ratio that is not finite means that the
    transport failed numerically.

    >>> decide((0.3, 40, 8), 10, Settings(tau=0.8)).reason
    'accepted'
    >>> decide((1.7, 40, 8), 10, Settings(tau=0.8)).reason
    'ratio'
    """
    ratio, confident, classes = evidence
    reason: Reason
    if math.isnan(ratio) or (confident and math.isinf(ratio)):
        return reject("numerical")
    if confident == 0:
        return reject("no_confident_class")
    if confident < settings.min_samples:
        reason = "min_samples"
    elif classes < min(settings.min_classes, n_classes):
        reason = "min_classes"
    elif ratio > settings.tau:
        reason = "ratio"
    else:
        reason = "accepted"
    return Verdict(reason == "accepted", reason, ratio, int(confident), int(classes))


def reject(reason: Reason) -> Verdict:
    """Reject a batch whose certificate cannot be measured.

    >>> reject("batch_too_small").ratio
    inf
    """
    return Verdict(accepted=False, reason=reason, ratio=math.inf)
