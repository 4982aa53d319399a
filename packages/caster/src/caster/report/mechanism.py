"""How reports name the two mechanisms, their reasons and their constants."""

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
    "ratio": "certificate above tau",
    "numerical": "aligned logits are not finite",
    "implausible": "no sample of the batch could be an image",
    "rest": "not compared: the last verdict stands",
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
    """A mechanism in the words of a report.

    >>> TRANSPORT.label("gated"), aligned_layers({"mixture": True}).label("gated")
    ('transport, gated', 'mixture transport, gated')
    """

    name: Literal["layers", "features"]
    method: str  # that it runs, as `caster methods` has it
    terms: Terms  # of figures
    reasons: Mapping[Reason, str]
    settings: Mapping[str, Any] | None = None  # its own; None: those the state carries

    @property
    def noun(self) -> str:
        """Its name in a sentence."""
        return self.terms.noun

    def label(self, classifier: str) -> str:
        """The label of one of `CLASSIFIERS` under this mechanism."""
        return CLASSIFIERS[classifier].replace(TRANSPORT.noun, self.noun)


TRANSPORT = Mechanism("features", "caster", TRANSPORT_TERMS, REASONS)


def aligned_layers(settings: Mapping[str, Any]) -> Mechanism:
    """Aligned layers, by mixture transport or, without moments of classes, by layer transport."""
    terms = LAYER_TERMS if settings["mixture"] else replace(LAYER_TERMS, noun="layer transport")
    chosen = {name: value for name, value in settings.items() if name in LAYER_CONSTANTS}
    return Mechanism("layers", terms.noun.replace(" ", "-"), terms, LAYER_REASONS, chosen)
