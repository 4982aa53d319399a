"""One grid of a sweep: lists in, the cells of their product out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from caster.errors import CasterError
from caster_bench.sweeps.names import CLEAN, GROUPS, LAST, ORDERS, SCHEDULES, SEVERITIES, known
from caster_bench.sweeps.spec import GATE, STUDIES, Spec, frozen_value

Pairs = tuple[tuple[str, Any], ...]  # settings, sorted by name
Conditions = tuple[tuple[str, int], ...]

KEYS = (
    "study",
    "backbones",
    "data",
    "corruptions",
    "severities",
    "methods",
    "seeds",
    "batch_sizes",
    "orders",
    "schedule",
    "last",
    "alone",
)


@dataclass(frozen=True)
class Grid:
    """The lists of a grid, checked."""

    studies: frozenset[str]
    backbones: tuple[str, ...]
    data: tuple[str, ...]
    conditions: tuple[Conditions, ...]
    methods: tuple[tuple[str, Pairs], ...]
    seeds: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    orders: tuple[tuple[str, Pairs], ...]
    schedule: str
    last: str
    alone: bool

    def cells(self) -> Iterator[Spec]:
        """The product of the lists, methods fastest: those of one stream stand together."""
        streams = product(
            self.backbones, self.data, self.seeds, self.batch_sizes, self.orders, self.conditions
        )
        for backbone, data, seed, size, (order, options), conditions in streams:
            for method, settings in self.methods:
                yield Spec(
                    backbone=backbone,
                    data=data,
                    method=method,
                    settings=settings,
                    conditions=conditions,
                    schedule=self.schedule if conditions else "each",
                    order=order,
                    order_settings=options,
                    batch_size=size,
                    last=self.last,
                    seed=seed,
                    alone=self.alone,
                )


def read_grid(table: Any, backbones: list[str], data: list[str]) -> Grid:
    """A `[[grid]]` of a sweep that has these backbones and data."""
    if not isinstance(table, dict):
        raise CasterError(f"it must be a table, not {table!r}")
    for name in table:
        known(name, KEYS, "key of a grid")
    for name in ("study", "methods"):
        if name not in table:
            raise CasterError(f"{name!r} is missing")
    schedule = known(table.get("schedule", "each"), SCHEDULES, "schedule")
    alone = table.get("alone", False)
    if not isinstance(alone, bool):
        raise CasterError(f"'alone' is true or false, not {alone!r}")
    return Grid(
        studies=frozenset(_names(table["study"], STUDIES, "study")),
        backbones=_names(table.get("backbones", backbones), backbones, "backbone"),
        data=_names(table.get("data", data), data, "data"),
        conditions=_conditions(table, schedule),
        methods=tuple(_named(m, "method") for m in _list(table["methods"], "methods")),
        seeds=_whole(table.get("seeds", [0]), "seeds", 0),
        batch_sizes=_whole(table.get("batch_sizes", [64]), "batch_sizes", 1),
        orders=tuple(map(_order, _list(table.get("orders", ["shuffled"]), "orders"))),
        schedule=schedule,
        last=known(table.get("last", "keep"), LAST, "choice of 'last'"),
        alone=alone,
    )


def _conditions(table: dict[str, Any], schedule: str) -> tuple[Conditions, ...]:
    """What every stream is under: one condition each, or all in one where they are scheduled."""
    given = table.get("corruptions", CLEAN)
    if isinstance(given, str) and given in GROUPS:
        given = list(GROUPS[given])
    named = _names(given, (*GROUPS["all"], CLEAN), "corruption")
    corruptions = [name for name in named if name != CLEAN]
    if "severities" in table and not corruptions:
        raise CasterError("'severities' are of corruptions, and there are none")
    severities = _whole(table.get("severities", list(SEVERITIES)), "severities", 1)
    if max(severities) > max(SEVERITIES):
        raise CasterError(f"severities go from 1 to {max(SEVERITIES)}, not to {max(severities)}")
    pairs = tuple(product(corruptions, severities))
    if schedule == "each":
        clean: tuple[Conditions, ...] = ((),) if CLEAN in named else ()
        return clean + tuple((pair,) for pair in pairs)
    if CLEAN in named:
        raise CasterError(f"the schedule {schedule!r} is one of corruptions: leave out {CLEAN!r}")
    return (pairs,)


def _order(given: Any) -> tuple[str, Pairs]:
    order, settings = _named(given, "order")
    known(order, ORDERS, "order")
    for name, _ in settings:
        known(name, ORDERS[order], f"setting of the order {order!r} called")
    return order, settings


def _named(given: Any, what: str) -> tuple[str, Pairs]:
    """A name, or a table of a name and settings."""
    table = {what: given} if isinstance(given, str) else given
    if not isinstance(table, dict) or not isinstance(table.get(what), str):
        raise CasterError(
            f"a {what} is a name or {{{what} = NAME, SETTING = VALUE}}, not {given!r}"
        )
    settings = {name: value for name, value in table.items() if name != what}
    for name, value in settings.items():
        _check_setting(name, value, what)
    return table[what], frozen_value(settings)


def _check_setting(name: str, value: Any, what: str) -> None:
    if (name, what) == (GATE, "method"):
        if not isinstance(value, dict):
            raise CasterError(f"the method's gate is a table of settings, not {value!r}")
        for inner, own in value.items():
            _check_setting(inner, own, GATE)
        return
    values = value if isinstance(value, list) else [value]
    # NaN and infinity have no place in JSON, nor in a key
    if not all(isinstance(v, bool | int | str | float) and _is_finite(v) for v in values):
        raise CasterError(f"the {what}'s {name} must be a number, text, true, false or a list")


def _is_finite(value: bool | int | str | float) -> bool:
    """Whether it is no infinity and no NaN."""
    return not isinstance(value, float) or abs(value) < float("inf")


def _names(given: Any, names: Any, what: str) -> tuple[str, ...]:
    values = [given] if isinstance(given, str) else given
    return tuple(dict.fromkeys(known(name, names, what) for name in _list(values, what)))


def _whole(given: Any, what: str, least: int) -> tuple[int, ...]:
    for value in _list(given, what):
        if type(value) is not int or value < least:
            raise CasterError(f"{what!r} are whole numbers from {least} up, not {value!r}")
    return tuple(dict.fromkeys(given))


def _list(given: Any, what: str) -> list[Any]:
    if not isinstance(given, list | tuple) or not given:
        raise CasterError(f"{what!r} must be a list of one or more, not {given!r}")
    return list(given)
