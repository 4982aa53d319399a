"""Methods with the settings they are measured with."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

from subjects import Subject

from caster.adapt.protocol import Method
from caster.adapt.source import Source
from caster.models.protocol import FrozenModel
from caster_bench.methods.catalogue import Entry
from caster_bench.methods.gated import Gated
from caster_bench.methods.gates import GATES
from caster_bench.methods.registry import create, entries, find


@dataclass(frozen=True)
class Variant:
    """A method, a preset of it, and settings of its gate."""

    label: str
    name: str
    preset: str | None = None
    gate: tuple[tuple[str, float], ...] = ()

    def make(self, model: FrozenModel, source: Source) -> Method:
        """The method at work on a model."""
        gate = dict(self.gate) or None
        return create(self.name, model, source, preset=self.preset, gate=gate)

    def settings(self) -> dict[str, Any]:
        """All settings that are not left to the source's state, its gate's among them."""
        entry = find(self.name)
        chosen = entry.options() | dict(entry.presets[self.preset] if self.preset else {})
        if entry.gate is not None:
            known = signature(GATES[entry.gate]).parameters.values()
            chosen |= {p.name: p.default for p in known if p.kind is p.KEYWORD_ONLY}
            chosen |= dict(self.gate)
        given = {key: value for key, value in chosen.items() if value is not None}
        return {k: v if isinstance(v, int | float) else str(v) for k, v in given.items()}


def published(entry: Entry) -> Variant:
    """A method as published for CIFAR-10, or with its defaults."""
    return Variant(entry.name, entry.name, "cifar10" if "cifar10" in entry.presets else None)


def suited(subject: Subject) -> list[Variant]:
    """Every registered method that is for such a network at all."""
    return [published(entry) for entry in entries() if subject.suits(entry)]


def is_inert(method: Method) -> bool:
    """Whether a method, gated or not, finds nothing to adapt."""
    inner = method.method if isinstance(method, Gated) else method
    return bool(getattr(inner, "inert", False))
