"""A sweep from its TOML file: every fault is one line that says where it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from caster.config import Settings
from caster.errors import CasterError
from caster.io.files import AnyPath, read_toml
from caster_bench.sweeps.grid import read_grid
from caster_bench.sweeps.names import FAMILIES, THRESHOLDS, known
from caster_bench.sweeps.spec import Backbone, Data, Spec, Sweep

KEYS = ("name", "title", "constants", "backbones", "data", "grid")
NO_HEAD = "none"  # a threshold where no method uses the head
T = TypeVar("T")


def read(path: AnyPath) -> Sweep:
    """The sweep of a file, its grids expanded and every cell in it once.

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
    return _within(str(path), lambda: _sweep(table, sha256))


def _sweep(table: dict[str, Any], sha256: str) -> Sweep:
    for key in table:
        known(key, KEYS, "key of a sweep")
    name = _text(table, "name")
    if not name or Path(name).name != name or name.startswith("."):
        raise CasterError(f"the name {name!r} must do for a folder's name")
    backbones = {key: _backbone(key, own) for key, own in _tables(table, "backbones").items()}
    data = {key: _data(key, own) for key, own in _tables(table, "data").items()}
    return Sweep(
        name=name,
        title=_text(table, "title") if "title" in table else name,
        constants=_constants(table.get("constants", {})),
        backbones=backbones,
        data=data,
        cells=_cells(table.get("grid"), list(backbones), list(data)),
        sha256=sha256,
    )


def _cells(grids: Any, backbones: list[str], data: list[str]) -> dict[Spec, frozenset[str]]:
    """The cells of all grids, each with its studies; those of one stream stand together."""
    if not isinstance(grids, list) or not grids:
        raise CasterError("there is no [[grid]], and so no cell")
    streams: dict[Spec, dict[Spec, frozenset[str]]] = {}
    for place, table in enumerate(grids, 1):
        grid = _within(f"grid {place}", partial(read_grid, table, backbones, data))
        for spec in grid.cells():
            cells = streams.setdefault(spec.stream, {})
            cells[spec] = cells.get(spec, frozenset()) | grid.studies
    return dict(chain.from_iterable(cells.items() for cells in streams.values()))


def _constants(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise CasterError("'constants' must be a table")
    for name in given:
        known(name, [constant.name for constant in fields(Settings)], "constant")
    Settings(**given)  # raises where a value cannot be
    return dict(given)


def _backbone(name: str, table: dict[str, Any]) -> Backbone:
    def made() -> Backbone:
        _check_keys(table, Backbone)
        optional = {key: _text(table, key) for key in _optional(Backbone) if key in table}
        known(_text(table, "family"), FAMILIES, "family")
        return Backbone(name, table["family"], _text(table, "checkpoint"), **optional)

    return _within(f"backbones.{name}", made)


def _data(name: str, table: dict[str, Any]) -> Data:
    def made() -> Data:
        _check_keys(table, Data)
        limits = {key: table[key] for key in ("source_limit", "target_limit") if key in table}
        for key, limit in limits.items():
            if type(limit) is not int or limit < 1:
                raise CasterError(f"{key!r} must be a whole number from 1 up, not {limit!r}")
        source, target = _text(table, "source"), _text(table, "target")
        return Data(name, source, target, _threshold(table, target), **limits)

    return _within(f"data.{name}", made)


def _threshold(table: dict[str, Any], target: str) -> float | None:
    given = table.get("threshold", THRESHOLDS.get(target.partition(":")[0]))
    if given == NO_HEAD:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 1:
        raise CasterError(
            "'threshold' must be the clean accuracy that admits a checkpoint, from 0 to 1, "
            f'or "{NO_HEAD}" where no method uses its head, not {given!r}'
        )
    return float(given)


def _check_keys(table: dict[str, Any], kind: type[Backbone] | type[Data]) -> None:
    for key in table:
        known(key, [field.name for field in fields(kind) if field.name != "name"], "key")


def _optional(kind: type[Backbone] | type[Data]) -> list[str]:
    return [field.name for field in fields(kind) if field.default is None]


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


def _text(table: dict[str, Any], key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value:
        raise CasterError(
            f"{key!r} must be there, as text" if value is None else f"{key!r} must be text"
        )
    return value


def _within(where: str, make: Callable[[], T]) -> T:
    """What is made, or its error with the place it came from."""
    try:
        return make()
    except CasterError as error:
        raise CasterError(f"{where}: {error}") from None
