"""Tables of the specificity study."""

from __future__ import annotations

from typing import TYPE_CHECKING

from caster_bench.studies.paper import number, printed
from caster_bench.studies.tables import (
    INTERVAL,
    Column,
    Table,
    Value,
    around,
    as_file,
    cells,
    points,
)

if TYPE_CHECKING:
    from caster_bench.studies.each.specificity import Specificity


def all_of(found: tuple[Specificity, ...]) -> tuple[Table, ...]:
    """The policies of all data, then how far they are apart, and the rank correlations."""
    return (*(_table(each) for each in found), _differences(found), _correlations(found))


def _table(found: Specificity) -> Table:
    columns = (
        *(Column("policy"), Column("top-1", ".2f"), Column(INTERVAL, ".2f")),
        *(Column("Δ", "+.2f"), Column(f"Δ {INTERVAL}", "+.2f"), Column("accept, %", ".1f")),
        *(Column(f"accept {INTERVAL}", ".1f"), Column("harm, %", ".2f")),
        *(Column(f"harm {INTERVAL}", ".2f"), Column("kept, %", ".1f")),
        *(Column(f"kept {INTERVAL}", ".1f"), Column("paper's top-1", ".2f")),
        *(
            Column("paper's Δ", "+.2f"),
            Column("paper's accept", ".1f"),
            Column("paper's harm", ".2f"),
        ),
        Column("paper's kept", ".1f"),
    )
    values: list[tuple[Value, ...]] = [
        (
            *(policy.name, points(policy.accuracy.value), around(policy.accuracy.interval)),
            *(points(policy.gain.value), around(policy.gain.interval)),
            *(points(policy.accept.value), around(policy.accept.interval)),
            *(points(policy.harm.value), around(policy.harm.interval)),
            *(points(policy.kept), around(policy.kept_interval)),
            *(
                number("specificity", str(found.paper), policy.name, figure)
                for figure in ("top1", "gain", "accept", "harm", "kept")
            ),
        )
        for policy in found.policies
    ]
    return Table(
        f"specificity-{as_file(found.place)}",
        f"{found.place}: policies over {cells(found.cells)} that all met. Paper: "
        f"{printed('specificity', 'where')}, ResNet-50.",
        columns,
        tuple(values),
    )


def _differences(found: tuple[Specificity, ...]) -> Table:
    values: list[tuple[Value, ...]] = [
        (
            *(each.place, pair.one, pair.other, each.cells),
            *(points(pair.accuracy.value), around(pair.accuracy.interval)),
            *(points(pair.harm.value), around(pair.harm.interval)),
        )
        for each in found
        for pair in each.differences
    ]
    return Table(
        "specificity-differences",
        "How far a policy is above another on the same cells, in points: a gated one above its "
        "mechanism without the gate, and one that learns above the first such policy with the same "
        "gate, or with none.",
        (
            *(Column("data"), Column("policy"), Column("less"), Column("cells", "d")),
            *(Column("top-1", "+.2f"), Column(INTERVAL, "+.2f")),
            *(Column("harm", "+.2f"), Column(f"harm {INTERVAL}", "+.2f")),
        ),
        tuple(values),
    )


def _correlations(found: tuple[Specificity, ...]) -> Table:
    values: list[tuple[Value, ...]] = [
        (
            *(each.place, relation.gated, relation.mechanism, each.cells, relation.correlation),
            relation.correlation_interval,
            number("specificity", "correlation", relation.gated) if each.paper else None,
        )
        for each in found
        for relation in each.relations
    ]
    return Table(
        "specificity-correlations",
        "Rank correlation over cells of the share of batches accepted with the gain of the "
        "mechanism without its gate; average ranks.",
        (
            *(Column("data"), Column("gated policy"), Column("gain of"), Column("cells", "d")),
            *(Column("rank correlation", "+.2f"), Column(INTERVAL, "+.2f")),
            Column("paper", "+.2f"),
        ),
        tuple(values),
    )
