"""What a worker process reuses between groups of cells: the loaded backbone and its methods."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from threadpoolctl import threadpool_limits

from caster import state as states
from caster.errors import CasterError
from caster.models.protocol import FrozenModel
from caster_bench.engine.admit import load, moments_digest, source_and_target
from caster_bench.engine.batches import LabelledBatches, Preprocess, preprocessor
from caster_bench.engine.cell_settings import constructor_settings
from caster_bench.engine.run_context import RunContext
from caster_bench.engine.shared_images import ClassIndices, StoredImages
from caster_bench.methods.protocol import Frozen, Method, OnFeatures
from caster_bench.methods.registry import create
from caster_bench.methods.source import Source
from caster_bench.records.schema import Admission
from caster_bench.records.store import read_admission
from caster_bench.sweeps import Spec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class LoadedBackbone:
    """An admitted backbone on its data, ready to be adapted."""

    admission: Admission
    model: FrozenModel
    guard: WeightGuard
    source: Source
    source_batches: LabelledBatches
    frozen: Frozen
    target: StoredImages
    labels: ClassIndices  # (N,) of the target: for streams and records, never for a method
    preprocess: Preprocess

    @property
    def has_head(self) -> bool:
        """Whether the frozen model predicts the classes of the data."""
        return self.admission.threshold is not None


class WorkerCache:
    """The last backbone of this process, and those of its methods that are slow to set up."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self._backbone: LoadedBackbone | None = None
        self._methods: dict[Any, Method] = {}

    def admission(self, spec: Spec) -> Admission:
        """Read the admission of a cell's backbone on its data."""
        return read_admission(self.context.admission_path(spec.backbone, spec.data))

    def backbone(self, spec: Spec, admission: Admission) -> LoadedBackbone:
        """Return the backbone and source of a cell; load them unless they are the last ones."""
        last = self._backbone
        if last is not None and last.admission == admission and last.guard.unchanged():
            return last
        last = self._backbone = None  # free it before the next is loaded
        self.clear_methods()
        self._backbone = self._load(spec, admission)
        return self._backbone

    def _load(self, spec: Spec, admission: Admission) -> LoadedBackbone:
        model = load(self.context, self.context.backbones[spec.backbone])
        source, target = source_and_target(self.context, self.context.data[spec.data], model)
        state = states.load(self.context.state_path(spec.backbone, spec.data))
        digests = [source.sha256, target.sha256, moments_digest(state)]
        admitted = [(part or {}).get("sha256") for part in (admission.source, admission.target)]
        if digests != [*admitted, admission.moments]:
            raise CasterError(
                f"{admission.name} has changed since it was admitted: run the sweep again"
            )
        preprocess = preprocessor(model)
        batches = LabelledBatches(source.pixels(), source.labels(), preprocess)
        fitted = Source(state=state, batches=batches)
        fitted.check(model)  # the state belongs to this model
        return LoadedBackbone(
            admission=admission,
            model=model,
            guard=WeightGuard(model),
            source=fitted,
            source_batches=batches,
            frozen=Frozen(model, fitted),
            target=target,
            labels=target.labels(),
            preprocess=preprocess,
        )

    def method(self, spec: Spec, backbone: LoadedBackbone) -> Method:
        """Create the method of a cell, or reuse one that is slow to set up.

        Slow are methods that read the source, and on a GPU those on features, some of which
        record a CUDA graph.
        """
        key = _key(spec)
        if key in self._methods:
            return self._methods[key]
        reads = backbone.source_batches.reads
        settings = constructor_settings(spec)
        method = create(spec.method, backbone.model, backbone.source, **settings)
        may_record = self.context.on_gpu and isinstance(method, OnFeatures)
        if backbone.source_batches.reads > reads or may_record:
            self._methods[key] = method
        return method

    def retain_methods(self, specs: Iterable[Spec]) -> None:
        """Drop methods that none of these cells uses: workers share a GPU's memory."""
        wanted = {_key(spec) for spec in specs}
        self._methods = {key: method for key, method in self._methods.items() if key in wanted}

    def clear_methods(self) -> None:
        """Drop every method and free its memory."""
        self._methods.clear()
        gc.collect()
        if self.context.on_gpu:
            import torch

            torch.cuda.empty_cache()


def _key(spec: Spec) -> tuple[str, str]:
    return spec.method, repr(constructor_settings(spec))


# --- frozen weights --------------------------------------------------------------------------


class WeightGuard:
    """Detects any change to a frozen model; the model's own `verify` calls it from then on.

    A SHA-256 of the weights takes longer than many methods on a whole stream, and methods verify
    at every reset. So it is computed once; later checks compare all weights bit by bit with a copy
    on the same device.
    """

    def __init__(self, model: FrozenModel) -> None:
        self.name = model.name
        self.sha256 = _weights_digest(model)
        self._module: Any = getattr(model, "module", None)
        self._verify = model.verify
        if self._module is not None:
            self._structure = _structure(self._module)
            self._values = [value.clone() for value in _values(self._module)]
            model.verify = self.verify  # type: ignore[method-assign]

    def verify(self) -> None:
        """Raise if the model has changed."""
        if self._module is None:
            self._verify()
        elif not self.unchanged():
            raise CasterError(f"{self.name} was changed while it was in use: it is not frozen")

    def unchanged(self) -> bool:
        """Whether layers, parameters and buffers are as they were; True without a module."""
        if self._module is None:
            return True
        return _structure(self._module) == self._structure and _same_bits(
            _values(self._module), self._values
        )


def _weights_digest(model: FrozenModel) -> str | None:
    module = getattr(model, "module", None)
    if module is None:
        model.verify()
        return model.sha256
    from caster.models.torch import digest_of

    return digest_of(module)


def _structure(module: Any) -> list[tuple[Any, ...]]:
    """Names, types and settings of layers; names, dtypes, shapes and devices of their tensors."""
    layers = module.named_modules()
    values = (*module.named_parameters(), *module.named_buffers())
    return [
        *((name, type(layer).__name__, layer.extra_repr()) for name, layer in layers),
        *((name, value.dtype, value.shape, value.device) for name, value in values),
    ]


def _values(module: Any) -> list[Tensor]:
    return [value.detach() for value in (*module.parameters(), *module.buffers())]


def _same_bits(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether tensors of equal dtypes and shapes have equal bits: NaN equals NaN, -0 is not 0.

    Waits for the device once rather than once per tensor.
    """
    import torch

    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    differ = []
    for one, other in zip(ours, theirs, strict=True):
        dtype = integers.get(one.element_size(), one.dtype)
        differ.append((one.view(dtype) != other.view(dtype)).any())
    return not any(torch.stack(differ).tolist()) if differ else True


# --- the process -----------------------------------------------------------------------------

_cache: WorkerCache | None = None
_limits: threadpool_limits | None = None  # held for the life of the process


def worker_cache(context: RunContext) -> WorkerCache:
    """Return the cache of this process, after setting it up so that runs are repeatable."""
    global _cache
    if _cache is None:
        limit_threads()
        import torch

        torch.set_num_threads(1)
        torch.backends.cudnn.deterministic = True
        if context.on_gpu:
            use_deterministic_kernels()
            torch.cuda.set_device(context.device)
    if _cache is None or _cache.context != context:
        _cache = WorkerCache(context)
    return _cache


def limit_threads() -> None:
    """Limit this process to one thread.

    Sums in another order would round differently, and there is one process per core already.
    """
    global _limits
    if _limits is None:
        _limits = threadpool_limits(1)


@contextmanager
def tf32_matmul(context: RunContext) -> Iterator[None]:
    """On a GPU, multiply the matrices of a network's forward pass in TF32, like convolutions.

    Not for computations on features: covariances and their factors need full precision.
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


def use_deterministic_kernels() -> None:
    """Use torch's deterministic GPU kernels where there are any, without its warnings elsewhere."""
    import torch

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when cuBLAS is first used
    warnings.filterwarnings("ignore", message=".*deterministic")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # These two attention kernels sum gradients in any order; the plain and flash ones do not.
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
