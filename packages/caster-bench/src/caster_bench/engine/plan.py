"""Compare a sweep with its records: which cells are done, missing or stale, and their cost."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from caster.errors import CasterError
from caster_bench.data import open_data
from caster_bench.engine.admit import checkpoint_path, current_admission
from caster_bench.engine.cell_settings import entry_of
from caster_bench.engine.record import identity_of
from caster_bench.engine.run_context import RunContext
from caster_bench.engine.shared_images import Group
from caster_bench.methods.registry import Entry
from caster_bench.records.digest import key_of
from caster_bench.records.schema import REJECTED, Admission
from caster_bench.records.store import cells_of, described, is_whole, read, read_cell, scan
from caster_bench.sweeps import Backbone, Spec, Sweep, select
from caster_bench.sweeps.spec import inner_and_gate

Pair = tuple[str, str]  # backbone and data
Label = tuple[str, str, str]  # backbone, data, and a method with its settings
CELLS_PER_GROUP = 6  # cells of a stream that one worker runs, after one frozen pass


@dataclass(frozen=True, eq=False)
class Plan:
    """The cells of a sweep, or some of them, and the records that exist."""

    context: RunContext
    wanted: list[Spec]
    admissions: dict[Pair, Admission | None]  # None: not decided yet, or out of date
    keys: dict[Spec, str]  # of cells whose backbone is decided
    complete: frozenset[str]  # keys of records that look complete
    damaged: frozenset[str]  # keys of wanted cells' records that do not, to be made again
    foreign: frozenset[str]  # keys of records of no cell of the sweep as it is now

    def admission(self, spec: Spec) -> Admission | None:
        """Return the admission of a cell's backbone on its data."""
        return self.admissions[spec.backbone, spec.data]

    def has_record(self, spec: Spec) -> bool:
        """Whether a cell has a record, done or rejected."""
        return self.keys.get(spec) in self.complete

    @property
    def missing(self) -> list[Spec]:
        """Cells without a record."""
        return [spec for spec in self.wanted if not self.has_record(spec)]

    @property
    def rejected(self) -> list[Spec]:
        """Cells with a record that says their backbone was rejected."""
        recorded = (spec for spec in self.wanted if self.has_record(spec))
        return [spec for spec in recorded if not getattr(self.admission(spec), "admitted", False)]

    @property
    def undecided(self) -> list[Pair]:
        """Backbones on data to be admitted before their cells can run."""
        pairs = dict.fromkeys((spec.backbone, spec.data) for spec in self.wanted)
        return [pair for pair in pairs if self.admissions[pair] is None]

    @property
    def absent(self) -> list[str]:
        """Checkpoints of undecided backbones that do not exist."""
        found = absent_checkpoints(self.context, (name for name, _ in self.undecided))
        return [own.checkpoint for own in found]

    @property
    def is_complete(self) -> bool:
        """Whether every cell of the whole sweep, wanted or not, has a record."""
        decided = all(admission is not None for admission in self.admissions.values())
        return decided and self.complete.issuperset(self.keys.values())


def absent_checkpoints(context: RunContext, names: Iterable[str]) -> list[Backbone]:
    """Backbones among these, each once, whose checkpoint file does not exist."""
    backbones = dict.fromkeys(context.backbones[name] for name in names)
    files = [own for own in backbones if own.is_file]
    return [own for own in files if not checkpoint_path(context, own).is_file()]


def make_plan(
    sweep: Sweep,
    context: RunContext,
    only: Sequence[str] = (),  # studies; empty: all
    known: Mapping[Pair, Admission | None] | None = None,  # admissions decided before
    backbones: Sequence[str] = (),  # likewise
    methods: Sequence[str] = (),  # likewise
) -> Plan:
    """Compare a sweep with the folder of its run, without running or writing anything."""
    wanted = list(select(sweep, only, backbones, methods).cells)
    pairs = dict.fromkeys((spec.backbone, spec.data) for spec in sweep.cells)
    digests: dict[str, str] = {}
    before = known or {}
    admissions = {
        pair: before.get(pair) or current_admission(context, *pair, digests) for pair in pairs
    }
    keys = {}
    for spec in sweep.cells:
        admission = admissions[spec.backbone, spec.data]
        if admission is not None:
            keys[spec] = key_of(identity_of(spec, admission))
    found = {folder.name: folder for folder in scan(context.out).cells}
    ours = found.keys() & set(keys.values())
    complete = frozenset(key for key in ours if is_whole(found[key]))
    damaged = frozenset(keys[spec] for spec in wanted if spec in keys) & ours - complete
    undecided = {pair for pair, admission in admissions.items() if admission is None}
    foreign = frozenset(key for key in found.keys() - ours if _is_foreign(found[key], undecided))
    return Plan(context, wanted, admissions, keys, complete, damaged, foreign)


def _is_foreign(folder: Path, undecided: set[Pair]) -> bool:
    """Whether no cell of the sweep can own this record."""
    if not undecided:
        return True
    try:
        _, spec = described(folder)
    except CasterError:  # damaged: `caster bench verify` reports it
        return False
    return (spec.backbone, spec.data) not in undecided


def remove_stale(plan: Plan) -> list[str]:
    """Delete damaged records, which are made again, and rejections that no longer apply.

    Return the keys of the foreign records that are left.
    """
    for key in plan.damaged:
        shutil.rmtree(cells_of(plan.context.out) / key)
    left = []
    for key in sorted(plan.foreign):
        folder = cells_of(plan.context.out) / key
        try:
            rejected = read_cell(folder).status == REJECTED
        except CasterError:  # damaged: `caster bench verify` reports it
            rejected = False
        if rejected:  # it holds no results
            shutil.rmtree(folder)
        else:
            left.append(key)
    return left


def groups_of(specs: Sequence[Spec]) -> Iterator[Group]:
    """Group cells by stream, one backbone after another, and timed cells last.

    A stream of many methods is several groups: each repeats the frozen pass, and together they
    keep more than one worker busy. A timed cell is a group of its own, so that it shares nothing.
    """
    order: dict[Pair, int] = {}
    for spec in specs:
        order.setdefault((spec.backbone, spec.data), len(order))
    together = sorted(
        (spec for spec in specs if not spec.alone),
        key=lambda spec: order[spec.backbone, spec.data],  # stable: streams stay together
    )
    streams: dict[Spec, list[Spec]] = {}
    for spec in together:
        streams.setdefault(spec.stream, []).append(spec)
    for cells in streams.values():
        for start in range(0, len(cells), CELLS_PER_GROUP):
            yield tuple(cells[start : start + CELLS_PER_GROUP])
    yield from ((spec,) for spec in specs if spec.alone)


# --- cost ------------------------------------------------------------------------------------

SAMPLED = 2  # records read for the rate of a method on a backbone
DEFAULT_RATE = {"cpu": 1e-3, "cuda": 5e-5}  # seconds per image of a small network's frozen pass
FEATURES_ONLY = 0.1  # of a frozen pass: a method on features that shares it
PASSES = {  # approximate cost of a method in frozen passes
    **{"sar": 6.0, "cotta": 40.0, "foa": 30.0},
    **{"layer-transport": 1.4, "layer-transport-ungated": 1.3},
    **{"mixture-transport": 2.4, "mixture-transport-ungated": 2.3},
}


class Costs:
    """Expected seconds of cells, measured from the run's records where there are any."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._cells: dict[Spec, float] = {}
        self.unopened: dict[str, CasterError] = {}  # data that cannot be opened, and why
        self._lengths: dict[str, int] = {}  # images of data that were opened
        self._rates, self._inert = _measured_rates(plan)
        self._default = DEFAULT_RATE["cuda" if plan.context.on_gpu else "cpu"]

    @property
    def measured(self) -> int:
        """Number of methods on backbones with a measured rate."""
        return len(self._rates)

    def images(self, spec: Spec) -> int:
        """Return the number of images of a cell; 0 if its data cannot be opened."""
        admission = self._plan.admission(spec)
        if admission is not None and admission.target is not None:
            once = int(admission.target["n"])
        else:
            once = self._length(spec.data)
        return once * max(1, len(spec.conditions))

    def is_known(self, spec: Spec) -> bool:
        """Whether a cell's images can be counted; its cost is unknown otherwise."""
        return self.images(spec) > 0

    def _length(self, name: str) -> int:
        """Open data once, whether that succeeds or not: a sweep has thousands of cells on them."""
        if name not in self._lengths and name not in self.unopened:
            data = self._plan.context.data[name]
            try:
                found = len(open_data(data.target, self._plan.context.data_root))
                open_data(data.source, self._plan.context.data_root)  # no cell runs without it
            except CasterError as error:
                self.unopened[name] = error
            else:
                self._lengths[name] = min(found, data.target_limit or found)
        return 0 if name in self.unopened else self._lengths[name]

    def frozen(self, spec: Spec) -> float:
        """Return the cost of one frozen pass through a cell's stream."""
        rate = self._rates.get((spec.backbone, spec.data, "frozen"))
        return self.images(spec) * (self._default if rate is None else rate)

    def cell(self, spec: Spec) -> float:
        """Return the cost of a cell, without a frozen pass that it shares."""
        if spec not in self._cells:
            self._cells[spec] = self._cell(spec)
        return self._cells[spec]

    def _cell(self, spec: Spec) -> float:
        entry, frozen = entry_of(spec.method), self.frozen(spec)
        where = spec.backbone, spec.data, spec.label
        on_outputs = "torch module" not in entry.needs or where in self._inert
        shared = on_outputs and entry.gate is None and not spec.alone
        rate = self._rates.get(where)
        if rate is not None:
            return max(self.images(spec) * rate - (frozen if shared else 0.0), 0.0)
        return frozen * (FEATURES_ONLY if shared else _passes(entry))

    def group(self, specs: Iterable[Spec]) -> float:
        """Return the cost of cells of one stream, with the frozen pass they share."""
        specs = tuple(specs)
        return self.frozen(specs[0]) + sum(map(self.cell, specs))


def _measured_rates(plan: Plan) -> tuple[dict[Label, float], set[Label]]:
    """Seconds per image of methods on backbones, and which of them are inert."""
    sampled: dict[Label, list[Spec]] = {}
    for spec in plan.wanted:
        if plan.has_record(spec):
            specs = sampled.setdefault((spec.backbone, spec.data, spec.label), [])
            if len(specs) < SAMPLED:
                specs.append(spec)
    rates, inert = {}, set()
    for name, specs in sampled.items():
        batches = []
        for spec in specs:
            with suppress(CasterError):  # damaged: `caster bench verify` reports it
                record = read(cells_of(plan.context.out) / plan.keys[spec])
                if record.batches is not None:
                    batches.append(record.batches)
                    if record.cell.method["inert"]:
                        inert.add(name)
        if batches:
            seconds = sum(float(table.seconds.sum()) for table in batches)
            rates[name] = seconds / sum(int(table.size.sum()) for table in batches)
    return rates, inert


def _passes(entry: Entry) -> float:
    """Estimate a method's cost in frozen passes; a backward pass counts as two."""
    name, _ = inner_and_gate(entry.name)
    return PASSES.get(name, 3.5 if entry.gradients else 1.1) + (entry.gate is not None)
