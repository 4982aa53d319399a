"""Read a sweep from its TOML file; every error is one line that says where.

Ours rather than pydantic: an unknown name comes with the closest known one, and most rules relate
keys to one another, which would be validators of the same length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import chain, product
from math import isfinite
from pathlib import Path
from typing import Any

from caster.config import Settings
from caster.errors import CasterError
from caster.io.files import AnyPath, read_toml
from caster_bench.sweeps.spec import (
    CLEAN,
    FAMILIES,
    GATE,
    GROUPS,
    LAST,
    ORDERS,
    PUBLISHED_NETWORKS,
    SCHEDULES,
    SEVERITIES,
    SPARE,
    STUDIES,
    THRESHOLDS,
    TRAINED_NETWORKS,
    TUNING,
    Backbone,
    Data,
    Spec,
    Sweep,
    closest,
    frozen_value,
    known,
)

SWEEP_KEYS = ("name", "title", "constants", "backbones", "data", "grid")
GRID_KEYS = (
    *("study", "backbones", "data", "corruptions", "severities", "methods", "seeds"),
    *("batch_sizes", "orders", "schedule", "rounds", "last", "alone"),
)
GRID = "grid {}"  # how errors name one, by its number in the file
NO_HEAD = "none"  # the threshold if no method uses the head
Pairs = tuple[tuple[str, Any], ...]  # settings, sorted by name
Conditions = tuple[tuple[str, int], ...]


def read(path: AnyPath) -> Sweep:
    """Read a sweep and expand its grids, every cell once.

    >>> import tempfile
    >>> text = '''name = "one"
    ... backbones.r = {family = "batch", checkpoint = "r.safetensors"}
    ... data.d = {source = "cifar10:train", target = "cifar10:test"}
    ... grid = [{study = "corruption", corruptions = ["fog"], methods = ["frozen", "caster"]}]'''
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "one.toml"
    ...     _ = path.write_text(text)
    ...     sweep = read(path)
    >>> len(sweep.cells), sweep.data["d"].threshold
    (10, 0.85)
    """
    table, sha256 = read_toml(path)
    with within(str(path)):
        check_keys(table, SWEEP_KEYS, where=" in a sweep")
        name = text(table, "name")
        if Path(name).name != name or name.startswith("."):
            raise CasterError(f"the name {name!r} must be usable as a folder name")
        backbones = {key: _backbone(key, own) for key, own in _tables(table, "backbones").items()}
        data = {key: _data(key, own) for key, own in _tables(table, "data").items()}
        cells, grids = _cells(table.get("grid"), list(backbones), list(data))
        return Sweep(
            name=name,
            title=text(table, "title") if "title" in table else name,
            constants=_constants(table.get("constants", {})),
            backbones=backbones,
            data=data,
            cells=cells,
            sha256=sha256,
            origins={spec: f"{path}: {GRID.format(number)}" for spec, number in grids.items()},
        )


@contextmanager
def within(where: str) -> Iterator[None]:
    """Prefix errors with the key they are about."""
    try:
        yield
    except CasterError as error:
        raise CasterError(f"{where}: {error}") from None


def check_keys(table: Any, keys: Sequence[str], what: str = "key", where: str = "") -> None:
    """Reject what is not a table with these keys.

    >>> check_keys({"seed": [1]}, ["study", "seeds"], where=" in a grid")
    Traceback (most recent call last):
        ...
    caster.errors.CasterError: unknown key 'seed' in a grid: did you mean 'seeds'?
    """
    if not isinstance(table, dict):
        raise CasterError(f"it must be a table, not {table!r}")
    for key in table:
        if key not in keys:
            raise CasterError(f"unknown {what} {key!r}{where}: {closest(key, keys)}")


def text(table: dict[str, Any], key: str) -> str:
    """Return a required string, stripped."""
    value = table.get(key)
    if value is None:
        raise CasterError(f"{key!r} is missing")
    if not isinstance(value, str) or not value.strip():
        raise CasterError(f"{key!r} must be text")
    return value.strip()


def _tables(table: dict[str, Any], key: str) -> dict[str, dict[str, Any]]:
    given = table.get(key)
    if not isinstance(given, dict) or not given:
        raise CasterError(f"there is no [{key}.NAME]")
    for name, own in given.items():
        if not isinstance(own, dict):
            raise CasterError(f"{key}.{name} must be a table")
        if not name or "--" in name or not name.replace("-", "").replace("_", "").isalnum():
            raise CasterError(f"{key}.{name}: a name has letters, digits, '_' and single '-'")
    return given


def _constants(given: Any) -> dict[str, Any]:
    with within("constants"):
        check_keys(given, [constant.name for constant in fields(Settings)], "constant")
        Settings(**given)  # raises for an invalid value
    return dict(given)


def _backbone(name: str, table: dict[str, Any]) -> Backbone:
    with within(f"backbones.{name}"):
        optional = [field.name for field in fields(Backbone) if field.default is None]
        check_keys(table, ("family", "checkpoint", *optional))
        given = {key: text(table, key) for key in optional if key in table}
        if "architecture" in given:
            known(given["architecture"], TRAINED_NETWORKS + PUBLISHED_NETWORKS, "architecture")
        return Backbone(
            name,
            known(text(table, "family"), FAMILIES, "family"),
            text(table, "checkpoint"),
            **given,
        )


def _data(name: str, table: dict[str, Any]) -> Data:
    with within(f"data.{name}"):
        check_keys(table, [field.name for field in fields(Data) if field.name != "name"])
        limits = {key: table[key] for key in ("source_limit", "target_limit") if key in table}
        for key, limit in limits.items():
            if type(limit) is not int or limit < 1:
                raise CasterError(f"{key!r} must be a positive integer, not {limit!r}")
        source, target = text(table, "source"), text(table, "target")
        return Data(name, source, target, _threshold(table, target), **limits)


def _threshold(table: dict[str, Any], target: str) -> float | None:
    given = table.get("threshold", THRESHOLDS.get(target.partition(":")[0]))
    if given == NO_HEAD:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 1:
        raise CasterError(
            "'threshold' must be the clean accuracy that admits a checkpoint, from 0 to 1, "
            f'or "{NO_HEAD}" if no method uses its head, not {given!r}'
        )
    return float(given)


def _cells(
    grids: Any, backbones: list[str], data: list[str]
) -> tuple[dict[Spec, frozenset[str]], dict[Spec, int]]:
    """Cells of all grids with their studies, and their grids; those of one stream are adjacent."""
    if not isinstance(grids, list) or not grids:
        raise CasterError("there is no [[grid]]")
    streams: dict[Spec, dict[Spec, frozenset[str]]] = {}
    numbers: dict[Spec, int] = {}
    for number, table in enumerate(grids, 1):
        with within(GRID.format(number)):
            grid = _grid(table, backbones, data)
        for spec in grid.cells():
            cells = streams.setdefault(spec.stream, {})
            cells[spec] = cells.get(spec, frozenset()) | grid.studies
            numbers.setdefault(spec, number)
    return dict(chain.from_iterable(cells.items() for cells in streams.values())), numbers


@dataclass(frozen=True)
class Grid:
    """The lists of a `[[grid]]`, checked."""

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
        """Product of the lists; methods vary fastest, so cells of one stream are adjacent."""
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


def _grid(table: Any, backbones: list[str], data: list[str]) -> Grid:
    check_keys(table, GRID_KEYS, where=" in a grid")
    for name in ("study", "methods"):
        if name not in table:
            raise CasterError(f"{name!r} is missing")
    schedule = known(table.get("schedule", "each"), SCHEDULES, "schedule")
    alone = table.get("alone", False)
    if not isinstance(alone, bool):
        raise CasterError(f"'alone' is true or false, not {alone!r}")
    studies = frozenset(_names(table["study"], STUDIES, "study"))
    conditions = _conditions(table, schedule)
    if TUNING in studies and not {name for one in conditions for name, _ in one} <= {*SPARE}:
        raise CasterError("settings are chosen on the spare corruptions only")
    return Grid(
        studies=studies,
        backbones=_names(table.get("backbones", backbones), backbones, "backbone"),
        data=_names(table.get("data", data), data, "data"),
        conditions=conditions,
        methods=tuple(_named(m, "method") for m in _list(table["methods"], "methods")),
        seeds=_integers(table.get("seeds", [0]), "seeds", 0),
        batch_sizes=_integers(table.get("batch_sizes", [64]), "batch_sizes", 1),
        orders=tuple(map(_order, _list(table.get("orders", ["shuffled"]), "orders"))),
        schedule=schedule,
        last=known(table.get("last", "keep"), LAST, "value of 'last' called"),
        alone=alone,
    )


def _conditions(table: dict[str, Any], schedule: str) -> tuple[Conditions, ...]:
    """Conditions of every stream: one each, or all in one stream if they are scheduled."""
    given = table.get("corruptions", CLEAN)
    if isinstance(given, str) and given in GROUPS:
        given = list(GROUPS[given])
    named = _names(given, (*GROUPS["all"], CLEAN), "corruption")
    corruptions = [name for name in named if name != CLEAN]
    for name in ("severities", "schedule"):
        if name in table and table[name] != "each" and not corruptions:
            raise CasterError(f"'{name}' needs 'corruptions'")
    severities = _integers(table.get("severities", list(SEVERITIES)), "severities", 1)
    if max(severities) > max(SEVERITIES):
        raise CasterError(f"severities go from 1 to {max(SEVERITIES)}, not to {max(severities)}")
    rounds = table.get("rounds", 1)
    if type(rounds) is not int or rounds < 1:
        raise CasterError(f"'rounds' is an integer from 1 up, not {rounds!r}")
    if rounds > 1 and schedule != "continual":
        raise CasterError("'rounds' needs the schedule 'continual'")
    pairs = tuple(product(corruptions, severities)) * rounds
    if schedule == "each":
        clean: tuple[Conditions, ...] = ((),) if CLEAN in named else ()
        return clean + tuple((pair,) for pair in pairs)
    if CLEAN in named:
        raise CasterError(f"the schedule {schedule!r} takes corruptions only: remove {CLEAN!r}")
    return (pairs,)


def _order(given: Any) -> tuple[str, Pairs]:
    order, settings = _named(given, "order")
    known(order, ORDERS, "order")
    for name, _ in settings:
        known(name, ORDERS[order], f"setting of the order {order!r} called")
    return order, settings


def _named(given: Any, what: str) -> tuple[str, Pairs]:
    """Parse a name, or a table of a name and settings."""
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
    for each in value if isinstance(value, list) else [value]:
        # JSON, and so a key, has no NaN or infinity
        plain = isinstance(each, bool | int | str | float)
        if not plain or (isinstance(each, float) and not isfinite(each)):
            raise CasterError(f"the {what}'s {name} must be a number, text, true, false or a list")


def _names(given: Any, names: Iterable[str], what: str) -> tuple[str, ...]:
    values = [given] if isinstance(given, str) else given
    return tuple(dict.fromkeys(known(name, names, what) for name in _list(values, what)))


def _integers(given: Any, what: str, least: int) -> tuple[int, ...]:
    for value in _list(given, what):
        if type(value) is not int or value < least:
            raise CasterError(f"{what!r} are integers from {least} up, not {value!r}")
    return tuple(dict.fromkeys(given))


def _list(given: Any, what: str) -> list[Any]:
    if not isinstance(given, list | tuple) or not given:
        raise CasterError(f"{what!r} must be a non-empty list, not {given!r}")
    return list(given)
