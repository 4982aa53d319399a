"""All records of a run as scores, each read once, on every core."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from caster_bench.records import REFUSED, Record, Records
from caster_bench.studies.checks.problem import Problem
from caster_bench.studies.provenance import Origin
from caster_bench.studies.results import Results
from caster_bench.studies.score import Score, score
from caster_bench.studies.verify import Examined, Progress, examine
from caster_bench.sweeps.spec import Spec, Sweep


def load(
    sweep: Sweep,
    out: Records,
    root: Path | None = None,
    progress: Progress | None = None,
    needed: Collection[Spec] | None = None,  # None means all
) -> tuple[Results | None, list[Problem]]:
    """The results of a run or a pack, or all that is missing or wrong with its records.

    Of cells that are not `needed` there are results too, where they are recorded: they have been
    verified like the others, and `restricted` leaves them out.
    """
    examined = examine(sweep, out, root, summarise, progress, needed)
    if examined.problems:
        return None, examined.problems
    return _results(sweep, examined), []


def restricted(results: Results, part: Sweep) -> Results:
    """The results of a part of a sweep alone, all cells of which must be among them."""
    cells = part.cells
    return replace(
        results,
        sweep=part,
        scores={spec: score for spec, score in results.scores.items() if spec in cells},
        refused={spec: why for spec, why in results.refused.items() if spec in cells},
        origins={spec: origin for spec, origin in results.origins.items() if spec in cells},
    )


def summarise(record: Record) -> tuple[Score, Origin]:
    """What a report needs to know of one record."""
    return score(record), Origin.of(record.cell)


def _results(sweep: Sweep, examined: Examined) -> Results:
    """Every cell of a sweep whose record was found and verified, in the sweep's order."""
    found = examined.found
    cells = {spec: studies for spec, studies in sweep.cells.items() if spec in found}
    refused = {
        spec: str(found[spec][0].reason) for spec in cells if found[spec][0].status == REFUSED
    }
    done = {spec: examined.read[spec] for spec in cells if spec not in refused}
    origins = {spec: origin for spec, (_, origin) in done.items()}
    origins |= {spec: Origin.of(found[spec][0]) for spec in refused}
    return Results(
        sweep=replace(sweep, cells=cells),
        whole=sweep,
        scores={spec: told for spec, (told, _) in done.items()},
        refused=refused,
        origins=origins,
    )
