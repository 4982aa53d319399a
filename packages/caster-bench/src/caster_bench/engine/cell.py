"""Run the cells of one stream: one frozen pass, every method on it, a record for each."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.core.arrays import to_numpy
from caster.errors import CasterError, is_disk_full, machine_message
from caster.models.protocol import Outputs
from caster_bench.data.streams import Batch, Condition, make_stream
from caster_bench.engine.batches import StreamBatches
from caster_bench.engine.cell_settings import stream_settings
from caster_bench.engine.record import write_done, write_rejected
from caster_bench.engine.run_context import CPU
from caster_bench.engine.shared_images import corrupted
from caster_bench.engine.worker_cache import LoadedBackbone, WorkerCache, tf32_matmul
from caster_bench.methods.checks.object_state import same
from caster_bench.methods.gates import ungated
from caster_bench.methods.protocol import (
    Method,
    Prediction,
    answer_from_outputs,
    inert_answer,
    is_inert,
)
from caster_bench.records.reasons import INERT, KNOWN
from caster_bench.sweeps import Spec

WARM_UP = 5  # batches before a timed cell
MIB = 2**20
RESET_PEAK, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")  # of Linux


@dataclass
class GroupResult:
    """Failures and times of a group of cells.

    Where several workers share a GPU, passes include waiting for each other.
    """

    failures: list[tuple[Spec, str]] = field(default_factory=list)  # cell, one-line reason
    seconds: float = 0.0
    passes: float = 0.0  # seconds in models and methods, not in the engine


def run_group(cache: WorkerCache, specs: Sequence[Spec]) -> GroupResult:
    """Run cells of one stream, and write each record as soon as its cell is complete.

    A cell that fails has no record; the others continue.
    """
    began = perf_counter()
    result = GroupResult()
    try:
        admission = cache.admission(specs[0])
        if admission.admitted:
            _Group(cache, specs, cache.backbone(specs[0], admission), result).run(specs)
        else:
            for spec in specs:
                write_rejected(cache.context, spec, admission)
    except Exception as error:  # in something that all of them share
        if is_disk_full(error):
            raise
        failed = {spec for spec, _ in result.failures}
        result.failures += [(spec, one_line(error)) for spec in specs if spec not in failed]
    result.seconds = perf_counter() - began
    return result


class _Group:
    """A stream and the frozen model's outputs on it, shared by one method after another."""

    def __init__(
        self,
        cache: WorkerCache,
        specs: Sequence[Spec],
        backbone: LoadedBackbone,
        result: GroupResult,
    ) -> None:
        spec = specs[0]  # all cells of a group have the same stream
        self.cache, self.backbone, self.result = cache, backbone, result
        # Labels plan the stream; beyond that they only go into the record.
        self.stream = make_stream(backbone.labels, stream_settings(spec))
        conditions: list[Condition | None] = [Condition(*pair) for pair in spec.conditions]
        pixels = {
            condition: corrupted(cache.context, backbone.target, condition, spec.seed)
            for condition in conditions or [None]
        }
        self.batches = StreamBatches(self.stream, pixels, backbone.preprocess, not spec.alone)
        self._write = partial(write_done, cache.context, backbone, self.stream)
        self._precision = nullcontext if spec.alone else partial(tf32_matmul, cache.context)
        cache.retain_methods(specs)

    def run(self, specs: Sequence[Spec]) -> None:
        """Run one method after another; inert ones and those on features share the frozen pass."""
        alone = specs[0].alone
        with self._precision():
            outputs, seconds, frozen = self._frozen_pass(keep=not alone)
        for spec in specs:
            with self._isolated(spec):
                if alone:
                    self._run_timed(spec, frozen)
                    continue
                method = self._method(spec)
                self._check_inert(method, outputs)
                if (answer := answer_from_outputs(method)) is not None:
                    found = self._predict(spec, method, answer, outputs, seconds)
                else:
                    with self._precision():
                        found = self._predict(spec, method, method.predict, self.batches)
                self._write(spec, method, found, frozen)

    @contextmanager
    def _isolated(self, spec: Spec) -> Iterator[None]:
        """Note a cell's failure and continue with the next, unless the disk is full."""
        try:
            yield
        except Exception as error:
            if is_disk_full(error):
                raise
            self.result.failures.append((spec, one_line(error)))

    def _check_inert(self, method: Method, outputs: Sequence[Outputs] = ()) -> None:
        """Fail unless an inert method, gated or not, answers the first batch as the frozen model.

        The other batches may never reach it, so its record could not show that it is not inert.
        """
        method = ungated(method)
        if not is_inert(method):
            return
        method.reset()
        self._synchronise()
        began = perf_counter()
        images = next(iter(self.batches))
        with self._precision():
            found = method.predict(images)
            first = outputs[0] if outputs else method.frozen.model(images)
            expected = inert_answer(method.frozen, first)
        equal = same(found.logits, expected.logits)
        self.result.passes += perf_counter() - began
        if not equal or found.accepted or found.reason != INERT:
            raise CasterError(
                f"{method.name} says that it is inert, but does not answer as the frozen model: "
                f"on the first batch logits {'are equal' if equal else 'differ'}, accepted is "
                f"{found.accepted} and reason is {found.reason!r}"
            )

    def _run_timed(self, spec: Spec, frozen: NDArray[np.int64]) -> None:
        """Run a cell with nothing else in memory, timed after a few warm-up batches."""
        self.cache.clear_methods()
        method = self._method(spec)
        self._check_inert(method)
        method.reset()
        began = perf_counter()
        for _, images in zip(range(WARM_UP), self.batches, strict=False):
            method.predict(images)
        self.result.passes += perf_counter() - began
        peak = PeakMemory(self.cache.context.device)
        found = self._predict(spec, method, method.predict, self.batches)
        self._write(spec, method, found, frozen, peak.mib())
        self.cache.clear_methods()

    def _frozen_pass(
        self, keep: bool
    ) -> tuple[list[Outputs], NDArray[np.float64], NDArray[np.int64]]:
        """Return the frozen model's outputs per batch, the seconds, and the predicted classes."""
        outputs: list[Outputs] = []
        frozen = self.backbone.frozen

        def answer(images: Any) -> Prediction:
            out = frozen.model(images)
            if keep:
                outputs.append(out)
            return frozen.answer(out)

        found = predict_stream(
            frozen.reset, answer, self.batches, self.batches.plan, self._synchronise
        )
        self.result.passes += float(found.seconds.sum())
        classes = found.classes if self.backbone.has_head else np.full_like(found.classes, -1)
        return outputs, found.seconds, classes

    def _predict(
        self,
        spec: Spec,
        method: Method,
        answer: Callable[[Any], Prediction],
        inputs: Iterable[Any],
        shared: Any = 0.0,  # seconds per batch of the frozen pass, for methods that use it
    ) -> StreamPredictions:
        import torch

        torch.manual_seed(spec.seed)  # for methods that draw from torch's global generator
        found = predict_stream(method.reset, answer, inputs, self.batches.plan, self._synchronise)
        self.result.passes += float(found.seconds.sum())
        found.seconds[:] += shared
        return found

    def _method(self, spec: Spec) -> Method:
        reads, began = self.backbone.source_batches.reads, perf_counter()
        try:
            return self.cache.method(spec, self.backbone)
        finally:
            if self.backbone.source_batches.reads > reads:  # a pass over the source
                self.result.passes += perf_counter() - began

    def _synchronise(self) -> None:
        if self.cache.context.on_gpu:
            import torch

            torch.cuda.synchronize()


@dataclass(frozen=True, eq=False)
class StreamPredictions:
    """A method's predictions on a stream of N images in T batches."""

    classes: NDArray[np.int64]  # (N,) in stream order
    accepted: list[bool]  # (T,)
    reason: list[str]
    ratio: list[float | None]
    confident: list[int | None]
    confident_classes: list[int | None]
    seconds: NDArray[np.float64]  # (T,)


def predict_stream(
    reset: Callable[[], None],  # of the method
    answer: Callable[[Any], Prediction],
    inputs: Iterable[Any],  # one per batch
    plan: list[Batch],
    synchronise: Callable[[], None],
) -> StreamPredictions:
    """Predict every batch in turn, and reset the method where a segment begins.

    Times run from a preprocessed batch to the finished prediction, on a GPU until it is idle.
    """
    classes, predictions, seconds = [], [], []
    for batch, item in zip(plan, inputs, strict=True):
        if batch.starts_segment:
            reset()
        synchronise()
        began = perf_counter()
        prediction = answer(item)
        chosen = to_numpy(prediction.logits).argmax(axis=1)
        synchronise()
        seconds.append(perf_counter() - began)
        classes.append(chosen)
        predictions.append(
            (prediction.accepted, prediction.reason, prediction.ratio, prediction.verdict)
        )  # without the logits, which may fill a GPU
    accepted, reasons, ratios, verdicts = map(list, zip(*predictions, strict=True))
    unknown = set(reasons) - KNOWN
    if unknown:  # the record would never verify
        known = ", ".join(sorted(KNOWN))
        raise CasterError(f"the method gives the reason {min(unknown)!r}, not one of {known}")
    return StreamPredictions(
        classes=np.concatenate(classes),
        accepted=accepted,
        reason=reasons,
        ratio=ratios,
        confident=[None if v is None else v.confident for v in verdicts],
        confident_classes=[None if v is None else v.classes for v in verdicts],
        seconds=np.array(seconds),
    )


class PeakMemory:
    """The peak memory from now on: of torch on a GPU, or of this process on a CPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        gc.collect()
        if device == CPU:
            self._is_known = self._reset_resident()
            return
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)

    def mib(self) -> float | None:
        """Return the peak in MiB; None if the system does not let a process measure its own."""
        if self.device == CPU:
            return self._resident() if self._is_known else None
        import torch

        return float(torch.cuda.max_memory_allocated(self.device) / MIB)

    @staticmethod
    def _reset_resident() -> bool:
        """Give freed memory back, and reset the peak resident set size; False if that failed."""
        try:
            trim = ctypes.CDLL(None).malloc_trim  # of glibc
            trim(0)
            RESET_PEAK.write_text("5")
        except (OSError, AttributeError):
            return False
        return True

    @staticmethod
    def _resident() -> float:
        """Return the peak of the resident memory in MiB."""
        lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
        return int(lines["VmHWM"].removesuffix("kB")) / 1024


def one_line(error: BaseException) -> str:
    """Format an error on one line, as the command line prints it at the end of a run."""
    if isinstance(error, MemoryError | RecursionError | OSError):
        error = CasterError(machine_message(error))
    if isinstance(error, CasterError):
        return _shortened(error.on_command_line)
    return f"{type(error).__name__}: {_shortened(str(error))}"


def _shortened(message: str) -> str:
    return " ".join(message.split())[:300]
