"""Figures of ours and of the paper, and the rules that compare them, fixed before any run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from caster.errors import CasterError
from caster.report.intervals import Interval
from caster_bench.studies.paper import printed
from caster_bench.studies.tables import Column, Table, Value

REPRODUCED, PARTLY, NOT = "reproduced", "partly reproduced", "not reproduced"
UNTESTABLE, NOT_RUN = "not testable here", "not run yet"
VERDICTS = (REPRODUCED, PARTLY, NOT, UNTESTABLE, NOT_RUN)
KINDS = ("near", "factor", "sign", "least", "most", "equals")
SIGNS = {"positive": 1.0, "negative": -1.0}
SAME_SIGN = "sign"
EXACT = 1e-9  # tolerance for equal figures
TAKES = ("least", "most", "count")
Key = str | int | float | tuple[str | int | float, ...]  # value in a row, or any of several
Reports = Mapping[str, Mapping[str, Table]]  # sweep: tables by name


@dataclass(frozen=True)
class Rule:
    """A way to judge a figure.

    near: our interval, or figure without one, comes within `bound` of the paper's figure.
    factor: it comes within that factor of the paper's figure.
    least, most: our figure and its whole interval are at least, at most `bound`.
    sign: our figure and its whole interval have the sign of `bound`.
    equals: our figure or word is `bound`.
    """

    kind: str
    bound: float | str
    partly: float | str | None = None  # a wider bound; or "sign": that of the paper's figure

    def __post_init__(self) -> None:
        wide = self.kind in ("near", "factor", "least", "most")
        if self.partly is not None and not wide:
            raise CasterError(f"the rule '{self.kind}' has no 'partly'")
        if self.partly == SAME_SIGN and self.kind != "near":
            raise CasterError("'partly' can be \"sign\" only with the rule 'near'")

    @property
    def needs_paper(self) -> bool:
        """Whether it compares with the paper's figure."""
        return self.kind in ("near", "factor")

    def words(self) -> str:
        """Describe the rule.

        >>> Rule("near", 2.0, "sign").words(), Rule("least", 3.9, 0.8).words()
        ("within 2 of the paper's; partly: same sign", 'at least 3.9; partly: at least 0.8')
        """
        if self.partly is None:
            return _bounded(self.kind, self.bound)
        wider = "same sign" if self.partly == SAME_SIGN else _bounded(self.kind, self.partly)
        return f"{_bounded(self.kind, self.bound)}; partly: {wider}"


def _bounded(kind: str, bound: float | str) -> str:
    if kind == "sign":
        return "positive" if bound == SIGNS["positive"] else "negative"
    shown = bound if isinstance(bound, str) else f"{bound:g}"
    return {
        "near": f"within {shown} of the paper's",
        "factor": f"within a factor of {shown} of the paper's",
        "least": f"at least {shown}",
        "most": f"at most {shown}",
        "equals": f"exactly {shown}",
    }[kind]


def judge(rule: Rule, ours: Value, interval: Interval | None, paper: float | None) -> str:
    """Judge one figure.

    >>> judge(Rule("near", 0.5, "sign"), 1.0, Interval(0.8, 1.2), 1.69)
    'reproduced'
    >>> judge(Rule("sign", 1.0), 1.0, Interval(-0.1, 2.0), None)
    'partly reproduced'
    """
    if ours is None:
        return UNTESTABLE
    if rule.kind == "equals":
        return REPRODUCED if _equal(ours, rule.bound) else NOT
    if isinstance(ours, str | bool | Interval):
        raise CasterError(f"the rule '{rule.kind}' needs a number, and the table has {ours!r}")
    ends = interval or Interval(ours, ours)
    if rule.needs_paper:
        if paper is None:
            raise CasterError(f"the rule '{rule.kind}' needs a figure of the paper")
        return _beside(rule, ours, ends, paper)
    low, high = _range(rule, rule.bound)
    if low <= ends.low and ends.high <= high and low <= ours <= high:
        return REPRODUCED
    wide = _range(rule, rule.bound if rule.partly is None else rule.partly)
    return PARTLY if wide[0] <= ours <= wide[1] else NOT


def _beside(rule: Rule, ours: float, ends: Interval, paper: float) -> str:
    low, high = _band(rule, rule.bound, paper)
    if ends.low <= high and ends.high >= low:
        return REPRODUCED
    if rule.partly is None:
        return NOT
    if rule.partly == SAME_SIGN:
        return PARTLY if ours * paper > 0 else NOT
    low, high = _band(rule, rule.partly, paper)
    return PARTLY if low <= ours <= high else NOT


def _band(rule: Rule, bound: float | str, paper: float) -> tuple[float, float]:
    width = float(bound)
    if rule.kind == "near":
        return paper - width - EXACT, paper + width + EXACT
    low, high = sorted((paper / width, paper * width))
    return low, high


def _range(rule: Rule, bound: float | str) -> tuple[float, float]:
    """The range that a rule allows; for a sign, zero is excluded."""
    if rule.kind == "sign":
        least = math.ulp(0.0)
        return (least, math.inf) if rule.bound == SIGNS["positive"] else (-math.inf, -least)
    return (float(bound), math.inf) if rule.kind == "least" else (-math.inf, float(bound))


def _equal(ours: Value, wanted: float | str) -> bool:
    if isinstance(ours, bool):
        return wanted == ("yes" if ours else "no")
    if isinstance(ours, str) or isinstance(wanted, str):
        return ours == wanted
    return isinstance(ours, int | float) and abs(ours - wanted) <= EXACT


def together(verdicts: Sequence[str]) -> str:
    """Combine the verdicts on several figures: the common one, or else partly.

    >>> together(["reproduced", "not reproduced"]), together(["reproduced", "not run yet"])
    ('partly reproduced', 'not run yet')
    """
    found = set(verdicts)
    if NOT_RUN in found:
        return NOT_RUN
    found -= {UNTESTABLE} if len(found) > 1 else set()
    return found.pop() if len(found) == 1 else PARTLY


class Absent(CasterError):  # noqa: N818 it may still be recorded
    """A table or row that the reports do not have."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table, or the minimum, maximum or count of several."""

    sweep: str
    table: str
    row: tuple[tuple[str, Key], ...]  # column and its value
    column: str
    interval: str | None = None  # column of the interval
    take: str | None = None

    def __str__(self) -> str:
        where = ", ".join(f"{name} {value}" for name, value in self.row)
        return f"{self.sweep}: {self.table}, {where}: {self.column}"


@dataclass(frozen=True)
class Figure:
    """A cell, optionally minus or divided by another."""

    cell: Cell
    less: Cell | None = None
    over: Cell | None = None

    @property
    def cells(self) -> list[Cell]:
        """All cells it is computed from."""
        return [cell for cell in (self.cell, self.less, self.over) if cell is not None]

    @property
    def sweeps(self) -> set[str]:
        """Sweeps it is looked up in."""
        return {cell.sweep for cell in self.cells}


@dataclass(frozen=True)
class Found:
    """A figure of ours, with its text."""

    value: Value
    interval: Interval | None
    text: str


def look_up(figure: Figure, reports: Reports) -> Found:
    """Look up a figure in the reports; a changed table is an error."""
    value, interval, column = _cell(figure.cell, reports)
    for other, sign in ((figure.less, "less"), (figure.over, "over")):
        if other is not None:
            value, column = _combined(figure.cell, sign, value, _cell(other, reports)[0], column)
            interval = None  # the interval is that of the cell, not of a difference
    text = column.text(value)
    if interval is not None:
        text += f" ({column.text(interval)})"
    return Found(value, interval, text)


def _combined(
    cell: Cell, sign: str, value: Value, other: Value, column: Column
) -> tuple[Value, Column]:
    if value is None or other is None:
        return None, column
    if not _is_number(value) or not _is_number(other):
        raise CasterError(f"{cell}: {value!r} {sign} {other!r} is not a number")
    assert isinstance(value, int | float)
    assert isinstance(other, int | float)
    if sign == "less":
        plain = (column.format or "g").lstrip("+")
        return value - other, Column("", f"+{'.2f' if plain == 'd' else plain}")
    return (None if other == 0 else value / other), Column("", ".3g")


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(cell: Cell, reports: Reports) -> tuple[Value, Interval | None, Column]:
    tables = reports[cell.sweep]
    if cell.table not in tables:
        raise Absent(f"{cell}: there is no such table, but {', '.join(sorted(tables))}")
    table = tables[cell.table]
    rows = [row for row in table.rows if _matches(row, table, cell)]
    if cell.take == "count":
        return len(rows), None, Column("", "d")
    if not rows:
        raise Absent(f"{cell}: the table has no such row")
    index = _column_index(table, cell.column, cell)
    if cell.take is not None:
        group = [row[index] for row in rows if _is_number(row[index])]
        chosen = min if cell.take == "least" else max
        return (chosen(group) if group else None), None, table.columns[index]  # type: ignore[type-var]
    if len(rows) > 1:
        raise CasterError(f"{cell}: the table has {len(rows)} such rows")
    interval = None if cell.interval is None else rows[0][_column_index(table, cell.interval, cell)]
    if interval is not None and not isinstance(interval, Interval):
        raise CasterError(f"{cell}: the column {cell.interval!r} has no intervals")
    return rows[0][index], interval, table.columns[index]


def _matches(row: tuple[Value, ...], table: Table, cell: Cell) -> bool:
    return all(
        row[_column_index(table, name, cell)]
        in (wanted if isinstance(wanted, tuple) else (wanted,))
        for name, wanted in cell.row
    )


def _column_index(table: Table, title: str, cell: Cell) -> int:
    titles = [column.title for column in table.columns]
    if title not in titles:
        raise CasterError(f"{cell}: the table has no column {title!r}, but {', '.join(titles)}")
    return titles.index(title)


@dataclass(frozen=True)
class Printed:
    """A figure in `paper.toml` by its keys, optionally minus or divided by another."""

    path: tuple[str | int, ...]
    less: tuple[str | int, ...] | None = None
    over: tuple[str | int, ...] | None = None

    @property
    def value(self) -> float | None:
        """The number; None if the paper has words."""
        found = _printed(self.path)
        if self.less is not None:
            found = round(_number(found) - _number(_printed(self.less)), 6)
        if self.over is not None:
            divisor = _number(_printed(self.over))
            if not divisor:
                raise CasterError(
                    f"the paper's {'.'.join(map(str, self.over))} is 0 and cannot be a divisor"
                )
            found = _number(found) / divisor
        return None if isinstance(found, str) else _number(found)

    @property
    def text(self) -> str:
        """The figure as text.

        >>> Printed(("corruption", "CIFAR-10-C", "batch", "tent", 0)).text
        '85.7'
        """
        found = self.value
        return str(_printed(self.path)) if found is None else f"{found:.4g}"


def _printed(path: tuple[str | int, ...]) -> object:
    found = printed(*(name for name in path if isinstance(name, str)))
    for index in path:
        if isinstance(index, int):  # index into a list, always last
            group = isinstance(found, list) and 0 <= index < len(found)
            found = found[index] if group else None
    if found is None:
        raise CasterError(f"the paper's figures have no {'.'.join(map(str, path))}")
    return found


def _number(found: object) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise CasterError(f"{found!r} is not a figure of the paper")
    return float(found)
