"""The tables of `caster bench plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from caster.cli.console import new_table
from caster_bench.cli.live import duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from caster_bench.engine.plan import Plan
    from caster_bench.sweeps import Spec


def by_method(made: Plan, cost: Callable[[Spec], float]) -> Table:
    """A row for every method on a backbone and data."""
    rows: dict[tuple[str, str, str], list[Spec]] = {}
    for spec in made.wanted:
        rows.setdefault((spec.backbone, spec.data, spec.label), []).append(spec)
    table = _table("backbone", "data", "method", "cells", "there", "missing", "expected")
    for words, specs in rows.items():
        missing = [spec for spec in specs if not made.is_there(spec)]
        counts = (len(specs), len(specs) - len(missing), len(missing))
        expected = duration(sum(map(cost, missing))) if missing else "-"
        table.add_row(*map(Text, (*words, *map(str, counts), expected)))
    return table


def by_cell(made: Plan, cost: Callable[[Spec], float]) -> Table:
    """A row for every cell."""
    table = _table("cell", "stream", "state", "expected")
    refused = set(made.refused)
    for spec in made.wanted:
        there = made.is_there(spec)
        state = "refused" if spec in refused else "done" if there else "missing"
        stream = f"{spec.order}, B {spec.batch_size}, seed {spec.seed}"
        stream += ", alone" if spec.alone else ""
        table.add_row(
            *map(Text, (spec.title, stream, state, "-" if there else duration(cost(spec))))
        )
    return table


def _table(*headings: str) -> Table:
    return new_table(*headings, numbers=("cells", "there", "missing", "expected"))
