"""Methods by name: those of this package, those of others, and any of them behind a gate."""

from __future__ import annotations

import os
from dataclasses import replace
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from caster.adapt.protocol import Method
from caster.adapt.source import Source
from caster.errors import CasterError
from caster.models.protocol import FrozenModel
from caster.state import State
from caster_bench.methods.catalogue import OWN, Entry, Settings
from caster_bench.methods.gated import Gated
from caster_bench.methods.gates import GATES, make_gate

GROUP = "caster_bench.methods"  # entry points of other packages
GATED = ("tent+certificate", "tent+referee", "eata+certificate", "eata+referee")


def names() -> list[str]:
    """Every registered method, and the gated ones of the paper.

    Any other method goes behind a gate in the same way: "sar+referee".

    >>> names()[:2]
    ['frozen', 'source-gda']
    """
    return [entry.name for entry in entries()]


def entries() -> list[Entry]:
    """Every registered method, those of other packages last.

    >>> [entry.name for entry in entries() if entry.gradients][:2]
    ['tent', 'eata']
    """
    known = {entry.name: entry for entry in OWN}
    gated = [_gated(name, known[name.rpartition("+")[0]]) for name in GATED]
    ours = {*known, *GATED}
    points = {point.name: point for point in entry_points(group=GROUP) if point.name not in ours}
    return [*OWN, *gated, *(_load(points[name]) for name in sorted(points))]


def find(name: str) -> Entry:
    """A method by name.

    >>> find("sar+referee").gate
    'referee'
    """
    known = {entry.name: entry for entry in entries()}
    method, _, gate = name.rpartition("+")
    if name in known:
        return known[name]
    if method in known and known[method].gate is None and gate in GATES:
        return _gated(name, known[method])
    near = get_close_matches(name, names(), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names())}"
    raise CasterError(f"there is no method {name!r}: {hint}")


def create(
    name: str,
    model: FrozenModel,
    source: Source | State | str | os.PathLike[str] | None = None,
    *,
    preset: str | None = None,
    gate: Settings | None = None,
    **settings: Any,
) -> Method:
    """A method at work on a model.

    `source` is a fitted state, its file, or a `Source` that also holds labelled source batches.
    `preset` takes published settings by benchmark; `gate` are settings of the gate of a gated
    method, the others are the method's own. The model is never changed.

    >>> import numpy as np
    >>> from caster import wrap
    >>> method = create("frozen", wrap(lambda batch: (batch, batch), version="example-1"))
    >>> method.predict(np.array([[1.0, 2.0]])).logits
    array([[1., 2.]])
    """
    entry = find(name)
    known = Source.of(source)
    known.check(model)
    chosen = _preset(entry, preset) | settings
    unknown = sorted(chosen.keys() - entry.options().keys())
    if unknown:
        possible = ", ".join(entry.options()) or "none"
        raise CasterError(f"{name} has no setting {unknown[0]!r}: its settings are {possible}")
    if gate is not None and entry.gate is None:
        raise CasterError(f"{name} has no gate to set: name one, as in '{name}+certificate'")
    inner = name if entry.gate is None else name.rpartition("+")[0]
    method = entry.maker()(model, known, name=inner, **(dict(entry.settings) | chosen))
    if entry.gate is None:
        return method
    return Gated(method, make_gate(entry.gate, model, known, **(gate or {})))


def _preset(entry: Entry, preset: str | None) -> dict[str, Any]:
    if preset is None:
        return {}
    if preset not in entry.presets:
        known = ", ".join(entry.presets) or "none"
        raise CasterError(f"{entry.name} has no preset {preset!r}: its presets are {known}")
    return dict(entry.presets[preset])


def _gated(name: str, inner: Entry) -> Entry:
    """A method behind the gate its name ends with."""
    gate = name.rpartition("+")[2]
    return replace(
        inner,
        name=name,
        line=f"{inner.name}, where the {gate} allows the update.",
        needs=tuple(dict.fromkeys((*inner.needs, "state"))),
        gate=gate,
    )


def _load(point: EntryPoint) -> Entry:
    """Another package's method; one that cannot be loaded says so when it is used."""
    try:
        entry = point.load()
        if not isinstance(entry, Entry) or entry.name != point.name:
            raise TypeError(
                f"{point.value} is not a caster_bench.methods.Entry named {point.name!r}"
            )
    except Exception as error:  # another package's code may raise anything
        reason = f"{point.name} cannot be loaded from {point.value}: {error}"

        def fail(model: FrozenModel, source: Source, *, name: str) -> Method:
            raise CasterError(reason)

        return Entry(point.name, reason, fail)
    return entry
