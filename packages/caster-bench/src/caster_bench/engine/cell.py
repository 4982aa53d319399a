"""The cells of one stream: one frozen pass, every method on it, a record for each."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.adapt.protocol import Method, OnFeatures
from caster.errors import CasterError, is_disk_full, machine_message
from caster.models.protocol import Outputs
from caster_bench.data.streams import Condition, Stream
from caster_bench.engine.answers import Answers, follow
from caster_bench.engine.batches import Prepared, stream_of
from caster_bench.engine.record import Said, write_done, write_refused
from caster_bench.engine.shared_images import under
from caster_bench.engine.worker_cache import Subject, WorkerCache, quick_passes
from caster_bench.sweeps import Spec

WARM = 5  # batches before a cell that is timed
MIB = 2**20


@dataclass
class Done:
    """What came of some cells, and where the time went.

    Where several workers share a GPU, their passes include waiting for each other there.
    """

    failures: list[tuple[Spec, str]] = field(default_factory=list)  # and why, in one line
    seconds: float = 0.0
    passes: float = 0.0  # seconds in models and methods, not in the engine


def run_group(cache: WorkerCache, specs: Sequence[Spec]) -> Done:
    """Run cells of one stream, writing a record as soon as a cell is complete.

    Of a cell that fails there is no record; the others go on.
    """
    began = perf_counter()
    done = Done()
    try:
        admission = cache.admission(specs[0])
        if admission.admitted:
            group = _Group(cache, specs, cache.subject(specs[0], admission), done)
            group.run(specs)
        else:
            for spec in specs:
                write_refused(cache.context, spec, admission)
    except Exception as error:  # of what all of them share
        if is_disk_full(error):
            raise
        told = {spec for spec, _ in done.failures}
        done.failures += [(spec, one_line(error)) for spec in specs if spec not in told]
    done.seconds = perf_counter() - began
    return done


class _Group:
    """A stream and what the frozen model says of it, for one method after another."""

    def __init__(
        self, cache: WorkerCache, specs: Sequence[Spec], subject: Subject, done: Done
    ) -> None:
        spec = specs[0]  # in all that shapes a stream, the others are the same
        self.cache, self.subject, self.done = cache, subject, done
        self.stream: Stream = stream_of(spec, subject.codes)
        conditions: list[Condition | None] = [Condition(*pair) for pair in spec.conditions]
        pixels = {
            c: under(cache.context, subject.target, c, spec.seed) for c in conditions or [None]
        }
        self.batches = Prepared(self.stream, pixels, subject.prepare, hold=not spec.alone)
        cache.keep(specs)

    def run(self, specs: Sequence[Spec]) -> None:
        """One method after another: those on features share a pass, the others have a copy."""
        alone = specs[0].alone
        with nullcontext() if alone else quick_passes(self.cache.context):
            outputs, seconds, frozen = self._frozen_pass(keep=not alone)
        for spec in specs:
            with self._isolated(spec):
                if alone:
                    self._alone(spec, frozen)
                    continue
                method = self._method(spec)
                if isinstance(method, OnFeatures):
                    found = self._followed(spec, method, method.answer, outputs, seconds)
                else:
                    with quick_passes(self.cache.context):
                        found = self._followed(spec, method, method.predict, self.batches)
                self._write(spec, method, found, frozen)

    @contextmanager
    def _isolated(self, spec: Spec) -> Iterator[None]:
        """A cell whose failure is noted, and stops no other, unless no other can be written."""
        try:
            yield
        except Exception as error:
            if is_disk_full(error):
                raise
            self.done.failures.append((spec, one_line(error)))

    def _alone(self, spec: Spec, frozen: NDArray[np.int64]) -> None:
        """A cell with nothing beside it, timed after a few batches that are not."""
        self.cache.clear()
        method = self._method(spec)
        method.reset()
        warm = perf_counter()
        for _, images in zip(range(WARM), self.batches, strict=False):
            method.predict(images)
        self.done.passes += perf_counter() - warm
        peak = _Peak(self.cache.context.device)
        found = self._followed(spec, method, method.predict, self.batches)
        self._write(spec, method, found, frozen, peak.mib())
        self.cache.clear()

    def _frozen_pass(
        self, keep: bool
    ) -> tuple[list[Outputs], NDArray[np.float64], NDArray[np.int64]]:
        """What the frozen model says of every batch, its seconds, and the classes it chooses."""
        outputs: list[Outputs] = []
        frozen = self.subject.frozen

        def answer(images: Any) -> Any:
            given = frozen.model(images)
            if keep:
                outputs.append(given)
            return frozen.answer(given)

        found = follow(frozen.reset, answer, self.batches, self.batches.plan, self._synchronise)
        self.done.passes += float(found.seconds.sum())
        classes = found.classes if self.subject.has_head else np.full_like(found.classes, -1)
        return outputs, found.seconds, classes

    def _followed(
        self, spec: Spec, method: Method, answer: Any, given: Any, shared: Any = 0.0
    ) -> Answers:
        """A method through the stream; `shared` are seconds of a pass that was made for it."""
        import torch

        torch.manual_seed(spec.seed)  # for a method that draws from torch's own generator
        found = follow(method.reset, answer, given, self.batches.plan, self._synchronise)
        self.done.passes += float(found.seconds.sum())
        found.seconds[:] += shared
        return found

    def _method(self, spec: Spec) -> Method:
        reads, began = self.subject.labelled.reads, perf_counter()
        try:
            return self.cache.method(spec, self.subject)
        finally:
            if self.subject.labelled.reads > reads:  # it was a pass over the source
                self.done.passes += perf_counter() - began

    def _synchronise(self) -> None:
        if self.cache.context.on_gpu:
            import torch

            torch.cuda.synchronize()

    def _write(
        self,
        spec: Spec,
        method: Method,
        found: Answers,
        frozen: NDArray[np.int64],
        memory: float | None = None,
    ) -> None:
        seal = self.subject.seal
        seal.verify()
        said = Said(method, found, frozen, seal.sha256, seal.sha256, memory)
        write_done(self.cache.context, spec, self.subject, self.stream, said)


class _Peak:
    """The most memory a device holds from now on."""

    def __init__(self, device: str) -> None:
        self.device = None if device == "cpu" else device
        if self.device is not None:
            import torch

            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def mib(self) -> float | None:
        """In MiB; None on a CPU."""
        if self.device is None:
            return None
        import torch

        return float(torch.cuda.max_memory_allocated(self.device) / MIB)


def one_line(error: BaseException) -> str:
    """What went wrong, on one line."""
    if isinstance(error, MemoryError | RecursionError | OSError):
        error = CasterError(machine_message(error))
    words = " ".join(str(error).split())[:300]
    return words if isinstance(error, CasterError) else f"{type(error).__name__}: {words}"
