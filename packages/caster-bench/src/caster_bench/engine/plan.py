"""What of a sweep is done, what is missing, and what lies there that is neither."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from caster.errors import CasterError
from caster_bench.engine.admit import admission_of
from caster_bench.engine.describe import identity_of
from caster_bench.engine.run_context import RunContext
from caster_bench.engine.settings import check_settings
from caster_bench.records.digest import key_of
from caster_bench.records.layout import cells_of, scan
from caster_bench.records.reader import is_whole, read_cell
from caster_bench.records.schema import REFUSED, Admission
from caster_bench.sweeps import Spec, Sweep, chosen

Pair = tuple[str, str]  # backbone and data
Group = tuple[Spec, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """The cells of a sweep, or of some of them, beside the records there are."""

    context: RunContext
    wanted: list[Spec]
    admissions: dict[Pair, Admission | None]  # None: nobody has looked yet, or it is out of date
    keys: dict[Spec, str]  # of cells whose backbone has been looked at
    there: frozenset[str]  # keys of records that look whole
    damaged: frozenset[str]  # of records of the sweep that do not, and are made again
    foreign: frozenset[str]  # of records that belong to no cell as the sweep now is

    def admission(self, spec: Spec) -> Admission | None:
        """Of a cell's backbone on its data."""
        return self.admissions[spec.backbone, spec.data]

    def is_there(self, spec: Spec) -> bool:
        """Whether a cell has a record, of what it did or why it was refused."""
        return self.keys.get(spec) in self.there

    @property
    def missing(self) -> list[Spec]:
        """Cells without a record."""
        return [spec for spec in self.wanted if not self.is_there(spec)]

    @property
    def refused(self) -> list[Spec]:
        """Cells with a record that says they were refused."""
        there = (spec for spec in self.wanted if self.is_there(spec))
        return [spec for spec in there if not getattr(self.admission(spec), "admitted", False)]

    @property
    def unknown(self) -> list[Pair]:
        """Backbones on data whose admission is to be decided before their cells can run."""
        pairs = dict.fromkeys((spec.backbone, spec.data) for spec in self.wanted)
        return [pair for pair in pairs if self.admissions[pair] is None]


def make_plan(
    sweep: Sweep,
    context: RunContext,
    only: str | None = None,  # a study
    known: Mapping[Pair, Admission | None] | None = None,  # admissions that were looked at before
    backbones: Sequence[str] = (),  # none means all
) -> Plan:
    """Compare a sweep with the folder of its run; nothing is run or written."""
    check_settings(sweep.cells)
    wanted = list(chosen(sweep, only, backbones).cells)
    pairs = dict.fromkeys((spec.backbone, spec.data) for spec in sweep.cells)
    traits: dict[str, str] = {}
    before = known or {}
    admissions = {
        pair: before.get(pair) or admission_of(context, *pair, traits=traits) for pair in pairs
    }
    keys = {}
    for spec in sweep.cells:
        admission = admissions[spec.backbone, spec.data]
        if admission is not None:
            keys[spec] = key_of(identity_of(spec, admission))
    found = {folder.name: folder for folder in scan(context.out).cells}
    ours = found.keys() & set(keys.values())
    there = frozenset(key for key in ours if is_whole(found[key]))
    decided = all(admission is not None for admission in admissions.values())
    foreign = frozenset(found.keys() - ours) if decided else frozenset()
    return Plan(context, wanted, admissions, keys, there, frozenset(ours - there), foreign)


def take_back(plan: Plan) -> int:
    """Delete damaged records, which are made again, and refusals that no longer hold.

    How many records of another making are left.
    """
    for key in plan.damaged:
        shutil.rmtree(cells_of(plan.context.out) / key)
    left = 0
    for key in sorted(plan.foreign):
        folder = cells_of(plan.context.out) / key
        try:
            refused = read_cell(folder).status == REFUSED
        except CasterError:  # damaged: for `caster bench verify` to tell
            refused = False
        if refused:  # it says nothing but that something was not there
            shutil.rmtree(folder)
        left += not refused
    return left


def groups_of(specs: Sequence[Spec]) -> Iterator[Group]:
    """Cells of one stream together, a backbone after the other, and those to be timed last.

    A cell that is timed is a group of its own: nothing may be shared with it.
    """
    order: dict[Pair, int] = {}
    for spec in specs:
        order.setdefault((spec.backbone, spec.data), len(order))
    together = sorted(
        (spec for spec in specs if not spec.alone),
        key=lambda spec: order[spec.backbone, spec.data],  # stable: streams stand together
    )
    streams: dict[Spec, list[Spec]] = {}
    for spec in together:
        streams.setdefault(spec.stream, []).append(spec)
    yield from map(tuple, streams.values())
    yield from ((spec,) for spec in specs if spec.alone)
