"""What adapts in an evaluation: transport of the last features, or of layers before them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from caster.core.verdict import REASONS, Reason
from caster.report import CLASSIFIERS
from caster.report.figures import TRANSPORT_TERMS, Terms

LAYER_TERMS = Terms("layer transport", None, "the frozen model has no doubt")
LAYER_REASONS: dict[Reason, str] = {
    "accepted": "layer transport is used",
    "ratio": "certificate above tau",
    "numerical": "aligned logits are not finite",
    "implausible": "no sample of the batch could be an image",
}
LAYER_CONSTANTS = {
    "prior": "samples that the source's moments weigh as",
    "memory": "samples that the target's rest on, earlier ones included where a batch has fewer",
    "depth": "share of the network's sites that are aligned, from the first on",
    "maps": "of a channel by itself, or full ones where a site has few channels",
    "tau": "largest accepted ratio",
    "window": "samples that the certificate rests on, earlier ones included",
}


@dataclass(frozen=True)
class Mechanism:
    """What adapts, and the words for it.

    >>> TRANSPORT.label("gated"), layer_transport({}).label("gated")
    ('transport, gated', 'layer transport, gated')
    """

    name: str  # as `caster methods` has it
    terms: Terms  # of figures
    reasons: Mapping[Reason, str]
    settings: Mapping[str, Any] | None = None  # its own; None: those the state carries

    @property
    def noun(self) -> str:
        """What a sentence calls it."""
        return self.terms.noun

    def label(self, classifier: str) -> str:
        """A classifier of `CLASSIFIERS`, where what adapts is this."""
        return CLASSIFIERS[classifier].replace(TRANSPORT.noun, self.noun)


TRANSPORT = Mechanism("caster", TRANSPORT_TERMS, REASONS)


def layer_transport(settings: Mapping[str, Any]) -> Mechanism:
    """Transport of layers, with its settings."""
    chosen = {name: value for name, value in settings.items() if name in LAYER_CONSTANTS}
    return Mechanism("layer-transport", LAYER_TERMS, LAYER_REASONS, chosen)
