"""Why a batch was answered as it was: every reason that a certificate, a gate or a method gives."""

from __future__ import annotations

from caster.core.types import REASONS, Reason

UNGATED = "ungated"  # nothing was asked whether to adapt
INERT = "inert"  # there is nothing in this model that the method could adapt
FROZEN = "frozen"  # the method is the frozen model
RESTING = "rest"  # answered as the batches before it, without a comparison
IMPLAUSIBLE = "implausible"  # no sample of the batch could be an image
DISAGREEMENT = "disagreement"  # the referee: head and Source-GDA differ on too many samples

KNOWN: frozenset[str] = frozenset(
    {*REASONS, UNGATED, INERT, FROZEN, RESTING, IMPLAUSIBLE, DISAGREEMENT}
)
ACCEPTING: frozenset[str] = frozenset({"accepted", UNGATED})  # RESTING goes with either verdict
DECIDED: frozenset[Reason] = frozenset(  # what `gate.decide` says of confident samples and a ratio
    {"accepted", "ratio", "min_samples", "min_classes", "no_confident_class"}
)
