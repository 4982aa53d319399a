"""Queue requests per stream, and join them to batches for one worker thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from caster.serve.tensors import Failure, RequestError, Tensor, Tensors

LONGEST_ID = 128
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class InferRequest:
    """One request: its tensors, and the stream they belong to."""

    inputs: Tensors
    stream: str | None = None
    position: int | None = None  # where the client believes its stream to be
    wants_state: bool = False
    images: Tensor | None = None  # the checked input; None if the request has labels

    @property
    def samples(self) -> int:
        """Number of samples."""
        return 0 if self.images is None else len(self.images)

    @classmethod
    def of(cls, inputs: Tensors, parameters: Mapping[str, Any], header: str | None) -> InferRequest:
        """Read the parameters of a request; unknown ones are ignored."""
        stream, position = parameters.get("stream", header), parameters.get("position")
        if header is not None and not header.isascii():  # HTTP defines no encoding for headers
            raise RequestError(
                "the header can name a stream in ASCII only: use the parameter `stream`"
            )
        if header is not None and header != stream:
            raise RequestError("the header and the parameter name different streams")
        usable = isinstance(stream, str) and 0 < len(stream) <= LONGEST_ID and stream.isprintable()
        if stream is not None and not usable:
            raise RequestError(f"a stream id must have 1 to {LONGEST_ID} printable characters")
        if position is not None and (type(position) is not int or position < 0):
            raise RequestError("`position` must be the number of samples answered so far")
        return cls(inputs, stream, position, parameters.get("state") is True)


@dataclass(frozen=True)
class InferAnswer:
    """The answer to one request."""

    outputs: Tensors
    parameters: dict[str, str | int | bool] = field(default_factory=dict)


@dataclass(eq=False)
class Waiting:
    """A request in a queue."""

    request: InferRequest
    future: asyncio.Future[InferAnswer]
    arrived: float
    timer: asyncio.TimerHandle | None = None


Outcome = InferAnswer | RequestError


class WorkerLostError(RequestError):
    """The worker process died; whether it had answered the request is unknown."""

    def __init__(self) -> None:
        super().__init__("the worker process died: try again", Failure.UNAVAILABLE)


class Batcher:
    """Queues on the event loop, and the thread on which `run` answers their batches."""

    def __init__(
        self,
        run: Callable[
            [Sequence[InferRequest]], list[Outcome]
        ],  # several of one stream, or a single one
        *,
        batch: int,  # samples up to which requests of a stream are joined
        wait: float,  # seconds that a request may wait for others to join it
        limit: int,  # maximum number of waiting requests
    ) -> None:
        self._run, self._batch, self._wait, self._limit = run, batch, wait, limit
        self._queues: dict[
            object, deque[Waiting]
        ] = {}  # by stream; a request without one has its own
        self._ready: dict[object, None] = {}  # keys of queues with a batch to run, in order
        self.waiting = 0
        self._busy = False
        self._lost: WorkerLostError | None = None
        self._worker = ThreadPoolExecutor(1, "caster-serve")

    async def submit(self, request: InferRequest) -> InferAnswer:
        """Queue a request, and wait for its answer."""
        if self._lost is not None:
            raise self._lost
        if self.waiting >= self._limit:
            raise RequestError(
                f"{self.waiting:,} requests are waiting already: try again", Failure.BUSY
            )
        loop = asyncio.get_running_loop()
        waiting = Waiting(request, loop.create_future(), loop.time())
        key: object = request.stream or waiting
        self._queues.setdefault(key, deque()).append(waiting)
        self.waiting += 1
        self._schedule(key)
        return await waiting.future

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the worker thread, between batches."""
        if self._lost is not None:
            raise self._lost
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)

    def close(self) -> None:
        """Stop the worker thread."""
        self._worker.shutdown()

    def abandon(self, error: WorkerLostError) -> None:
        """Fail all waiting requests, in order, and all later ones: the worker is lost."""
        self._lost = error
        queues, self._queues = self._queues, {}
        self._ready.clear()
        self.waiting = 0
        for waiting in chain.from_iterable(queues.values()):
            if not waiting.future.done():
                waiting.future.set_exception(error)
        self._worker.shutdown(wait=False)

    def _schedule(self, key: object) -> None:
        """Make a queue ready if its first batch is full or has waited long enough."""
        queue = self._queues.get(key)
        if not queue or key in self._ready:
            return
        loop, first = asyncio.get_running_loop(), queue[0]
        joins = first.request.stream is not None and first.request.images is not None
        full = sum(waiting.request.samples for waiting in queue) >= self._batch
        if not joins or full or loop.time() >= first.arrived + self._wait:
            self._ready[key] = None
            self._start()
        elif first.timer is None:
            first.timer = loop.call_at(first.arrived + self._wait, self._schedule, key)

    def _start(self) -> None:
        """Give the next batch to the worker, if it is free."""
        while self._ready and not self._busy:
            key = next(iter(self._ready))
            del self._ready[key]
            if taken := self._take(key):
                self._busy = True
                requests = [waiting.request for waiting in taken]
                loop = asyncio.get_running_loop()
                work = loop.run_in_executor(self._worker, self._run, requests)
                work.add_done_callback(partial(self._finish, key, taken))

    def _take(self, key: object) -> list[Waiting]:
        """Take the next batch from a queue, without requests of disconnected clients."""
        queue, taken, samples = self._queues[key], list[Waiting](), 0
        while queue:
            first = queue[0]
            if not first.future.done():
                if taken and not _joins(taken[0].request, first.request, samples, self._batch):
                    break
                taken.append(first)
                samples += first.request.samples
            queue.popleft()
            self.waiting -= 1
        if not queue:
            del self._queues[key]
        return taken

    def _finish(
        self, key: object, taken: list[Waiting], done: asyncio.Future[list[Outcome]]
    ) -> None:
        self._busy = False
        for waiting, outcome in zip(taken, done.result(), strict=True):
            if isinstance(outcome, WorkerLostError):
                self._lost = outcome
            if waiting.future.done():  # its client has disconnected
                continue
            if isinstance(outcome, RequestError):
                waiting.future.set_exception(outcome)
            else:
                waiting.future.set_result(outcome)
        if self._lost is not None:  # before the next batch: streams keep the order of requests
            self.abandon(self._lost)
            return
        self._schedule(key)
        self._start()


def _joins(first: InferRequest, other: InferRequest, samples: int, limit: int) -> bool:
    """Whether a request can join the batch that another one starts."""
    if first.images is None or other.images is None or samples + other.samples > limit:
        return False
    return first.images.shape[1:] == other.images.shape[1:]
