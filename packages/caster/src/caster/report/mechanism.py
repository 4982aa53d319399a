"""Names of the two mechanisms, their reasons and their constants in reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from caster.core.verdict import REASONS, Reason
from caster.report import CLASSIFIERS
from caster.report.figures import TRANSPORT_TERMS, Terms

LAYER_TERMS = Terms("mixture transport", None, "the frozen model is fully confident")
LAYER_REASONS: dict[Reason, str] = {
    "accepted": "the answer with aligned layers is used",
    "ratio": "the certificate is above tau",
    "numerical": "aligned logits are not finite",
    "implausible": "no sample of the batch could be an image",
    "rest": "not compared: the last verdict still applies",
}
LAYER_CONSTANTS = {
    "prior": "weight of the source's moments, in samples",
    "memory": "samples behind the target's moments, earlier ones if a batch has fewer",
    "depth": "share of the sites that are aligned, from the first on",
    "maps": "per channel, or full where a site has few channels",
    "tau": "largest accepted ratio",
    "window": "samples behind the certificate",
}


@dataclass(frozen=True)
class Mechanism:
    """How a report describes a mechanism.

    >>> TRANSPORT.label("gated"), aligned_layers({"mixture": True}).label("gated")
    ('transport, gated', 'mixture transport, gated')
    """

    name: Literal["layers", "features"]
    method: str  # its name in `caster methods`
    terms: Terms  # words in figures
    reasons: Mapping[Reason, str]
    settings: Mapping[str, Any] | None = None  # its own; None: those of the state

    @property
    def noun(self) -> str:
        """Its name in a sentence."""
        return self.terms.noun

    def label(self, classifier: str) -> str:
        """Label one of `CLASSIFIERS` under this mechanism."""
        return CLASSIFIERS[classifier].replace(TRANSPORT.noun, self.noun)


TRANSPORT = Mechanism("features", "caster", TRANSPORT_TERMS, REASONS)


def aligned_layers(settings: Mapping[str, Any]) -> Mechanism:
    """Describe aligned layers: mixture transport or, without class moments, layer transport."""
    terms = LAYER_TERMS if settings["mixture"] else replace(LAYER_TERMS, noun="layer transport")
    chosen = {name: value for name, value in settings.items() if name in LAYER_CONSTANTS}
    return Mechanism("layers", terms.noun.replace(" ", "-"), terms, LAYER_REASONS, chosen)
