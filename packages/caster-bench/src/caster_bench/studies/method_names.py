"""Names of the methods and gates that checks and studies treat as what they are."""

from __future__ import annotations

GATED, ALWAYS, MIXED = "caster", "caster-ungated", "caster-mixed-metric"
LAYERS, LAYERS_ALWAYS = "layer-transport", "layer-transport-ungated"
SOURCE_GDA = "source-gda"
OWN = "caster"  # prefix of the methods whose settings are caster's constants
CERTIFICATE, REFEREE = "certificate", "referee"


def inner_and_gate(method: str) -> tuple[str, str]:
    """The method behind a gate, and the gate; an empty name if there is none.

    >>> inner_and_gate("tent+referee"), inner_and_gate("tent")
    (('tent', 'referee'), ('tent', ''))
    """
    inner, _, gate = method.partition("+")
    return inner, gate
