"""Run GPU work without blocking the host: capture CUDA graphs, replay them, copy results later."""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Returns its outputs, and the tensors that it reads besides its inputs.
Work = Callable[..., tuple[Sequence[Tensor], object]]
Fetch = Callable[[Tensor], Callable[[], NDArray[Any]]]
InFlight = deque[tuple[torch.cuda.Event, list[Tensor]]]  # tensors in use until the event

RECORD_AT = 2  # the first batch of a shape runs directly, so a ragged last batch is never captured
MAX_RECORDINGS = 4  # one per shape
TIMINGS = 3  # of work, to compare the host's time with the GPU's
SLACK = 1.1  # the GPU's time over the host's, up to which launches hold up the GPU


class GraphRunner:
    """Run work on a separate CUDA stream as if it ran on the caller's.

    CUDA graphs cannot be captured on the default stream. As torch allocates a cuBLAS workspace of
    32 MiB for every stream that multiplies matrices, a model and its recordings share one stream.
    """

    def __init__(
        self,
        device: torch.device,
        first: bool = False,  # its stream has a higher priority than others
        multiplies: bool = True,  # the work multiplies matrices
    ) -> None:
        self.stream = torch.cuda.Stream(device, -1 if first else 0)  # type: ignore[no-untyped-call]
        self.multiplies = multiplies
        if multiplies:
            with torch.cuda.stream(self.stream):  # allocate the workspace now, not during a batch
                torch.ones((2, 2), device=device).mm(torch.ones((2, 2), device=device))
        self._begun, self._done = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._caller = self.stream  # of the previous run
        self._settings: object = None
        self._recorder = Recorder()
        self._in_flight: InFlight = deque()
        weakref.finalize(self, _drain, self.stream, self._in_flight).atexit = False
        self._lock = Lock()  # callers share the memory of the recordings

    def run(
        self,
        first: Callable[[], Sequence[Tensor]],  # not recorded; returns the inputs of `work`
        work: Work,  # recorded
        settings: object,  # a change of these discards the recordings
        overlap: bool = False,
    ) -> tuple[list[Tensor], Fetch]:
        """Run the work; return copies of its outputs and a function that fetches a tensor.

        With `overlap`, the caller's next kernels do not wait for the work. The outputs are then
        complete once a fetched tensor has arrived on the host.
        """
        index = self.stream.device.index
        caller = torch.cuda.current_stream(index)
        with self._lock, torch.cuda.device(index):
            if settings != self._settings:
                self._settings, self._recorder = settings, Recorder()
            while self._in_flight and self._in_flight[0][0].query():  # type: ignore[no-untyped-call]
                self._in_flight.popleft()
            inputs = first()
            self._enter(caller)
            try:
                packed = self._recorder(work, *inputs)
                copies = self._copies_for(caller, packed) if overlap else []
            except BaseException:
                overlap = False  # the caller must not reuse memory of work that was launched
                raise
            finally:
                self._leave(caller, overlap)
            if not overlap:
                return packed.copies(), partial(fetch, stream=caller)
            self._in_flight.append((self.stream.record_event(), [*inputs, *copies]))
        return copies, self._fetch

    def _copies_for(self, caller: torch.cuda.Stream, packed: Packed) -> list[Tensor]:
        """Copy outputs, on this stream, to memory of the caller's stream.

        Inputs and outputs stay referenced until this stream is done with them. That is cheaper than
        `record_stream`, after which every allocation asks the driver whether memory is free again.
        """
        torch.cuda.set_stream(caller)
        memory = packed.empty()
        torch.cuda.set_stream(self.stream)
        self._begun.record(caller)  # the caller's pending work may still use this memory
        self.stream.wait_event(self._begun)
        return packed.copies(memory)

    def _fetch(self, tensor: Tensor) -> Callable[[], NDArray[Any]]:
        with torch.cuda.stream(self.stream):
            return fetch(tensor, self.stream)

    @property
    def is_used(self) -> bool:
        """Whether any work has run since the start or the last `release`."""
        return self._settings is not None

    def release(self) -> None:
        """Free the recordings and their memory."""
        with self._lock:
            _drain(self.stream, self._in_flight)  # a replay may still be running
            self._settings, self._recorder = None, Recorder()
        torch.cuda.empty_cache()

    def _enter(self, caller: torch.cuda.Stream) -> None:
        """Wait for the caller's pending work and for the copies of the previous caller."""
        if self._caller != caller:
            self.stream.wait_stream(self._caller)
        self._caller = caller
        self._begun.record(caller)
        self.stream.wait_event(self._begun)
        torch.cuda.set_stream(self.stream)

    def _leave(self, caller: torch.cuda.Stream, overlap: bool) -> None:
        """Make the caller's stream wait for the work, since it may free memory read here."""
        torch.cuda.set_stream(caller)
        if not overlap:
            self._done.record(self.stream)
            caller.wait_event(self._done)


def _drain(stream: torch.cuda.Stream, in_flight: InFlight) -> None:
    """Wait for a stream, and drop the tensors that it used."""
    stream.synchronize()
    in_flight.clear()


class Recorder:
    """Replay work as a CUDA graph, from the second batch of an input shape on.

    Launching the hundred small kernels of an adaptation one by one takes longer than running them.
    The work must not synchronise. It returns all tensors that it reads besides its inputs, so that
    they stay alive as long as the recording, which keeps reading them.
    """

    def __init__(self) -> None:
        self._seen: Counter[Any] = Counter()
        self._recordings: dict[Any, _Recording] = {}
        # Recordings share one pool, as they run in turn and outputs are copied before the next run.
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work, *inputs: Tensor) -> Packed:
        """Run the work; its outputs are valid until the next call."""
        key = tuple([(tensor.shape, tensor.dtype, tensor.device) for tensor in inputs])
        recording = self._recordings.get(key)
        if recording is None:
            work = full_precision(work)
            self._seen[key] += 1
            if self._seen[key] < RECORD_AT:
                return Packed.of(work(*inputs)[0])
            if len(self._recordings) >= MAX_RECORDINGS:
                self._recordings.pop(next(iter(self._recordings)))
            recording = self._recordings[key] = _Recording(work, inputs, self._pool)
        return recording.replay(inputs)


class _Recording:
    """One CUDA graph with its input and output buffers."""

    def __init__(self, work: Work, inputs: Sequence[Tensor], pool: Any) -> None:
        with torch.inference_mode(False):  # inference tensors are writable in inference mode only
            self.inputs = [torch.empty_like(tensor).copy_(tensor) for tensor in inputs]
        work(*self.inputs)  # warm up, so that lazy initialisation is not captured
        torch.cuda.empty_cache()  # free this run's memory before the capture allocates its own
        self.graph = torch.cuda.CUDAGraph()
        # thread_local, because other threads, such as a data loader's, may pin memory meanwhile.
        stream, errors = torch.cuda.current_stream(), "thread_local"
        recording = torch.cuda.graph(self.graph, pool, stream, capture_error_mode=errors)
        with _no_collection(), recording:
            outputs, self.read_from = work(*self.inputs)
            self.outputs = Packed.of(outputs)

    def replay(self, inputs: Sequence[Tensor]) -> Packed:
        for own, tensor in zip(self.inputs, inputs, strict=True):
            own.copy_(tensor)
        self.graph.replay()
        return self.outputs


@dataclass(frozen=True, eq=False)
class Packed:
    """Tensors packed into one buffer per dtype, so that copying takes one launch per buffer."""

    blocks: dict[torch.dtype, Tensor]
    layout: list[tuple[torch.dtype, Any]]  # shape, strides and offset of each tensor

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Self:
        """Copy these tensors into buffers."""
        rows: dict[torch.dtype, list[Tensor]] = {}
        layout: list[tuple[torch.dtype, Any]] = []
        for tensor in (each.contiguous() for each in tensors):
            row = rows.setdefault(tensor.dtype, [])
            layout.append((tensor.dtype, (tensor.shape, tensor.stride(), sum(map(len, row)))))
            row.append(tensor.view(-1))
        return cls({dtype: torch.cat(row) for dtype, row in rows.items()}, layout)

    def empty(self) -> dict[torch.dtype, Tensor]:
        """Allocate memory for copies of the blocks, on the current stream."""
        return {dtype: torch.empty_like(block) for dtype, block in self.blocks.items()}

    def copies(self, memory: dict[torch.dtype, Tensor] | None = None) -> list[Tensor]:
        """Copy the tensors, to new memory by default."""
        memory = self.empty() if memory is None else memory
        for dtype, block in self.blocks.items():
            memory[dtype].copy_(block)
        return [memory[dtype].as_strided(*view) for dtype, view in self.layout]


def is_launch_bound(work: Callable[[], object], device: torch.device) -> bool:
    """Whether launching work takes the host about as long as the work takes the GPU, or longer.

    Of several timings the shortest count, because other processes can only prolong them.
    """
    host: list[float] = []
    gpu: list[float] = []
    with torch.cuda.device(device):
        for _ in range(TIMINGS):
            begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()
            start = time.perf_counter()
            begun.record()
            work()
            done.record()
            host.append(time.perf_counter() - start)
            done.synchronize()
            gpu.append(begun.elapsed_time(done) / 1000)
    return min(gpu) < SLACK * min(host)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: freeing a CUDA graph would break a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def fetch(tensor: Tensor, stream: torch.cuda.Stream | None = None) -> Callable[[], NDArray[Any]]:
    """Start copying a tensor to the host; return a function that waits for this copy alone."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    copied = (stream or torch.cuda.current_stream(tensor.device)).record_event()

    def wait() -> NDArray[Any]:
        copied.synchronize()
        return host.numpy()

    return wait


def send(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Start copying arrays of one dtype to a device, in one transfer."""
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    sent = flat.pin_memory().to(device, non_blocking=True)
    parts = torch.split(sent, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def full_precision(work: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap work so that it ignores the caller's autocast, which would use half precision."""
    wrapped: Callable[..., Any] = torch.autocast("cuda", enabled=False)(work)
    return wrapped
