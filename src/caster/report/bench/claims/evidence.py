"""What records there are of the sweeps that claims are about, verified, as reports.

A study counts when all of its cells are recorded: a table of a part of them would not be the
table that the rule was written for. What is recorded of other studies is verified all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from caster.records import Pack
from caster.report.bench.checks.problem import Problem
from caster.report.bench.claims.types import Claims
from caster.report.bench.origin import tables as origin_tables
from caster.report.bench.read import load, restricted
from caster.report.bench.results import Results
from caster.report.bench.section import Section
from caster.report.bench.tables import Table
from caster.report.bench.verify import Progress
from caster.report.bench.write import sections
from caster.sweeps import STUDIES, Sweep, part_of, read


@dataclass(frozen=True)
class Evidence:
    """Of one sweep; nothing of it, where it was not run."""

    file: str
    sweep: Sweep | None  # None: there is no such file yet
    recorded: Mapping[str, int]  # study: cells
    results: Results | None  # of the studies that are recorded in full
    sections: tuple[Section, ...]

    @property
    def name(self) -> str:
        """Of its folders."""
        return Path(self.file).stem if self.sweep is None else self.sweep.name

    @property
    def tables(self) -> dict[str, Table]:
        """By name, those of what the records were made from among them."""
        made = [table for section in self.sections for table in section.tables]
        origin = [] if self.results is None else origin_tables(self.results)
        return {table.name: table for table in (*made, *origin)}

    @property
    def is_whole(self) -> bool:
        """Whether all studies are recorded."""
        return self.sweep is not None and all(map(self.is_recorded, self.recorded))

    def is_recorded(self, study: str) -> bool:
        """Whether all cells of a study are recorded."""
        return self.results is not None and bool(self.results.sweep.of(study))


def study_of(table: str) -> str | None:
    """The study that a table is of; None of those that say what records were made from.

    >>> study_of("certificate-summary"), study_of("checkpoints")
    ('certificate', None)
    """
    return next((study for study in STUDIES if table.split("-")[0] == study), None)


def gather(
    claims: Claims, root: Path, progress: Progress | None = None
) -> tuple[dict[str, Evidence], list[Problem]]:
    """The evidence of every sweep, and all that is wrong with records that are there."""
    found, problems = {}, []
    for name, file in claims.sweeps.items():
        found[name], wrong = _evidence(file, root, root / claims.records, progress)
        problems += wrong
    return found, problems


def _evidence(
    file: str, root: Path, records: Path, progress: Progress | None
) -> tuple[Evidence, list[Problem]]:
    if not (root / file).exists():
        return Evidence(file, None, {}, None, ()), []
    sweep = read(root / file)
    pack = Pack(records / sweep.name)
    nothing = Evidence(file, sweep, dict.fromkeys(_studies(sweep), 0), None, ())
    if not pack.folder.exists():
        return nothing, []
    results, problems = load(sweep, pack, root, progress, needed=())
    if results is None:
        return nothing, problems
    recorded = {study: len(results.sweep.of(study)) for study in _studies(sweep)}
    whole = {study for study, count in recorded.items() if count == len(sweep.of(study))}
    results = restricted(results, part_of(sweep, whole))
    made = sections(results) if results.sweep.cells else []
    return Evidence(file, sweep, recorded, results if made else None, tuple(made)), []


def _studies(sweep: Sweep) -> list[str]:
    return [study for study in STUDIES if sweep.of(study)]
