"""Figures by where they stand: in a table of a report, or in the paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from caster.errors import CasterError
from caster.report.intervals import Interval
from caster_bench.studies.paper import printed
from caster_bench.studies.tables import Column, Table, Value

TAKES = ("least", "most", "count")
Key = str | int | float | tuple[str | int | float, ...]  # in a row: a value, or any of several
Reports = Mapping[str, Mapping[str, Table]]  # sweep: its tables by name


class Absent(CasterError):  # noqa: N818 what is not there may come
    """A table or a row that reports do not have."""


@dataclass(frozen=True)
class Cell:
    """One cell of a table, or the least, the most or the number of several."""

    sweep: str
    table: str
    row: tuple[tuple[str, Key], ...]  # column and what stands in it
    column: str
    interval: str | None = None  # the column that has it
    take: str | None = None

    def __str__(self) -> str:
        where = ", ".join(f"{name} {value}" for name, value in self.row)
        return f"{self.sweep}: {self.table}, {where}: {self.column}"


@dataclass(frozen=True)
class Figure:
    """A cell; or what it is less another, or over another."""

    cell: Cell
    less: Cell | None = None
    over: Cell | None = None

    @property
    def cells(self) -> list[Cell]:
        """All that it is of."""
        return [cell for cell in (self.cell, self.less, self.over) if cell is not None]

    @property
    def sweeps(self) -> set[str]:
        """Whose reports it is looked up in."""
        return {cell.sweep for cell in self.cells}


@dataclass(frozen=True)
class Found:
    """A figure of ours, and how it is to be read."""

    value: Value
    interval: Interval | None
    text: str


def look_up(figure: Figure, reports: Reports) -> Found:
    """The figure, of reports that must have it: a table that changed is an error."""
    value, interval, column = _cell(figure.cell, reports)
    for other, sign in ((figure.less, "less"), (figure.over, "over")):
        if other is not None:
            value, column = _combined(figure.cell, sign, value, _cell(other, reports)[0], column)
            interval = None  # of the cell alone; not of a difference
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
        raise CasterError(f"{cell}: {value!r} {sign} {other!r} is no number")
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
    place = _place(table, cell.column, cell)
    if cell.take is not None:
        held = [row[place] for row in rows if _is_number(row[place])]
        chosen = min if cell.take == "least" else max
        return (chosen(held) if held else None), None, table.columns[place]  # type: ignore[type-var]
    if len(rows) > 1:
        raise CasterError(f"{cell}: the table has {len(rows)} such rows")
    interval = None if cell.interval is None else rows[0][_place(table, cell.interval, cell)]
    if interval is not None and not isinstance(interval, Interval):
        raise CasterError(f"{cell}: the column {cell.interval!r} has no intervals")
    return rows[0][place], interval, table.columns[place]


def _matches(row: tuple[Value, ...], table: Table, cell: Cell) -> bool:
    return all(
        row[_place(table, name, cell)] in (wanted if isinstance(wanted, tuple) else (wanted,))
        for name, wanted in cell.row
    )


def _place(table: Table, title: str, cell: Cell) -> int:
    titles = [column.title for column in table.columns]
    if title not in titles:
        raise CasterError(f"{cell}: the table has no column {title!r}, but {', '.join(titles)}")
    return titles.index(title)


@dataclass(frozen=True)
class Printed:
    """A figure of the paper by its place in `paper.toml`; or what it is less or over another."""

    path: tuple[str | int, ...]
    less: tuple[str | int, ...] | None = None
    over: tuple[str | int, ...] | None = None

    @property
    def value(self) -> float | None:
        """The number; None where the paper has words."""
        found = _printed(self.path)
        if self.less is not None:
            found = round(_number(found) - _number(_printed(self.less)), 6)
        if self.over is not None:
            divisor = _number(_printed(self.over))
            if not divisor:
                raise CasterError(f"the paper's {'.'.join(map(str, self.over))} is 0: no divisor")
            found = _number(found) / divisor
        return None if isinstance(found, str) else _number(found)

    @property
    def text(self) -> str:
        """To be read.

        >>> Printed(("corruption", "CIFAR-10-C", "batch", "tent", 0)).text
        '85.7'
        """
        found = self.value
        return str(_printed(self.path)) if found is None else f"{found:.4g}"


def _printed(path: tuple[str | int, ...]) -> object:
    found = printed(*(name for name in path if isinstance(name, str)))
    for place in path:
        if isinstance(place, int):  # one of several figures, which stands last
            held = isinstance(found, list) and 0 <= place < len(found)
            found = found[place] if held else None
    if found is None:
        raise CasterError(f"the paper's figures have no {'.'.join(map(str, path))}")
    return found


def _number(found: object) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise CasterError(f"{found!r} is not a figure of the paper's")
    return float(found)
