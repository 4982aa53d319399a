"""All records of a run as scores, each read once, on every core."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from caster.records import REFUSED, Record, Records
from caster.report.bench.agree import disagreements
from caster.report.bench.checks.problem import Problem
from caster.report.bench.origin import Origin
from caster.report.bench.results import Results
from caster.report.bench.score import Score, score
from caster.report.bench.verify import Examined, Progress, examine
from caster.sweeps.spec import Sweep


def load(
    sweep: Sweep, out: Records, root: Path | None = None, progress: Progress | None = None
) -> tuple[Results | None, list[Problem]]:
    """The results of a run or a pack, or all that is missing or wrong with its records."""
    examined = examine(sweep, out, root, summarise, progress)
    if examined.problems:
        return None, examined.problems
    results = _results(sweep, examined)
    problems = disagreements(results.scores)
    return (None, problems) if problems else (results, [])


def summarise(record: Record) -> tuple[Score, Origin]:
    """What a report needs to know of one record."""
    return score(record), Origin.of(record.cell)


def _results(sweep: Sweep, examined: Examined) -> Results:
    """Every cell of a sweep whose records are verified, in the sweep's order."""
    refused = {
        spec: str(examined.found[spec][0].reason)
        for spec in sweep.cells
        if examined.found[spec][0].status == REFUSED
    }
    done = {spec: examined.read[spec] for spec in sweep.cells if spec not in refused}
    origins = Counter(origin for _, origin in done.values())
    origins += Counter(Origin.of(examined.found[spec][0]) for spec in refused)
    return Results(sweep, {spec: told for spec, (told, _) in done.items()}, refused, origins)
