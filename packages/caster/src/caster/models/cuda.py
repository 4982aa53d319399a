"""Work on a GPU that keeps the host from waiting: recorded once, replayed, read back later."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import Tensor

Work = Callable[..., tuple[Sequence[Tensor], object]]  # outputs, and what they are read from
Fetch = Callable[[Tensor], Callable[[], NDArray[Any]]]

RECORD_AT = 2  # a shape's first batch runs as it is: a ragged last one is not worth a recording
KEPT = 4  # recordings, one a shape


@dataclass(frozen=True, eq=False)
class Packed:
    """Tensors laid end to end, one block of memory a dtype: copied in as many launches."""

    blocks: dict[torch.dtype, Tensor]
    places: list[tuple[torch.dtype, Any]]  # of every tensor: shape, strides and offset

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Self:
        """Copies of these tensors."""
        rows: dict[torch.dtype, list[Tensor]] = {}
        places: list[tuple[torch.dtype, Any]] = []
        for tensor in (given.contiguous() for given in tensors):
            row = rows.setdefault(tensor.dtype, [])
            places.append((tensor.dtype, (tensor.shape, tensor.stride(), sum(map(len, row)))))
            row.append(tensor.view(-1))
        return cls({dtype: torch.cat(row) for dtype, row in rows.items()}, places)

    def copies(self) -> list[Tensor]:
        """The tensors, in memory of the stream that asks for them."""
        copied = {dtype: block.clone() for dtype, block in self.blocks.items()}
        return [copied[dtype].as_strided(*place) for dtype, place in self.places]


class Recorder:
    """Work on tensors, replayed as one CUDA graph for every shape that comes again.

    Launched one by one, the hundred small kernels of an adaptation cost the host more than they
    cost the device. The work must not wait for the device. What it reads besides its inputs it
    hands out along with its outputs: a recording goes on reading it.
    """

    def __init__(self) -> None:
        self._seen: Counter[Any] = Counter()
        self._recordings: dict[Any, _Recording] = {}
        # Recordings run one after the other, and their outputs are copied before the next does.
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work, *inputs: Tensor) -> Packed:
        """The work's outputs, until the next call; called in a lane, copied outside it."""
        key = tuple([(given.shape, given.dtype, given.device) for given in inputs])
        recording = self._recordings.get(key)
        if recording is None:
            work = torch.autocast("cuda", enabled=False)(work)  # the caller's would halve it
            self._seen[key] += 1
            if self._seen[key] < RECORD_AT:
                return Packed.of(work(*inputs)[0])
            if len(self._recordings) >= KEPT:
                self._recordings.pop(next(iter(self._recordings)))
            recording = self._recordings[key] = _Recording(work, inputs, self._pool)
        return recording.replay(inputs)


class _Recording:
    """One CUDA graph, with the memory its inputs and outputs live in."""

    def __init__(self, work: Work, inputs: Sequence[Tensor], pool: Any) -> None:
        with torch.inference_mode(False):  # or they could be written to in that mode alone
            self.inputs = [torch.empty_like(given).copy_(given) for given in inputs]
        work(*self.inputs)  # what is made once, made outside the recording
        self.graph = torch.cuda.CUDAGraph()
        # thread_local: a loader's thread may pin memory meanwhile.
        lane, errors = torch.cuda.current_stream(), "thread_local"
        with _no_collection(), torch.cuda.graph(self.graph, pool, lane, capture_error_mode=errors):
            outputs, self.read_from = work(*self.inputs)
            self.outputs = Packed.of(outputs)

    def replay(self, inputs: Sequence[Tensor]) -> Packed:
        for held, given in zip(self.inputs, inputs, strict=True):
            held.copy_(given)
        self.graph.replay()
        return self.outputs


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect garbage now and not in the block: a graph freed in there spoils the recording."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Lane:
    """A stream of its own, on which work runs as if it were on the caller's.

    Nothing can be recorded on the default stream, and on every stream that multiplies matrices
    torch keeps 32 MiB for cuBLAS to work in. On one lane a model and its recordings share them.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):  # those 32 MiB now, not from amidst a batch's memory
            torch.ones((2, 2), device=device).mm(torch.ones((2, 2), device=device))
        self._turns = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._caller = self.stream  # the last one
        self._settings: object = None
        self._recorder = Recorder()
        self._alone = Lock()  # recordings have one memory for all who call

    def run(
        self,
        first: Callable[[], Sequence[Tensor]],  # run as it is, for what follows
        work: Work,  # recorded
        settings: object,  # what is recorded depends on; others start anew
    ) -> tuple[list[Tensor], Fetch]:
        """Outputs of the work, the caller's to keep, and how to copy them to the host."""
        index = self.stream.device.index
        caller = torch.cuda.current_stream(index)
        with self._alone, torch.cuda.device(index):
            if settings != self._settings:
                self._settings, self._recorder = settings, Recorder()
            self._enter(caller)
            try:
                packed = self._recorder(work, *first())
            finally:
                self._leave(caller)
            copies = packed.copies()
        return copies, partial(fetch, stream=caller)

    def _enter(self, caller: torch.cuda.Stream) -> None:
        """Start after what the caller has begun, and after what an earlier one still copies."""
        begun, _ = self._turns
        if self._caller != caller:
            self.stream.wait_stream(self._caller)
        self._caller = caller
        begun.record(caller)
        self.stream.wait_event(begun)
        torch.cuda.set_stream(self.stream)

    def _leave(self, caller: torch.cuda.Stream) -> None:
        """Have the caller wait, who may free what is read here."""
        _, done = self._turns
        torch.cuda.set_stream(caller)
        done.record(self.stream)
        caller.wait_event(done)


def fetch(tensor: Tensor, stream: torch.cuda.Stream) -> Callable[[], NDArray[Any]]:
    """Begin to copy a tensor to the host; the function returned waits for that copy alone."""
    landed = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    landed.copy_(tensor, non_blocking=True)
    arrived = stream.record_event()

    def wait() -> NDArray[Any]:
        arrived.synchronize()
        return landed.numpy()

    return wait
