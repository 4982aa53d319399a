"""Tables of the cost study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from caster.report.intervals import between
from caster_bench.studies.method_names import GATED
from caster_bench.studies.paper import number, printed
from caster_bench.studies.tables import INTERVAL, Column, Table, Value, points

if TYPE_CHECKING:
    from caster_bench.studies.each.cost import Row

MIB = 2**20


def all_of(rows: Sequence[Row]) -> tuple[Table, ...]:
    """Every method, then caster beside the others where it was measured."""
    return (_table(rows), *_ratios(rows))


def _table(rows: Sequence[Row]) -> Table:
    columns = (
        *(Column("backbone"), Column("data"), Column("method"), Column("images/s", ",.0f")),
        *(Column(INTERVAL, ",.0f"), Column("of frozen, %", ".0f"), Column("memory, MiB", ",.0f")),
        *(Column("retained, MiB", ".3f"), Column("backward pass")),
        *(Column("paper's images/s", ",.0f"), Column("paper's memory, MiB", ",.0f")),
    )
    values: list[tuple[Value, ...]] = [
        (
            *(row.backbone, f"{row.where} {row.condition}", row.method, row.rate),
            None if row.drawn is None else between(row.drawn),
            *(points(row.share), row.memory, row.retained / MIB, row.backward),
            *(number("cost", str(row.paper), row.method, figure) for figure in ("rate", "memory")),
        )
        for row in rows
    ]
    return Table(
        "cost",
        "Throughput and memory of one method at a time. Paper: "
        f"{printed('cost', 'where')}, ResNet-50 under fog of severity 3, on its device.",
        columns,
        tuple(values),
    )


def _ratios(rows: Sequence[Row]) -> tuple[Table, ...]:
    own = {row.place: row for row in rows if row.method == GATED}
    pairs = [
        (own[row.place], row) for row in rows if row.place in own and own[row.place] is not row
    ]
    values = tuple(_ratio(caster, other) for caster, other in pairs)
    table = Table(
        "cost-ratios",
        "What caster does beside the others: its images a second over theirs, and its peak memory "
        "in percent of theirs.",
        (
            *(Column("backbone"), Column("data"), Column("beside"), Column("rate", ".2f")),
            *(Column(INTERVAL, ".2f"), Column("paper's rate", ".2f"), Column("memory, %", ".1f")),
            Column("paper's memory, %", ".1f"),
        ),
        values,
    )
    return (table,) if values else ()


def _ratio(caster: Row, other: Row) -> tuple[Value, ...]:
    drawn = (
        None if caster.drawn is None or other.drawn is None else between(caster.drawn / other.drawn)
    )
    memory = _over(caster.memory, other.memory)
    rate, peak = (
        _over(*(number("cost", str(row.paper), row.method, figure) for row in (caster, other)))
        for figure in ("rate", "memory")
    )
    return (
        *(caster.backbone, f"{caster.where} {caster.condition}", other.method),
        *(caster.rate / other.rate, drawn, rate, points(memory), points(peak)),
    )


def _over(mine: float | None, theirs: float | None) -> float | None:
    return None if mine is None or theirs is None else mine / theirs
