"""What records there are of the sweeps that claims are about, verified, as reports.

Of a study those backbones count all of whose cells are recorded; the others are awaited, and named.
What is recorded of them is verified all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from caster_bench.records import Pack
from caster_bench.studies.checks.problem import Problem
from caster_bench.studies.claims.types import Claims
from caster_bench.studies.provenance import tables as origin_tables
from caster_bench.studies.read import load, restricted
from caster_bench.studies.results import Results
from caster_bench.studies.section import Section
from caster_bench.studies.tables import Table
from caster_bench.studies.verify import Progress
from caster_bench.studies.write import sections
from caster_bench.sweeps import STUDIES, Spec, Sweep, read, without


@dataclass(frozen=True)
class Evidence:
    """Of one sweep; nothing of it, where it was not run."""

    file: str
    sweep: Sweep | None  # None: there is no such file yet
    recorded: Mapping[str, int]  # study: cells
    awaited: Mapping[str, tuple[str, ...]]  # study: backbones that are not recorded in full
    results: Results | None  # of what is recorded in full
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
        """Whether all studies are recorded in full."""
        return self.sweep is not None and not any(self.awaited.values())

    def awaits(self, study: str, data: Collection[str] | None = None) -> bool:
        """Whether backbones of a study are still to come; or any on some data."""
        names = self.awaited.get(study, ())
        if data is None or self.sweep is None:
            return bool(names)
        return any(spec.backbone in names and spec.data in data for spec in self.sweep.of(study))

    def is_recorded(self, study: str) -> bool:
        """Whether a backbone of a study is recorded in full, or more than one."""
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
        return Evidence(file, None, {}, {}, None, ()), []
    sweep = read(root / file)
    pack = Pack(records / sweep.name)
    studies = _studies(sweep)
    everyone = {study: _backbones(sweep.of(study)) for study in studies}
    nothing = Evidence(file, sweep, dict.fromkeys(studies, 0), everyone, None, ())
    if not pack.folder.exists():
        return nothing, []
    results, problems = load(sweep, pack, root, progress, needed=())
    if results is None:
        return nothing, problems
    recorded = {study: len(results.sweep.of(study)) for study in studies}
    awaited = {
        study: _backbones([spec for spec in sweep.of(study) if spec not in results.sweep.cells])
        for study in studies
    }
    results = restricted(results, without(sweep, awaited))
    made = sections(results) if results.sweep.cells else []
    return Evidence(file, sweep, recorded, awaited, results if made else None, tuple(made)), []


def _backbones(specs: Iterable[Spec]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(spec.backbone for spec in specs))


def _studies(sweep: Sweep) -> list[str]:
    return [study for study in STUDIES if sweep.of(study)]
