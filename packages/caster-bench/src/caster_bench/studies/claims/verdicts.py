"""Gather the verified records that claims are about, and judge the claims.

A study counts the backbones whose cells are all recorded; the others are pending and listed, and
their records are verified all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from caster.errors import CasterError
from caster_bench.records.store import Pack
from caster_bench.studies.check_cells import Problem
from caster_bench.studies.claims.claim_file import Claim, Claims, Comparison
from caster_bench.studies.claims.rules import (
    NOT,
    NOT_RUN,
    REPRODUCED,
    UNTESTABLE,
    Absent,
    Cell,
    Figure,
    Found,
    Reports,
    judge,
    look_up,
    together,
)
from caster_bench.studies.corruption import FAMILIES
from caster_bench.studies.provenance import provenance_tables
from caster_bench.studies.report import sections
from caster_bench.studies.results import Results, load_recorded
from caster_bench.studies.tables import Section, Table
from caster_bench.studies.verify import Progress
from caster_bench.sweeps import STUDIES, Sweep, read
from caster_bench.sweeps.spec import known


@dataclass(frozen=True)
class Evidence:
    """Evidence from one sweep; empty if it was not run."""

    file: str
    sweep: Sweep | None  # None: the file does not exist yet
    recorded: Mapping[str, int]  # study: number of cells
    pending: Mapping[str, tuple[str, ...]]  # study: backbones not fully recorded
    results: Results | None  # of the backbones fully recorded
    sections: tuple[Section, ...]

    @property
    def name(self) -> str:
        """Name of its folders."""
        return Path(self.file).stem if self.sweep is None else self.sweep.name

    @property
    def tables(self) -> dict[str, Table]:
        """Tables by name, including those of provenance."""
        made = [table for section in self.sections for table in section.tables]
        origin = [] if self.results is None else provenance_tables(self.results)
        return {table.name: table for table in (*made, *origin)}

    @property
    def is_whole(self) -> bool:
        """Whether all studies are fully recorded."""
        return self.sweep is not None and not any(self.pending.values())

    def is_pending(
        self,
        study: str,
        data: Collection[str] | None = None,  # only backbones on these
        families: Collection[str] | None = None,  # only backbones of these
    ) -> bool:
        """Whether backbones of a study are pending, or some of them."""
        names = self.pending.get(study, ())
        if self.sweep is None:
            return bool(names)
        return any(
            spec.backbone in names
            and (data is None or spec.data in data)
            and (families is None or self.sweep.backbones[spec.backbone].family in families)
            for spec in self.sweep.of(study)
        )

    def is_recorded(self, study: str) -> bool:
        """Whether at least one backbone of a study is fully recorded."""
        return self.results is not None and bool(self.results.sweep.of(study))


def study_of(table: str) -> str | None:
    """The study of a table; None for tables of provenance.

    >>> study_of("certificate-summary"), study_of("checkpoints")
    ('certificate', None)
    """
    return next((study for study in STUDIES if table.split("-")[0] == study), None)


def gather(
    claims: Claims, root: Path, progress: Progress | None = None
) -> tuple[dict[str, Evidence], list[Problem]]:
    """Gather the evidence of every sweep, and all problems of its records."""
    found, problems = {}, []
    for name, file in claims.sweeps.items():
        found[name], wrong = _evidence(file, root, root / claims.records, progress)
        problems += wrong
    return found, problems


def _evidence(
    file: str, root: Path, records: Path, progress: Progress | None
) -> tuple[Evidence, list[Problem]]:
    if not (root / file).exists():
        return Evidence(file, None, {}, {}, None, ()), []
    sweep = read(root / file)
    found, problems = load_recorded(sweep, Pack(records / sweep.name), root, progress)
    made = () if found.results is None else tuple(sections(found.results))
    return Evidence(file, sweep, found.cells, found.pending, found.results, made), problems


@dataclass(frozen=True)
class Judged:
    """A comparison and its verdict."""

    test: Comparison
    found: Found | None  # None: not run yet
    verdict: str


@dataclass(frozen=True)
class Outcome:
    """A claim and its verdict."""

    claim: Claim
    judged: tuple[Judged, ...]
    verdict: str
    is_pending: bool = False  # whether backbones of its studies are pending

    @property
    def is_so_far(self) -> bool:
        """Whether the verdict may still change."""
        return self.is_pending and self.verdict != NOT_RUN

    @property
    def words(self) -> str:
        """The verdict, marked if it may still change."""
        return f"{self.verdict} so far" if self.is_so_far else self.verdict


def judged(claim: Claim, evidence: Mapping[str, Evidence], reports: Reports) -> Outcome:
    """Judge a claim by the available evidence."""
    if claim.why is not None:
        return Outcome(claim, (), UNTESTABLE)
    if claim.proof is not None:
        return Outcome(claim, (), REPRODUCED)
    cells = [cell for test in claim.tests for cell in test.figure.cells]
    studies = [(evidence[cell.sweep], study_of(cell.table)) for cell in cells]
    for group, _ in studies:
        _check_needs(claim, group)
    if any(study and group.is_pending(study, claim.needs) for group, study in studies):
        each = tuple(Judged(test, None, NOT_RUN) for test in claim.tests)
    else:
        each = tuple(_judged(claim, test, evidence, reports) for test in claim.tests)
    is_pending = any(_cell_pending(cell, evidence[cell.sweep]) for cell in cells)
    is_refuted = any(one.test.rule.main and one.verdict == NOT for one in each)
    verdict = NOT if is_refuted else together([one.verdict for one in each])
    return Outcome(claim, each, verdict, is_pending)


def _check_needs(claim: Claim, evidence: Evidence) -> None:
    """Reject unknown data names, which would never become available."""
    if evidence.sweep is not None:
        for name in claim.needs:
            known(name, evidence.sweep.data, f"{claim.id}: data of {evidence.name} called")


def _judged(
    claim: Claim, test: Comparison, evidence: Mapping[str, Evidence], reports: Reports
) -> Judged:
    try:
        found = figure_of(test.figure, evidence, reports)
        if found is None:
            return Judged(test, None, NOT_RUN)
        paper = None if test.paper is None else test.paper.value
        return Judged(test, found, judge(test.rule, found.value, found.interval, paper))
    except CasterError as error:
        raise CasterError(f"{claim.id}: {error}") from None


def figure_of(figure: Figure, evidence: Mapping[str, Evidence], reports: Reports) -> Found | None:
    """Look up a figure of ours; None if it is not recorded yet."""
    if not all(_cell_recorded(cell, evidence[cell.sweep]) for cell in figure.cells):
        return None
    pending = any(_cell_pending(cell, evidence[cell.sweep]) for cell in figure.cells)
    try:
        found = look_up(figure, reports)
    except Absent:
        if not pending:
            raise
        return None
    return None if found.value is None and pending else found


def _cell_pending(cell: Cell, evidence: Evidence) -> bool:
    """Whether pending backbones may still change the cell: of its family, if it names one."""
    study = study_of(cell.table)
    if study is None:
        return not evidence.is_whole
    names = {cell.column, *(value for _, value in cell.row)}
    families = [family for family, name in FAMILIES.items() if name in names]
    return evidence.is_pending(study, families=families or None)


def _cell_recorded(cell: Cell, evidence: Evidence) -> bool:
    study = study_of(cell.table)
    if study is None:
        return evidence.results is not None
    if evidence.sweep is not None and not evidence.sweep.of(study):
        raise CasterError(f"{cell}: {evidence.file} has no cell of the study '{study}'")
    return evidence.is_recorded(study)
