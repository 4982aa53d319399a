"""Where a run stands, and what it did."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass, field

from caster_bench.engine.plan import Plan

LOG = "runs.jsonl"


@dataclass(frozen=True)
class Standing:
    """Where a run stands."""

    done: int  # cells with a record, those of earlier runs among them
    total: int
    failed: int
    current: tuple[str, ...]  # titles of cells under way, or what is done before them
    rate: float  # images a second
    left: float | None  # seconds; None while nothing tells


@dataclass
class Summary:
    """What a run did, and where its time went."""

    cells: int = 0
    refused: int = 0
    already: int = 0
    foreign: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)  # what, and why
    refusals: dict[str, str] = field(default_factory=dict)  # backbone on data, and why
    workers: int = 0
    seconds: float = 0.0
    busy: float = 0.0  # seconds of workers in tasks
    passes: float = 0.0  # of those, in models and methods

    @property
    def engine(self) -> float | None:
        """Share of the workers' busy time that was not passes; None if they did nothing."""
        return None if self.busy == 0 else 1 - self.passes / self.busy


def conclude(plan: Plan, summary: Summary) -> Summary:
    """The counts at the end; a sweep that is complete needs its images no longer."""
    summary.refused = len(plan.refused)
    summary.cells = len(plan.wanted) - len(plan.missing) - summary.refused
    for spec in plan.refused:
        admission = plan.admission(spec)
        assert admission is not None  # it was refused by it
        summary.refusals[f"{spec.backbone} on {spec.data}"] = str(admission.reason)
    decided = all(admission is not None for admission in plan.admissions.values())
    if decided and plan.there.issuperset(plan.keys.values()):  # of every study, not of one alone
        shutil.rmtree(plan.context.images, ignore_errors=True)
    if summary.workers:
        line = {"ended": int(time.time()), "engine": summary.engine} | asdict(summary)
        with (plan.context.out / LOG).open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
    return summary
