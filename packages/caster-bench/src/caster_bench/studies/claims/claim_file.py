"""Read a TOML file of claims; every error is one line that says where."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

from caster.errors import CasterError
from caster.io.files import read_toml
from caster_bench.studies.claims.rules import (
    KINDS,
    SAME_SIGN,
    SIGNS,
    TAKES,
    Cell,
    Figure,
    Printed,
    Rule,
)
from caster_bench.sweeps.parse import check_keys, text, within
from caster_bench.sweeps.spec import frozen_value, known

TEXT_KEYS = ("title", "summary", "intro", "records", "document", "reports")
FILE_KEYS = (*TEXT_KEYS, "sweeps", "values", "part")
PART_KEYS = ("title", "sweep", "text", "tables", "figures", "claim")
CELL_KEYS = ("sweep", "table", "row", "column", "interval", "take")
FIGURE_KEYS = (*CELL_KEYS, "less", "over")
PAPER_KEYS = ("paper", "paper_less", "paper_over")
TEST_KEYS = ("what", *FIGURE_KEYS, *PAPER_KEYS, *KINDS, "partly", "direction", "null", "main")
TYPED = re.compile(r"\d[.,]\d|\d ?%")  # a typed figure: decimals, thousands or percent
FREE = re.compile(  # settings, named figures and sections of the paper may contain digits
    r"`[^`]*`|\{[^}]*\}|Secs?\. \d\.\d"
)


@dataclass(frozen=True)
class Comparison:
    """A figure of ours, the paper's if it has one, and the rule that compares them."""

    what: str
    figure: Figure
    paper: Printed | None
    rule: Rule


@dataclass(frozen=True)
class Claim:
    """A statement of the paper in our words, and how it is tested."""

    id: str
    says: str
    where: str  # in the paper
    tests: tuple[Comparison, ...]
    why: str | None  # why it cannot be tested here; then there are no tests
    proof: str | None  # a test of this repository that shows it without data
    needs: tuple[str, ...]  # data sets that its figures must include
    limits: str | None  # limits of our test, known before any run
    note: str | None  # how the result differs from the paper, and why
    core: str | None  # on the first page: why it came out as it did, in a sentence or two


@dataclass(frozen=True)
class Part:
    """Claims of one section of the paper, with the tables and figures shown there."""

    title: str
    sweep: str  # the sweep of these tables and figures
    text: str | None
    tables: tuple[str, ...]
    figures: tuple[str, ...]
    claims: tuple[Claim, ...]


@dataclass(frozen=True)
class Claims:
    """All claims, and where their evidence is; paths are relative to one root."""

    title: str
    summary: str  # first page, before its table
    intro: str
    records: str  # folder with one pack per sweep, by name
    document: str  # file to write
    reports: str  # folder to write, with one report per sweep, by name
    sweeps: dict[str, str]  # name: file
    values: dict[str, Figure]  # figures that texts may refer to
    parts: tuple[Part, ...]


def read_claims(path: Path) -> Claims:
    """Read the claims of a file."""
    table = read_toml(path)[0]
    with within(str(path)):
        return _claims(table)


def _claims(table: dict[str, Any]) -> Claims:
    check_keys(table, FILE_KEYS)
    sweeps = {name: text(_table(table, "sweeps"), name) for name in _table(table, "sweeps")}
    if not sweeps:
        raise CasterError("there are no [sweeps]")
    values = {}
    for name, own in _table(table, "values").items():
        with within(f"values.{name}"):
            values[name] = _figure(own, {}, sweeps)
    parts = []
    for number, own in enumerate(_list(table, "part"), 1):
        with within(f"part {number}"):
            parts.append(_part(own, sweeps))
    ids = [claim.id for part in parts for claim in part.claims]
    if twice := [each for each in ids if ids.count(each) > 1]:
        raise CasterError(f"there are two claims {twice[0]}")
    claims = Claims(
        **{key: text(table, key) for key in TEXT_KEYS},
        sweeps=sweeps,
        values=values,
        parts=tuple(parts),
    )
    for where, words in _written(claims):
        with within(where):
            _check_text(words, values)
    return claims


def _written(claims: Claims) -> Iterable[tuple[str, str]]:
    """Texts written after the runs, which refer to measured figures by name."""
    yield "summary", claims.summary
    yield "intro", claims.intro
    for part in claims.parts:
        yield part.title, part.text or ""
        for claim in part.claims:
            yield claim.id, f"{claim.note or ''} {claim.core or ''}"


def _check_text(words: str, values: dict[str, Figure]) -> None:
    for name in re.findall(r"\{([^}]*)\}", words):
        known(name, values, "value")
    plain = FREE.sub("", words)
    if typed := TYPED.search(plain):
        around = plain[max(0, typed.start() - 20) : typed.end() + 5].strip()
        raise CasterError(
            f"a figure is typed by hand: '{around}': name it in [values] and write {{NAME}}; "
            "settings go in backticks"
        )


def _part(table: Any, sweeps: dict[str, str]) -> Part:
    check_keys(table, PART_KEYS)
    sweep = known(text(table, "sweep"), sweeps, "sweep")
    claims = []
    given = _list(table, "claim") if "claim" in table or "text" not in table else ()
    for number, own in enumerate(given, 1):
        named = isinstance(own, dict) and "id" in own
        with within(str(own["id"]) if named else f"claim {number}"):
            claims.append(_claim(own, sweep, sweeps))
    tables, figures = _texts(table, "tables"), _texts(table, "figures")
    title, words = text(table, "title"), _optional(table, "text")
    return Part(title, sweep, words, tables, figures, tuple(claims))


def _claim(table: Any, sweep: str, sweeps: dict[str, str]) -> Claim:
    check_keys(table, [field.name for field in fields(Claim)])
    tests = []
    for number, own in enumerate(_list(table, "tests") if "tests" in table else (), 1):
        with within(f"test {number}"):
            tests.append(_comparison(own, sweep, sweeps))
    if sum(key in table for key in ("tests", "why", "proof")) != 1:
        raise CasterError("a claim has exactly one of 'tests', 'proof' and 'why'")
    words: dict[str, Any] = {key: text(table, key) for key in ("id", "says", "where")}
    words |= {key: _optional(table, key) for key in ("why", "proof", "limits", "note", "core")}
    return Claim(**words, tests=tuple(tests), needs=_texts(table, "needs"))


def _comparison(table: Any, sweep: str, sweeps: dict[str, str]) -> Comparison:
    """Parse a test; its figures come from `sweep` unless it names another."""
    check_keys(table, TEST_KEYS)
    kinds = [kind for kind in KINDS if kind in table]
    if len(kinds) != 1:
        raise CasterError(f"a test has exactly one rule of {', '.join(KINDS)}")
    more: dict[str, Any] = {
        name: table[name] if table[name] == SAME_SIGN else _bound(name, table[name])
        for name in ("partly", "direction", "null")
        if name in table
    }
    if table.get("main", True) is not True:
        raise CasterError("'main' can only be true")
    rule = Rule(kinds[0], _bound(kinds[0], table[kinds[0]]), **more, main="main" in table)
    paper = _printed(table)
    if paper is None and rule.needs_paper:
        raise CasterError(f"the rule '{rule.kind}' needs a figure of the paper in 'paper'")
    figure = {key: table[key] for key in FIGURE_KEYS if key in table}
    return Comparison(text(table, "what"), _figure(figure, {"sweep": sweep}, sweeps), paper, rule)


def _printed(table: dict[str, Any]) -> Printed | None:
    path, less, over = (_paper_path(table[key]) if key in table else None for key in PAPER_KEYS)
    if path is None:
        return None
    found = Printed(path, less, over)
    _ = found.text  # raises if the paper has no such figure
    return found


def _paper_path(given: Any) -> tuple[str | int, ...]:
    if not isinstance(given, list) or not all(type(key) in (str, int) for key in given):
        raise CasterError(f"a figure of the paper is a list of keys, not {given!r}")
    return tuple(given)


def _bound(kind: str, given: Any) -> float | str:
    if kind == "sign":
        return SIGNS[known(given, SIGNS, SAME_SIGN)]
    if kind == "equals" and isinstance(given, str):
        return given
    if isinstance(given, bool) or not isinstance(given, int | float) or not isfinite(given):
        raise CasterError(f"{kind!r} must be a number, not {given!r}")
    return float(given)


def _figure(table: Any, defaults: dict[str, Any], sweeps: dict[str, str]) -> Figure:
    """Parse a cell and the cell it is compared with, which inherits what it does not set."""
    check_keys(table, FIGURE_KEYS)
    own = {key: value for key, value in table.items() if key not in ("less", "over")}
    cell = _cell(defaults | own, sweeps)
    shared = defaults | {key: value for key, value in own.items() if key != "interval"}
    others = {
        key: _cell(shared | _table(table, key), sweeps) for key in ("less", "over") if key in table
    }
    return Figure(cell, **others)


def _cell(table: dict[str, Any], sweeps: dict[str, str]) -> Cell:
    check_keys(table, CELL_KEYS)
    row = table.get("row")
    if not isinstance(row, dict) or not row:
        raise CasterError("'row' must give the values of some columns")
    for value in row.values():
        several = value if isinstance(value, list) else [value]
        if not all(isinstance(each, str | int | float) for each in several):
            raise CasterError(f"a row holds text and numbers, not {value!r}")
    take = table.get("take")
    return Cell(
        sweep=known(text(table, "sweep"), sweeps, "sweep"),
        table=text(table, "table"),
        row=tuple((name, frozen_value(value)) for name, value in row.items()),
        column=text(table, "column"),
        interval=_optional(table, "interval"),
        take=None if take is None else known(take, TAKES, "take"),
    )


def _optional(table: dict[str, Any], key: str) -> str | None:
    return text(table, key) if key in table else None


def _table(table: dict[str, Any], key: str) -> dict[str, Any]:
    found = table.get(key, {})
    if not isinstance(found, dict):
        raise CasterError(f"{key!r} must be a table")
    return found


def _list(table: dict[str, Any], key: str) -> list[Any]:
    found = table.get(key)
    if not isinstance(found, list) or not found:
        raise CasterError(f"there is no [[{key}]]")
    return found


def _texts(table: dict[str, Any], key: str) -> tuple[str, ...]:
    found = table.get(key, [])
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise CasterError(f"{key!r} must be a list of text")
    return tuple(found)
