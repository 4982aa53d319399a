"""What cells are expected to cost: by what cells like them took here, else by their method."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from caster.errors import CasterError
from caster_bench.data.digits import open_data
from caster_bench.engine.plan import Plan
from caster_bench.engine.settings import entry_of
from caster_bench.methods.catalogue import Entry
from caster_bench.records.layout import cells_of
from caster_bench.records.reader import Record, read
from caster_bench.sweeps import Spec

LOOKED_AT = 2  # records of a method on a backbone that are read for its rate
RATE = {"cpu": 1e-3, "cuda": 5e-5}  # guess: seconds an image of a frozen pass, a small network
PASSES = {  # frozen passes that a method takes, about
    **{"sar": 6.0, "cotta": 40.0, "foa": 30.0},
    **{"layer-transport": 1.4, "layer-transport-ungated": 1.3},
}


class Costs:
    """Seconds of cells, by records of a run where there are any."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._known: dict[Spec, float] = {}
        self.unopened: dict[str, str] = {}  # data, and why their images cannot be counted
        self._rates = _rates(plan)  # (backbone, data, label): seconds an image
        guess = RATE["cuda" if plan.context.on_gpu else "cpu"]
        self._guess = guess

    @property
    def measured(self) -> int:
        """How many methods on backbones have a rate that was measured."""
        return len(self._rates)

    def images(self, spec: Spec) -> int:
        """Images of a cell; none while its data cannot be opened."""
        admission = self._plan.admission(spec)
        if admission is not None and admission.target is not None:
            once = int(admission.target["n"])
        else:
            data = self._plan.context.data[spec.data]
            try:
                once = _length(data.target, self._plan.context.data_root)
            except CasterError as error:
                self.unopened[spec.data] = str(error)
                return 0
            once = min(once, data.target_limit or once)
        return once * max(1, len(spec.conditions))

    def frozen(self, spec: Spec) -> float:
        """One frozen pass through a cell's stream."""
        rate = self._rates.get((spec.backbone, spec.data, "frozen"))
        return self.images(spec) * (self._guess if rate is None else rate)

    def cell(self, spec: Spec) -> float:
        """A cell, beside a frozen pass that it shares."""
        if spec not in self._known:
            self._known[spec] = self._cell(spec)
        return self._known[spec]

    def _cell(self, spec: Spec) -> float:
        entry, frozen = entry_of(spec.method), self.frozen(spec)
        shared = _on_features(entry) and not spec.alone
        rate = self._rates.get((spec.backbone, spec.data, spec.label))
        if rate is not None:
            return max(self.images(spec) * rate - (frozen if shared else 0.0), 0.0)
        return frozen * (0.1 if shared else _passes(entry))

    def group(self, specs: Iterable[Spec]) -> float:
        """Cells of one stream, and the frozen pass before them."""
        specs = tuple(specs)
        return self.frozen(specs[0]) + sum(map(self.cell, specs))


def _rates(plan: Plan) -> dict[tuple[str, str, str], float]:
    chosen: dict[tuple[str, str, str], list[Spec]] = {}
    for spec in plan.wanted:
        if plan.is_there(spec):
            known = chosen.setdefault((spec.backbone, spec.data, spec.label), [])
            if len(known) < LOOKED_AT:
                known.append(spec)
    rates = {}
    for name, specs in chosen.items():
        records = _readable(cells_of(plan.context.out) / plan.keys[spec] for spec in specs)
        batches = [record.batches for record in records if record.batches is not None]
        if batches:
            seconds = sum(float(table.seconds.sum()) for table in batches)
            rates[name] = seconds / sum(int(table.size.sum()) for table in batches)
    return rates


def _readable(folders: Iterable[Path]) -> Iterator[Record]:
    """Records without those that turn out to be damaged: for `caster bench verify` to tell."""
    for folder in folders:
        with suppress(CasterError):
            yield read(folder)


def _on_features(entry: Entry) -> bool:
    return entry.gate is None and "torch module" not in entry.needs


def _passes(entry: Entry) -> float:
    """How many frozen passes a method takes, about: a backward pass counts for two."""
    name = entry.name.partition("+")[0]
    return PASSES.get(name, 3.5 if entry.gradients else 1.1) + (entry.gate is not None)


@cache
def _length(target: str, root: Path | None) -> int:
    return len(open_data(target, root))
