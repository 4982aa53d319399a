"""Reasons of the batches in records: those of caster's verdicts, and of other methods and gates."""

from caster.core.verdict import REASONS

UNGATED = "ungated"  # the method has no gate
INERT = "inert"  # the model has nothing that the method can adapt
FROZEN = "frozen"  # the method is the frozen model
RESTING = "rest"  # not compared: the last verdict still applies
IMPLAUSIBLE = "implausible"  # no sample of the batch looks like an image
DISAGREEMENT = "disagreement"  # head and Source-GDA disagree on too many samples

# Without "feedback", which needs labels of the stream: benchmarked methods never see them.
KNOWN = frozenset({*REASONS, UNGATED, INERT, FROZEN, RESTING, IMPLAUSIBLE, DISAGREEMENT})
ACCEPTING = frozenset({"accepted", UNGATED})  # RESTING goes with either verdict
DECIDED = frozenset(  # reasons that `caster.core.verdict.decide` returns, except "numerical"
    {"accepted", "ratio", "min_samples", "min_classes", "no_confident_class"}
)
