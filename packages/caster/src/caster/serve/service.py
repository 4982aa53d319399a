"""What the server does with a request, whatever protocol it came by.

A request is checked on the event loop and queued. A worker runs the model and owns the streams; it
answers the requests of a batch together.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from caster.adapt.adapter import Adapter
from caster.serve.batcher import Batcher, InferAnswer, InferRequest, Outcome, WorkerLostError
from caster.serve.tensors import Failure, RequestError, Tensor, datatype_of
from caster.serve.worker import Answered, BatchReport, Status, input_signature, label_dtype

FEEDBACK = {"ids", "labels"}  # inputs of a request that brings labels
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
READINGS = {
    "streams_in_memory": "Streams in memory.",
    "queued_requests": "Requests that wait for the model.",
    "ready": "1 if the model can be used.",
    "degraded": "1 while streams cannot be stored and answers are frozen.",
    "snapshots": "Snapshots written since the start.",
    "workers": "Processes that run the model.",
}

logger = logging.getLogger(__name__)


class AnyWorker(Protocol):
    """A `Worker`, here or elsewhere."""

    def answer(self, requests: Sequence[InferRequest]) -> Answered:
        """Answer requests of one stream, or one without a stream."""
        ...

    def maintain(self) -> Status:
        """Put idle streams away."""
        ...

    def verify(self) -> str | None:
        """Why the model must not be used any more; None: its weights are unchanged."""
        ...

    def close(self) -> None:
        """Take a snapshot of every stream; after the last request."""
        ...


class Lane:
    """A worker, and the queue of the requests that wait for it."""

    def __init__(
        self,
        worker: AnyWorker,
        metrics: Metrics,
        *,
        batch: int,  # samples up to which requests of a stream are joined
        wait: float,  # seconds that a request may wait for others to join it
        queue: int,  # requests that may wait
    ) -> None:
        self.worker, self._metrics, self.status = worker, metrics, Status()
        self.batcher = Batcher(self._answer, batch=batch, wait=wait, limit=queue)

    def _answer(self, requests: Sequence[InferRequest]) -> list[Outcome]:
        answered = self.worker.answer(requests)
        self.status = answered.status
        if answered.report is not None:
            self._metrics.batch(answered.report)
        return answered.outcomes

    async def maintain(self) -> None:
        """Have idle streams put away."""
        self.status = await self.batcher.call(self.worker.maintain)

    async def close(self) -> None:
        """Store every stream; after the last request."""
        await self.batcher.call(self.worker.close)
        self.batcher.close()


class Metrics:
    """Counters and histograms of one server; `registry` takes those of others too."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "caster_requests", "Requests by protocol and status.", ("protocol", "status"),
            registry=registry,
        )  # fmt: skip
        self.request_seconds = Histogram(
            "caster_request_seconds", "Time from the arrival of a request to its answer.",
            ("protocol",), buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self._batches = Counter(
            "caster_batches", "Batches by verdict.", ("accepted", "reason"), registry=registry
        )
        self._samples = Counter("caster_samples", "Samples answered.", registry=registry)
        self._batch_seconds = Histogram(
            "caster_batch_seconds", "Time of the model and the adaptation for a batch.",
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.labels = Counter("caster_feedback_labels", "Labels received.", registry=registry)

    def batch(self, report: BatchReport) -> None:
        """Count a batch."""
        self._batches.labels(str(report.accepted).lower(), report.reason).inc()
        self._samples.inc(report.samples)
        self._batch_seconds.observe(report.seconds)

    def watch(self, **readings: Callable[[], float]) -> None:
        """Show values that are read when they are asked for."""
        for name, read in readings.items():
            gauge = Gauge(f"caster_{name}", READINGS[name], registry=self.registry)
            gauge.set_function(read)

    def text(self) -> bytes:
        """All of them, in the format of Prometheus."""
        return generate_latest(self.registry)


class Service:
    """One model behind queues, with a lane for each of its workers."""

    def __init__(
        self,
        adapter: Adapter,
        *,
        name: str,
        verify_seconds: float,  # between checks of the weights
        **queues: Any,  # options of every `Lane`
    ) -> None:
        self.adapter, self.name, self.metrics = adapter, name, Metrics()
        self.input_name, self.input_shape, self.input_dtype = input_signature(adapter.model)
        self.label_datatype = datatype_of(label_dtype(adapter.classes.dtype))
        self._changed: str | None = None  # why the model must not be used any more
        self._verify_seconds, self._queues = verify_seconds, queues
        self._lanes: dict[str, Lane] = {}
        self.metrics.watch(
            streams_in_memory=lambda: sum(lane.status.streams for lane in self._all()),
            queued_requests=lambda: sum(lane.batcher.waiting for lane in self._all()),
            ready=lambda: self.broken is None,
            degraded=lambda: any(lane.status.problem for lane in self._all()),
            snapshots=lambda: sum(lane.status.snapshots for lane in self._all()),
            workers=lambda: len(self._lanes),
        )

    def _all(self) -> list[Lane]:
        return list(self._lanes.values())

    def add(self, worker: AnyWorker, name: str = "0") -> None:
        """Let a worker answer requests."""
        self._lanes[name] = Lane(worker, self.metrics, **self._queues)

    @property
    def broken(self) -> str | None:
        """Why no request can be answered."""
        return self._changed or (None if self._lanes else "no process with the model is running")

    def signature(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Inputs and outputs, as the protocol describes them."""
        outputs = [
            ("labels", self.label_datatype, [-1]),
            ("probabilities", "FP32", [-1, len(self.adapter.classes)]),
            ("disputed", "BOOL", [-1]),
            ("accepted", "BOOL", [1]),
            ("reason", "BYTES", [1]),
            ("ratio", "FP64", [1]),
            ("position", "INT64", [1]),
        ]
        shape = [-1 if size is None else size for size in self.input_shape or (None,)]
        images = self.input_name, datatype_of(self.input_dtype), [-1, *shape[1:]]
        keys = "name", "datatype", "shape"
        described = [dict(zip(keys, each, strict=True)) for each in (images, *outputs)]
        return described[:1], described[1:]

    def check_name(self, name: str, version: str = "") -> None:
        """Raise if there is no such model."""
        if name != self.name or version not in ("", "1"):
            raise RequestError(f"there is no model {name!r} version {version or '1'!r}",
                               Failure.UNKNOWN)  # fmt: skip

    async def infer(self, request: InferRequest) -> InferAnswer:
        """Answer a request, or learn from the labels that it brings."""
        if self.broken is not None:
            raise RequestError(self.broken, Failure.UNAVAILABLE)
        if request.inputs.keys() == FEEDBACK:
            if request.stream is None:
                raise RequestError("labels belong to a stream: name it")
            answer = await self._submit(request)
            self.metrics.labels.inc(len(request.inputs["ids"]))
            return answer
        return await self._submit(replace(request, images=self._images(request)))

    async def _submit(self, request: InferRequest) -> InferAnswer:
        (lane,) = self._lanes.values()
        return await lane.batcher.submit(request)

    def _images(self, request: InferRequest) -> Tensor:
        """The batch of a request, checked: nothing else may reach a stream."""
        images = request.inputs.get(self.input_name)
        if images is None:
            raise RequestError(f"there is no input {self.input_name!r}")
        others = request.inputs.keys() - {self.input_name}
        if others and request.stream is not None:
            raise RequestError(f"a stream has its own state: leave out {sorted(others)[0]!r}")
        if images.dtype != self.input_dtype:
            expected, got = datatype_of(self.input_dtype), datatype_of(images.dtype)
            raise RequestError(f"input {self.input_name!r} is {expected}, not {got}")
        declared = self.input_shape or (None,) * max(2, images.ndim)
        fits = len(declared) == images.ndim and all(
            size in (None, got) for size, got in zip(declared[1:], images.shape[1:], strict=True)
        )
        if not fits or not images.size:
            shape = [-1 if size is None else size for size in declared]
            raise RequestError(
                f"input {self.input_name!r} has shape {[-1, *shape[1:]]}, not {list(images.shape)}"
            )
        # A sum is faster than a look at every value, and large numbers may make it infinite.
        if images.dtype.kind == "f":
            with np.errstate(over="ignore", invalid="ignore"):
                suspect = not math.isfinite(float(images.sum()))
            if suspect and not np.isfinite(images).all():
                raise RequestError(f"input {self.input_name!r} has values that are not finite")
        return images

    async def maintain(self) -> None:
        """Put idle streams away, and check the weights on a schedule; until it is cancelled."""
        verified = time.monotonic()
        while True:
            await asyncio.sleep(min(1.0, self._verify_seconds))
            due = time.monotonic() - verified >= self._verify_seconds
            for name, lane in list(self._lanes.items()):
                await self._maintain_lane(name, lane, due)
            verified = time.monotonic() if due else verified

    async def _maintain_lane(self, name: str, lane: Lane, verify: bool) -> None:
        try:
            await lane.maintain()
        except WorkerLostError:
            raise
        except Exception:  # the server must go on, and tries again
            logger.exception("idle streams could not be stored")
        if verify:
            self._changed = await lane.batcher.call(lane.worker.verify) or self._changed

    async def close(self) -> None:
        """Take a snapshot of every stream; after the last request."""
        await asyncio.gather(*(lane.close() for lane in self._all()))
