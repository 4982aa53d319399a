"""Work on a GPU that keeps the host from waiting: recorded once, replayed, read back later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

Work = Callable[..., tuple[Sequence[Tensor], object]]  # outputs, and what they are read from

RECORD_AT = 2  # a shape's first batch runs as it is: a ragged last one is not worth a recording
KEPT = 4  # recordings, one a shape


class Recorder:
    """A function of tensors, replayed as one CUDA graph for every shape that comes again.

    Launched one by one, the hundred small kernels of an adaptation cost the host more than they
    cost the device. The function must not wait for the device. What it reads besides its
    arguments it hands out along with its outputs: a recording goes on reading it.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self._seen: Counter[Any] = Counter()
        self._recordings: dict[Any, _Recording] = {}

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """The function's outputs; the caller's to keep."""
        key = tuple((tuple(given.shape), given.dtype, given.device) for given in inputs)
        self._seen[key] += 1
        if self._seen[key] < RECORD_AT:
            outputs, _ = self.work(*inputs)
            return outputs
        if key not in self._recordings:
            if len(self._recordings) >= KEPT:
                self._recordings.pop(next(iter(self._recordings)))
            self._recordings[key] = _Recording(self.work, inputs)
        return self._recordings[key].replay(inputs)


class _Recording:
    """One CUDA graph, with the memory its inputs and outputs live in."""

    def __init__(self, work: Work, inputs: Sequence[Tensor]) -> None:
        self.inputs = [torch.empty_like(given).copy_(given) for given in inputs]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work(*self.inputs)  # libraries set themselves up outside the recording
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            outputs, self.read_from = work(*self.inputs)
            self.layout = [(output.dtype, output.shape) for output in outputs]
            # One block of memory a dtype: a batch's outputs are copied out in as many launches.
            self.blocks = {
                dtype: torch.cat([o.reshape(-1) for o in outputs if o.dtype == dtype])
                for dtype in dict.fromkeys(dtype for dtype, _ in self.layout)
            }

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        for held, given in zip(self.inputs, inputs, strict=True):
            held.copy_(given)
        self.graph.replay()
        copies = {dtype: block.clone() for dtype, block in self.blocks.items()}
        outputs, taken = [], dict.fromkeys(copies, 0)
        for dtype, shape in self.layout:
            start = taken[dtype]
            taken[dtype] = start + shape.numel()
            outputs.append(copies[dtype][start : taken[dtype]].view(shape))
        return outputs


def fetch(tensor: Tensor) -> Callable[[], NDArray[Any]]:
    """Begin to copy a tensor to the host; the function returned waits for that copy alone."""
    landed = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    landed.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()

    def wait() -> NDArray[Any]:
        arrived.synchronize()
        return landed.numpy()

    return wait
