"""All records of a run as scores, each read once, on every core."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from caster.errors import CasterError
from caster.records.reader import read, scan
from caster.records.schema import REFUSED
from caster.report.bench.agree import disagreements
from caster.report.bench.checks.problem import Problem
from caster.report.bench.many import FEW, mapped
from caster.report.bench.origin import Origin
from caster.report.bench.results import Results
from caster.report.bench.score import Score, score
from caster.report.bench.verify import verify
from caster.sweeps.spec import Spec, Sweep

Progress = Callable[[str, int, int], None]  # stage, done, of how many
Summary = tuple[Spec, Score | str, Origin]  # a cell's score, or why it was refused


def load(
    sweep: Sweep, out: Path, root: Path | None = None, progress: Progress | None = None
) -> tuple[Results | None, list[Problem]]:
    """The results of a run, or all that is missing or wrong with its records."""
    problems = verify(sweep, out, root)
    if problems:
        return None, problems
    results = read_results(sweep, out, progress)
    problems = disagreements(results.scores)
    return (None, problems) if problems else (results, [])


def read_results(sweep: Sweep, out: Path, progress: Progress | None = None) -> Results:
    """Every cell of a sweep whose records are verified."""
    found: dict[Spec, Score | str] = {}
    origins: Counter[Origin] = Counter()
    folders = scan(out).cells
    for done, (spec, told, origin) in enumerate(mapped(summarise, folders, len(folders) < FEW), 1):
        found[spec] = told
        origins[origin] += 1
        if progress is not None:
            progress("reading", done, len(folders))
    if found.keys() != sweep.cells.keys():
        raise CasterError("the records changed after they were verified")
    told_of = [(spec, found[spec]) for spec in sweep.cells]  # in the sweep's order
    return Results(
        sweep,
        scores={spec: told for spec, told in told_of if isinstance(told, Score)},
        refused={spec: told for spec, told in told_of if isinstance(told, str)},
        origins=origins,
    )


def summarise(folder: Path) -> Summary:
    """What a report needs to know of one record."""
    record = read(folder)
    origin = Origin.of(record.cell)
    if record.cell.status == REFUSED:
        return record.spec, str(record.cell.reason), origin
    return record.spec, score(record), origin
