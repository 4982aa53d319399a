"""What of a file of claims says which figures are compared, and how."""

from __future__ import annotations

from math import isfinite
from typing import Any

from caster.errors import CasterError
from caster_bench.studies.claims.fields import check, inner, maybe, text
from caster_bench.studies.claims.rules import KINDS, SAME_SIGN, SIGNS, Rule
from caster_bench.studies.claims.types import Comparison
from caster_bench.studies.claims.values import TAKES, Cell, Figure, Printed
from caster_bench.sweeps.names import known
from caster_bench.sweeps.spec import frozen_value

CELL = ("sweep", "table", "row", "column", "interval", "take")
PAPER = ("paper", "paper_less", "paper_over")
KEYS = ("what", *CELL, "less", "over", *PAPER, *KINDS, "partly")


def read_comparison(table: dict[str, Any], sweep: str, sweeps: dict[str, str]) -> Comparison:
    """One test of a claim; figures are of `sweep` where it does not name another."""
    check(table, KEYS)
    kinds = [kind for kind in KINDS if kind in table]
    if len(kinds) != 1:
        raise CasterError(f"a test has one rule of {', '.join(KINDS)}")
    rule = Rule(kinds[0], _bound(kinds[0], table[kinds[0]]), _partly(table.get("partly")))
    paper = _printed(table)
    if paper is None and rule.needs_paper:
        raise CasterError(
            f"the rule '{rule.kind}' needs a figure of the paper's: name it in 'paper'"
        )
    figure = read_figure(
        {key: table[key] for key in (*CELL, "less", "over") if key in table},
        {"sweep": sweep},
        sweeps,
    )
    return Comparison(text(table, "what"), figure, paper, rule)


def _printed(table: dict[str, Any]) -> Printed | None:
    path, less, over = (_path(table[key]) if key in table else None for key in PAPER)
    if path is None:
        return None
    found = Printed(path, less, over)
    _ = found.text  # raises where the paper has no such figure
    return found


def _path(given: Any) -> tuple[str | int, ...]:
    if not isinstance(given, list) or not all(type(place) in (str, int) for place in given):
        raise CasterError(f"the paper's figures are named by a list of text, not {given!r}")
    return tuple(given)


def _bound(kind: str, given: Any) -> float | str:
    if kind == "sign":
        return SIGNS[known(given, SIGNS, SAME_SIGN)]
    if kind == "equals" and isinstance(given, str):
        return given
    if isinstance(given, bool) or not isinstance(given, int | float) or not isfinite(given):
        raise CasterError(f"{kind!r} must be a number, not {given!r}")
    return float(given)


def _partly(given: Any) -> float | str | None:
    return given if given in (None, SAME_SIGN) else _bound("partly", given)


def read_figure(table: dict[str, Any], given: dict[str, Any], sweeps: dict[str, str]) -> Figure:
    """A cell, and another that it is less or over: that one has what it does not say itself."""
    check(table, (*CELL, "less", "over"))
    own = {key: value for key, value in table.items() if key not in ("less", "over")}
    cell = _cell(given | own, sweeps)
    shared = given | {key: value for key, value in own.items() if key != "interval"}
    others = {
        key: _cell(shared | inner(table, key), sweeps) for key in ("less", "over") if key in table
    }
    return Figure(cell, **others)


def _cell(table: dict[str, Any], sweeps: dict[str, str]) -> Cell:
    check(table, CELL)
    row = table.get("row")
    if not isinstance(row, dict) or not row:
        raise CasterError("'row' must say what stands in which columns")
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
        interval=maybe(table, "interval"),
        take=None if take is None else known(take, TAKES, "take"),
    )
