"""Claims judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from caster.errors import CasterError
from caster_bench.studies.claims.evidence import Evidence, study_of
from caster_bench.studies.claims.rules import NOT_RUN, REPRODUCED, UNTESTABLE, judge, together
from caster_bench.studies.claims.types import Claim, Comparison
from caster_bench.studies.claims.values import Absent, Cell, Figure, Found, Reports, look_up
from caster_bench.sweeps.names import known


@dataclass(frozen=True)
class Judged:
    """A comparison and what came out of it."""

    test: Comparison
    found: Found | None  # None: not run yet
    verdict: str


@dataclass(frozen=True)
class Outcome:
    """A claim and what came out of it."""

    claim: Claim
    judged: tuple[Judged, ...]
    verdict: str
    awaits: bool = False  # backbones of a study that it rests on are still to come

    @property
    def is_so_far(self) -> bool:
        """Whether the verdict may change."""
        return self.awaits and self.verdict != NOT_RUN

    @property
    def words(self) -> str:
        """The verdict, and whether it may change."""
        return f"{self.verdict} so far" if self.is_so_far else self.verdict


def judged(claim: Claim, evidence: Mapping[str, Evidence], reports: Reports) -> Outcome:
    """The verdict on a claim, of the evidence that there is."""
    if claim.why is not None:
        return Outcome(claim, (), UNTESTABLE)
    if claim.proof is not None:
        return Outcome(claim, (), REPRODUCED)
    cells = [cell for test in claim.tests for cell in test.figure.cells]
    studies = [(evidence[cell.sweep], study_of(cell.table)) for cell in cells]
    for held, _ in studies:
        _check_needs(claim, held)
    if any(study and held.awaits(study, claim.needs) for held, study in studies):
        each = tuple(Judged(test, None, NOT_RUN) for test in claim.tests)
    else:
        each = tuple(_judged(claim, test, evidence, reports) for test in claim.tests)
    awaits = any(_awaits(cell, evidence[cell.sweep]) for cell in cells)
    return Outcome(claim, each, together([one.verdict for one in each]), awaits)


def _check_needs(claim: Claim, evidence: Evidence) -> None:
    """Data of another name would be waited for in vain, which is not to wait at all."""
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
    """A figure of ours; None where it is of what is not recorded yet."""
    if not all(_is_recorded(cell, evidence[cell.sweep]) for cell in figure.cells):
        return None
    awaited = any(_awaits(cell, evidence[cell.sweep]) for cell in figure.cells)
    try:
        found = look_up(figure, reports)
    except Absent:
        if not awaited:
            raise
        return None
    return None if found.value is None and awaited else found


def _awaits(cell: Cell, evidence: Evidence) -> bool:
    """Whether backbones are still to come that may change what stands there."""
    study = study_of(cell.table)
    return not evidence.is_whole if study is None else evidence.awaits(study)


def _is_recorded(cell: Cell, evidence: Evidence) -> bool:
    study = study_of(cell.table)
    if study is None:
        return evidence.results is not None
    if evidence.sweep is not None and not evidence.sweep.of(study):
        raise CasterError(f"{cell}: {evidence.file} has no cell of the study '{study}'")
    return evidence.is_recorded(study)
