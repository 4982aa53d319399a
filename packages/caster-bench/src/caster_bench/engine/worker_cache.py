"""What a process keeps from one group of cells to the next: a model, its source, its methods."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from threadpoolctl import threadpool_limits

from caster import state as states
from caster.adapt.frozen import Frozen
from caster.adapt.protocol import Method, OnFeatures
from caster.adapt.source import Source
from caster.errors import CasterError
from caster.models.protocol import FrozenModel
from caster_bench.engine.admit import kept_of, moments_digest
from caster_bench.engine.backbones import load
from caster_bench.engine.batches import Labelled, Prepare, preparing
from caster_bench.engine.run_context import RunContext
from caster_bench.engine.settings import entry_of
from caster_bench.engine.shared_images import Codes, Kept
from caster_bench.engine.weight_guard import WeightGuard
from caster_bench.methods.registry import create
from caster_bench.records.reader import read_admission
from caster_bench.records.schema import Admission
from caster_bench.sweeps import Spec


@dataclass(frozen=True, eq=False)
class Subject:
    """An admitted backbone on its data, ready to be adapted."""

    admission: Admission
    model: FrozenModel
    seal: WeightGuard  # of the model
    source: Source
    labelled: Labelled  # of the source
    frozen: Frozen
    target: Kept
    codes: Codes  # (N,) true classes of the target: for streams and records, never for a method
    prepare: Prepare

    @property
    def has_head(self) -> bool:
        """Whether the frozen model knows the classes of the data."""
        return self.admission.threshold is not None


class WorkerCache:
    """One process at work at a place; it holds the last subject only."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self._subject: Subject | None = None
        self._methods: dict[Any, Method] = {}

    def admission(self, spec: Spec) -> Admission:
        """Whether the backbone of a cell may speak for its data."""
        return read_admission(self.context.source(spec.backbone, spec.data, ".json"))

    def subject(self, spec: Spec, admission: Admission) -> Subject:
        """The model and source of a cell, loaded unless they are the last ones."""
        held = self._subject
        if held is not None and held.admission == admission and held.seal.holds():
            return held
        held = self._subject = None
        self.clear()
        model = load(self.context, self.context.backbones[spec.backbone])
        source, target = kept_of(self.context, self.context.data[spec.data], model)
        state = states.load(self.context.source(spec.backbone, spec.data, ".caster"))
        asked = {"source": source.sha256, "target": target.sha256}
        stated = {"source": (admission.source or {}), "target": (admission.target or {})}
        same = all(stated[part].get("sha256") == sha256 for part, sha256 in asked.items())
        if not same or moments_digest(state) != admission.moments:
            raise CasterError(
                f"{admission.name} is not what was admitted any more: run the sweep again"
            )
        prepare = preparing(model)
        labelled = Labelled(source.pixels(), source.codes(), prepare)
        known = Source(state=state, batches=labelled)
        known.check(model)  # the moments are of this very model
        self._subject = Subject(
            admission=admission,
            model=model,
            seal=WeightGuard(model),
            source=known,
            labelled=labelled,
            frozen=Frozen(model, known),
            target=target,
            codes=target.codes(),
            prepare=prepare,
        )
        return self._subject

    def method(self, spec: Spec, subject: Subject) -> Method:
        """The method of a cell, made anew, or one that took long to get going.

        That is a pass over the source; or, on a GPU, a recording of the work on features, which
        some of those methods make.
        """
        key = _key(spec)
        if key in self._methods:
            return self._methods[key]
        reads = subject.labelled.reads
        method = create(spec.method, subject.model, subject.source, **_settings(spec))
        may_record = self.context.on_gpu and isinstance(method, OnFeatures)
        if subject.labelled.reads > reads or may_record:
            self._methods[key] = method
        return method

    def keep(self, specs: Iterable[Spec]) -> None:
        """Let go of methods that none of these cells is of: every worker of a GPU has its own."""
        wanted = {_key(spec) for spec in specs}
        self._methods = {key: held for key, held in self._methods.items() if key in wanted}

    def clear(self) -> None:
        """Let go of every method, and of the memory they take."""
        self._methods.clear()
        gc.collect()
        if self.context.on_gpu:
            import torch

            torch.cuda.empty_cache()


def _settings(spec: Spec) -> dict[str, Any]:
    """Of a cell's method; one that draws is given the cell's seed."""
    draws = "seed" in entry_of(spec.method).options()
    return ({"seed": spec.seed} if draws else {}) | spec.given


def _key(spec: Spec) -> tuple[str, str]:
    return spec.method, repr(_settings(spec))


_desk: WorkerCache | None = None
_limits: threadpool_limits | None = None  # as long as the process lives


def desk_at(context: RunContext) -> WorkerCache:
    """The desk of this process, which sees to it that two runs of a cell agree."""
    global _desk
    if _desk is None:
        one_thread()
        import torch

        torch.set_num_threads(1)
        torch.backends.cudnn.deterministic = True
        if context.on_gpu:
            round_alike()
            torch.cuda.set_device(context.device)
    if _desk is None or _desk.context != context:
        _desk = WorkerCache(context)
    return _desk


def one_thread() -> None:
    """Hold this process to one thread of its own.

    Sums taken in another order would round otherwise, and processes that share a machine do not
    need more.
    """
    global _limits
    if _limits is None:
        _limits = threadpool_limits(1)


@contextmanager
def quick_passes(context: RunContext) -> Iterator[None]:
    """Have a GPU multiply the matrices of a network's pass in TF32, as it does convolutions.

    Not for what is computed from features: covariances and their factors need all digits.
    """
    if not context.on_gpu:
        yield
        return
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def round_alike() -> None:
    """Have a GPU add up in the same order every time, wherever torch knows how to.

    Where it does not, it would warn at every call; records that differ are noticed without that.
    """
    import torch

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when cuBLAS is first used
    warnings.filterwarnings("ignore", message=".*deterministic")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # Attention: these two add up their gradients in any order, the plain and flash ones do not.
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
