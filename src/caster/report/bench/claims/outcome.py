"""Claims judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from caster.errors import CasterError
from caster.report.bench.claims.evidence import Evidence, study_of
from caster.report.bench.claims.rules import NOT_RUN, REPRODUCED, UNTESTABLE, judge, together
from caster.report.bench.claims.types import Claim, Comparison
from caster.report.bench.claims.values import Cell, Figure, Found, Reports, look_up


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


def judged(claim: Claim, evidence: Mapping[str, Evidence], reports: Reports) -> Outcome:
    """The verdict on a claim, of the evidence that there is."""
    if claim.why is not None:
        return Outcome(claim, (), UNTESTABLE)
    if claim.proof is not None:
        return Outcome(claim, (), REPRODUCED)
    each = tuple(_judged(claim, test, evidence, reports) for test in claim.tests)
    return Outcome(claim, each, together([one.verdict for one in each]))


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
    """A figure of ours; None where a study that it is of is not recorded in full yet."""
    cells = [cell for cell in (figure.cell, figure.less, figure.over) if cell is not None]
    if not all(_is_recorded(cell, evidence[cell.sweep]) for cell in cells):
        return None
    return look_up(figure, reports)


def _is_recorded(cell: Cell, evidence: Evidence) -> bool:
    study = study_of(cell.table)
    if study is None:
        return evidence.results is not None
    if evidence.sweep is not None and not evidence.sweep.of(study):
        raise CasterError(f"{cell}: {evidence.file} has no cell of the study '{study}'")
    return evidence.is_recorded(study)
