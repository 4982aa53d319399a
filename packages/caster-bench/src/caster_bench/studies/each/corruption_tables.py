"""Tables of the corruption study."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from caster_bench.studies.each import corruption_differences as differences
from caster_bench.studies.paper import printed
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
from caster_bench.sweeps.names import GROUPS, REPORTED, SEVERITIES

if TYPE_CHECKING:
    from caster_bench.studies.each.corruption import Convention, Corruption, Entry

FAMILIES = {"batch": "BN", "layer": "LN"}
ALL, FIFTEEN = "all", "fifteen"
PAPER = {((name, severity),) for name in GROUPS["all"] for severity in SEVERITIES}
PUBLISHED = {((name, 5),) for name in REPORTED}


def all_of(found: Corruption) -> tuple[Table, ...]:
    """A table for every convention and data, then differences, then every backbone alone."""
    tables = [
        _table(convention, place, found.papers[place])
        for convention in found.conventions
        for place in convention.places()
    ]
    first, *others = found.conventions
    apart = differences.table(first, found.papers, FAMILIES)
    nothing = dict.fromkeys(found.papers)  # the paper has the first convention alone
    more = [differences.table(convention, nothing, FAMILIES) for convention in others]
    return (*tables, apart, *more, *(_detail(convention) for convention in found.conventions))


def _table(convention: Convention, place: str, paper: str | None) -> Table:
    """Methods by family; the paper averages over all it has, and stands in that table alone."""
    entries = {(m, f): e for (p, m, f), e in convention.entries.items() if p == place}
    families = [family for family in FAMILIES if any(f == family for _, f in entries)]
    columns, rows = [Column("method")], []
    beside = convention.name == ALL
    for family in families:
        title = FAMILIES[family]
        columns += [Column(title, ".2f"), Column(f"{title} s.d.", ".2f")]
        columns += [Column(f"{title} {INTERVAL}", ".2f"), Column(f"{title} cells", "d")]
        if beside:
            columns += [Column(f"{title} paper", ".1f"), Column(f"{title} paper s.d.", ".2f")]
    for method in dict.fromkeys(method for method, _ in entries):
        row: list[Value] = [method]
        for family in families:
            held = entries.get((method, family))
            row += _cells(held)
            if beside:
                row += printed("corruption", str(paper), family, method) or [None, None]
        rows.append(tuple(row))
    inert = [f"{method} on {FAMILIES[f]}" for (method, f), e in entries.items() if e.inert]
    note = f" Inert: {', '.join(inert)}." if inert else ""
    for family in families:
        few = unequal({method: e for (method, f), e in entries.items() if f == family})
        note += f" {FAMILIES[family]}: {few}" if few else ""
    where = f" Paper: {printed('corruption', 'where')}, nineteen corruptions at five severities."
    note += where if beside else ""
    counts = ", ".join(f"{FAMILIES[f]} {_backbones(entries, f)}" for f in families)
    return Table(
        f"corruption-{convention.name}-{as_file(place)}",
        f"{place}: top-1 accuracy in percent over {averaged(convention, place)}; s.d. across "
        f"backbones ({counts}).{note}",
        tuple(columns),
        tuple(rows),
    )


def averaged(convention: Convention, place: str | None = None) -> str:
    """What is averaged over, and whose convention it is where it is one; of data, or of all."""
    entries = [e for (p, _, _), e in convention.entries.items() if place in (None, p)]
    met = {frozenset(held) for entry in entries for held in entry.conditions.values()}
    alike = len(met) == 1
    shared = next(iter(met)) if alike else frozenset()
    if convention.name == FIFTEEN:
        if shared == PUBLISHED:
            return "the fifteen reported corruptions at severity 5, as most published tables"
        some = str(len(shared)) if alike else "some, not the same everywhere,"
        return f"{some} of the fifteen reported corruptions at severity 5"
    if shared == PAPER:
        return "all nineteen corruptions at five severities, as the paper"
    if alike:
        count = len({pair for conditions in shared for pair in conditions})
        return f"{count} of the 95 pairs of corruption and severity that the paper has"
    return "pairs of corruption and severity, not the same everywhere"


def unequal(entries: Mapping[str, Entry]) -> str:
    """Which methods of a family met fewer cells than there are, in words; nothing if none."""
    few = [f"{method} ({cells(e.mean.cells)})" for method, e in entries.items() if not e.whole]
    return f"Not compared, for they met fewer cells: {', '.join(few)}." if few else ""


def _cells(held: Entry | None) -> list[Value]:
    if held is None:
        return [None, None, None, None]
    mean = held.mean
    return [points(mean.value), points(held.sd), around(mean.interval), mean.cells]


def _backbones(entries: dict[tuple[str, str], Entry], family: str) -> str:
    titles = dict.fromkeys(t for (_, f), e in entries.items() if f == family for t in e.backbones)
    return "/".join(titles)


def _detail(convention: Convention) -> Table:
    rows: list[tuple[Value, ...]] = [
        (
            *(place, FAMILIES[family], backbone, method, points(accuracy)),
            None if method == differences.FROZEN else points(held.worst[backbone]),
            len(held.conditions[backbone]),
        )
        for (place, method, family), held in convention.entries.items()
        for backbone, accuracy in held.backbones.items()
    ]
    return Table(
        f"corruption-{convention.name}-backbones",
        f"Every backbone alone, over {averaged(convention)}. Worst loss: the most that any stream "
        "of it, of any seed, loses to the frozen model, in points.",
        (
            *(Column("data"), Column("family"), Column("backbone"), Column("method")),
            *(Column("top-1", ".2f"), Column("worst loss", ".2f"), Column("conditions", "d")),
        ),
        tuple(sorted(rows, key=lambda row: [str(value) for value in row[:3]])),
    )
