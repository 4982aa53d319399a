"""How far methods of the corruption study are apart, cell by cell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from caster_bench.studies.method_names import GATED
from caster_bench.studies.paper import printed
from caster_bench.studies.results import Mean, mean_of_means
from caster_bench.studies.tables import INTERVAL, Column, Table, Value, around, points

if TYPE_CHECKING:
    from collections.abc import Mapping

    from caster_bench.studies.each.corruption import Convention, Entry

FROZEN = "frozen"


def difference(one: Entry, other: Entry) -> Mean:
    """Of two methods that met the same cells: condition by condition, then as their means."""
    return mean_of_means(
        [
            [accuracy - other.conditions[title][condition] for condition, accuracy in held.items()]
            for title, held in one.conditions.items()
        ]
    )


def pairs(methods: list[str]) -> Iterator[tuple[str, str]]:
    """All methods beside the frozen head, and caster beside the others.

    >>> list(pairs(["frozen", "tent", "caster"]))
    [('tent', 'frozen'), ('caster', 'frozen'), ('caster', 'tent')]
    """
    if FROZEN in methods:
        yield from ((method, FROZEN) for method in methods if method != FROZEN)
    if GATED in methods:
        yield from ((GATED, method) for method in methods if method not in (GATED, FROZEN))


def table(
    convention: Convention, papers: Mapping[str, str | None], families: Mapping[str, str]
) -> Table:
    """Of the methods that met all cells of their family."""
    rows: list[tuple[Value, ...]] = []
    groups = dict.fromkeys((place, family) for place, _, family in convention.entries)
    for place, family in groups:
        held = {
            method: entry
            for (where, method, own), entry in convention.entries.items()
            if (where, own) == (place, family) and entry.whole
        }
        for one, other in pairs(list(held)):
            found = difference(held[one], held[other])
            rows.append(
                (
                    *(place, families[family], one, other, points(found.value)),
                    around(found.interval),
                    _printed(str(papers[place]), family, one, other),
                )
            )
    return Table(
        f"corruption-{convention.name}-differences",
        "Top-1 accuracy of a method less that of another on the same cells, in points; averaged, "
        "and drawn anew, as the accuracies are.",
        (
            *(Column("data"), Column("family"), Column("method"), Column("less")),
            *(Column("difference", "+.2f"), Column(INTERVAL, "+.2f"), Column("paper", "+.1f")),
        ),
        tuple(rows),
    )


def _printed(place: str, family: str, one: str, other: str) -> float | None:
    """The paper's, which has means and standard deviations."""
    told = [printed("corruption", place, family, method) for method in (one, other)]
    return None if None in told else round(told[0][0] - told[1][0], 1)  # as printed: to a tenth
