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
DIRECTION = "direction only"
UNTESTABLE, NOT_RUN = "not testable here", "not run yet"
VERDICTS = (REPRODUCED, PARTLY, DIRECTION, NOT, UNTESTABLE, NOT_RUN)
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

    near: our figure and its whole interval are within `bound` of the paper's; if only part of the
        interval is, partly.
    factor: the same, within that factor of the paper's figure.
    least, most: our figure and its whole interval are at least, at most `bound`.
    sign: our figure and its whole interval have the sign of `bound`.
    equals: our figure or word is `bound`.
    """

    kind: str
    bound: float | str
    partly: float | None = None  # a wider bound
    direction: float | str | None = None  # a bound so wide that it shows a direction; or "sign"
    null: float | None = None  # a figure with no effect: if it passes, passing means little
    main: bool = False  # without this figure, the claim is not reproduced

    def __post_init__(self) -> None:
        wide = self.kind in ("near", "factor", "least", "most")
        for name in ("partly", "direction"):
            if getattr(self, name) is not None and not wide:
                raise CasterError(f"the rule '{self.kind}' has no '{name}'")
        if self.direction == SAME_SIGN and self.kind != "near":
            raise CasterError("'direction' can be \"sign\" only with the rule 'near'")

    @property
    def needs_paper(self) -> bool:
        """Whether it compares with the paper's figure."""
        return self.kind in ("near", "factor")

    def words(self) -> str:
        """Describe the rule.

        >>> Rule("near", 2.0, direction="sign").words(), Rule("least", 3.9, 0.8).words()
        ("within 2 of the paper's; direction: same sign", 'at least 3.9; partly: at least 0.8')
        """
        words = _bounded(self.kind, self.bound)
        if self.partly is not None:
            words += f"; partly: {_bounded(self.kind, self.partly)}"
        if self.direction == SAME_SIGN:
            words += "; direction: same sign"
        elif self.direction is not None:
            words += f"; direction: {_bounded(self.kind, self.direction)}"
        if self.null is not None:
            words += f"; no effect is {self.null:g}"
        return f"{words}; main figure" if self.main else words


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

    >>> judge(Rule("near", 0.5), 1.4, Interval(1.2, 1.6), 1.69)
    'reproduced'
    >>> judge(Rule("near", 0.5), 1.4, Interval(0.8, 2.0), 1.69)
    'partly reproduced'
    >>> judge(Rule("near", 3.0, direction="sign"), 0.8, None, 13.7)
    'direction only'
    >>> judge(Rule("sign", 1.0), 1.0, Interval(-0.1, 2.0), None)
    'partly reproduced'
    """
    if ours is None:
        return UNTESTABLE
    if rule.kind == "equals":
        return REPRODUCED if _equal(ours, rule.bound) else NOT
    if isinstance(ours, str | bool | Interval):
        raise CasterError(f"the rule '{rule.kind}' needs a number, and the table has {ours!r}")
    if rule.needs_paper and paper is None:
        raise CasterError(f"the rule '{rule.kind}' needs a figure of the paper")
    found = _verdict(rule, ours, interval or Interval(ours, ours), paper)
    if found == REPRODUCED and rule.null is not None:
        means_little = _inside(rule.null, _allowed(rule, rule.bound, paper))
        return PARTLY if means_little else found
    return found


def _verdict(rule: Rule, ours: float, ends: Interval, paper: float | None) -> str:
    low, high = _allowed(rule, rule.bound, paper)
    within = low <= ours <= high
    if within and low <= ends.low and ends.high <= high:
        return REPRODUCED
    touches = rule.needs_paper and ends.low <= high and ends.high >= low
    wider = rule.partly is not None and _inside(ours, _allowed(rule, rule.partly, paper))
    if within or touches or wider:
        return PARTLY
    if rule.direction == SAME_SIGN:
        return DIRECTION if ours * (paper or 0.0) > 0 else NOT
    if rule.direction is not None and _inside(ours, _allowed(rule, rule.direction, paper)):
        return DIRECTION
    return NOT


def _allowed(rule: Rule, bound: float | str, paper: float | None) -> tuple[float, float]:
    """The range of figures that a bound allows; for a sign, zero is excluded."""
    if rule.kind == "sign":
        least = math.ulp(0.0)
        return (least, math.inf) if rule.bound == SIGNS["positive"] else (-math.inf, -least)
    width = float(bound)
    if not rule.needs_paper:
        return (width, math.inf) if rule.kind == "least" else (-math.inf, width)
    assert paper is not None  # `judge` rejects a missing one
    if rule.kind == "near":
        return paper - width - EXACT, paper + width + EXACT
    low, high = sorted((paper / width, paper * width))
    return low, high


def _inside(value: float, ends: tuple[float, float]) -> bool:
    return ends[0] <= value <= ends[1]


def _equal(ours: Value, wanted: float | str) -> bool:
    if isinstance(ours, bool):
        return wanted == ("yes" if ours else "no")
    if isinstance(ours, str) or isinstance(wanted, str):
        return ours == wanted
    return isinstance(ours, int | float) and abs(ours - wanted) <= EXACT


def together(verdicts: Sequence[str]) -> str:
    """Combine the verdicts on several figures.

    The common one; else partly reproduced if at least half are reproduced or partly so, and
    direction only if fewer are.

    >>> together(["reproduced", "not reproduced"]), together(["reproduced", "not run yet"])
    ('partly reproduced', 'not run yet')
    >>> together(["reproduced", "not reproduced", "not reproduced"])
    'direction only'
    """
    if NOT_RUN in verdicts:
        return NOT_RUN
    tested = [verdict for verdict in verdicts if verdict != UNTESTABLE]
    if len(set(tested or verdicts)) == 1:
        return (tested or list(verdicts))[0]
    shown = sum(verdict in (REPRODUCED, PARTLY) for verdict in tested)
    return PARTLY if 2 * shown >= len(tested) else DIRECTION


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
