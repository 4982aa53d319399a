"""Resolve and check the settings of a cell's method, gate and stream before anything runs."""

from __future__ import annotations

from functools import cache
from typing import Any

from caster.errors import CasterError
from caster_bench.data.streams import Condition, StreamSettings
from caster_bench.methods.gates import GATES, keywords
from caster_bench.methods.registry import find
from caster_bench.sweeps import Spec, Sweep
from caster_bench.sweeps.parse import within
from caster_bench.sweeps.spec import GATE, PRESET, known

SEED = "seed"
SITES = "sites"  # a setting that all methods aligning layers have, and no other method

entry_of = cache(find)  # `find` scans entry points of other packages on every call


def settings_of(spec: Spec) -> dict[str, Any]:
    """Return every setting of a cell's method and gate as JSON values, without building the method.

    The registry's defaults come first, then the preset, then the sweep's own values. Nothing is
    left to the source state, whose digest is part of the identity too.

    >>> settings_of(Spec("r", "d", "tent+referee", (("lr", 0.1),)))["gate"]
    {'agreement': 0.97}
    """
    entry, chosen = entry_of(spec.method), spec.given
    settings = dict(_options(spec.method))
    settings |= entry.presets[chosen.pop(PRESET)] if PRESET in chosen else {}
    if SEED in settings:
        settings[SEED] = spec.seed
    gate = chosen.pop(GATE, {})
    settings |= chosen
    if entry.gate is not None:
        settings[GATE] = keywords(GATES[entry.gate]) | gate
    return {name: _plain(value) for name, value in settings.items()}


def constructor_settings(spec: Spec) -> dict[str, Any]:
    """Return what a cell's method is created with; a method that draws gets the cell's seed."""
    return ({SEED: spec.seed} if SEED in _options(spec.method) else {}) | spec.given


def wants_layers(spec: Spec) -> bool:
    """Whether a cell's method aligns layers, so that its state needs layer statistics.

    >>> wants_layers(Spec("r", "d", "layer-transport")), wants_layers(Spec("r", "d", "tent"))
    (True, False)
    """
    return SITES in _options(spec.method)


def stream_settings(spec: Spec) -> StreamSettings:
    """Return the settings of a cell's stream."""
    return StreamSettings(
        batch_size=spec.batch_size,
        order=spec.order,
        seed=spec.seed,
        last=spec.last,
        conditions=tuple(Condition(*pair) for pair in spec.conditions),
        schedule=spec.schedule,
        **dict(spec.order_settings),
    )


def check_settings(sweep: Sweep) -> None:
    """Raise if a cell sets something that its method, gate or stream does not have."""
    methods: dict[Any, Spec] = {}
    streams: dict[Any, Spec] = {}
    for s in sweep.cells:
        methods.setdefault((s.method, s.settings), s)
        kind = s.order, s.order_settings, s.schedule, s.conditions, s.batch_size, s.last
        streams.setdefault(kind, s)
    for check, specs in ((_check_method, methods), (stream_settings, streams)):
        for spec in specs.values():
            with within(sweep.origins[spec]):
                check(spec)


def _check_method(spec: Spec) -> None:
    entry = entry_of(spec.method)
    options = _options(spec.method)
    for name, value in spec.given.items():
        if name == PRESET:
            known(value, entry.presets, f"preset of {spec.method} called")
        elif name != GATE:
            known(name, options, f"setting of {spec.method} called")
        elif entry.gate is None:
            raise CasterError(
                f"{spec.method} has no gate to set: name one, as in '{spec.method}+certificate'"
            )
        else:
            for inner in value:
                known(inner, keywords(GATES[entry.gate]), f"setting of the {entry.gate} called")


@cache
def _options(method: str) -> dict[str, Any]:
    return entry_of(method).options()


def _plain(value: Any) -> Any:
    """Convert a setting to JSON types."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
