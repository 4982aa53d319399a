"""Handle a request, from either protocol.

The event loop checks and queues requests. A worker, which runs the model and owns the streams,
answers the requests of a batch together.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
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
from caster.serve.worker import (
    COUNTED,
    NEXT,
    Answered,
    BatchReport,
    Status,
    input_signature,
    label_dtype,
)

FEEDBACK = {"ids", "labels"}  # inputs of a request with true labels
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
READINGS = {
    "streams_in_memory": "Streams in memory.",
    "queued_requests": "Requests waiting for the model.",
    "ready": "1 if the model can be used.",
    "degraded": "1 while streams cannot be stored and the frozen model answers.",
    "snapshots": "Snapshots written since the start.",
    "workers": "Processes that run the model.",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServeOptions:
    """How to serve; `caster serve --help` explains each."""

    name: str  # of the model
    folder: Path  # for the streams' files
    host: str = "127.0.0.1"
    http_port: int = 8000  # 0: any free port
    grpc_port: int = 8001
    batch: int = 64
    wait_ms: float = 0.0
    streams: int = 64  # in memory
    max_streams: int = 10_000
    idle_seconds: float = 300.0
    snapshot_every: int = 64  # batches
    request_mb: float = 64.0
    queue: int = 256
    verify_seconds: float = 300.0
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    frozen: bool = False
    logs: Path | None = None  # folder; None: no log, and no page at /monitor


class AnyWorker(Protocol):
    """A `Worker` in this or another process."""

    def answer(self, requests: Sequence[InferRequest]) -> Answered:
        """Answer requests of one stream, or one without a stream."""
        ...

    def maintain(self) -> Status:
        """Move idle streams to disk."""
        ...

    def verify(self) -> str | None:
        """Say why the model must no longer be used; None if its weights are unchanged."""
        ...

    def close(self) -> None:
        """Take a snapshot of every stream; after the last request."""
        ...


class Lane:
    """A worker and its queue of requests."""

    def __init__(self, worker: AnyWorker, metrics: Metrics, options: ServeOptions) -> None:
        self.worker, self._metrics, self.status = worker, metrics, Status()
        wait = options.wait_ms / 1000
        self.batcher = Batcher(self._answer, batch=options.batch, wait=wait, limit=options.queue)

    def _answer(self, requests: Sequence[InferRequest]) -> list[Outcome]:
        answered = self.worker.answer(requests)
        self.status = answered.status
        if answered.report is not None:
            self._metrics.batch(answered.report)
        return answered.outcomes

    async def maintain(self) -> None:
        """Have the worker move idle streams to disk."""
        self.status = await self.batcher.call(self.worker.maintain)

    async def close(self) -> None:
        """Store every stream; after the last request."""
        await self.batcher.call(self.worker.close)
        self.batcher.close()


class Metrics:
    """Counters and histograms of one server; others may add theirs to `registry`."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "caster_requests", "Requests by protocol and status.", ("protocol", "status"),
            registry=registry,
        )  # fmt: skip
        self.request_seconds = Histogram(
            "caster_request_seconds", "Time from a request's arrival to its answer.",
            ("protocol",), buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self._batches = Counter(
            "caster_batches", "Batches by verdict.", ("accepted", "reason"), registry=registry
        )
        self._samples = Counter("caster_samples", "Samples answered.", registry=registry)
        self._batch_seconds = Histogram(
            "caster_batch_seconds", "Time for model and adaptation per batch.",
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.labels = Counter("caster_feedback_labels", "Labels received.", registry=registry)

    def batch(self, report: BatchReport) -> None:
        """Count a batch."""
        self._batches.labels(str(report.accepted).lower(), report.reason).inc()
        self._samples.inc(report.samples)
        self._batch_seconds.observe(report.seconds)

    def watch(self, **readings: Callable[[], float]) -> None:
        """Add gauges whose values are read on every scrape."""
        for name, read in readings.items():
            gauge = Gauge(f"caster_{name}", READINGS[name], registry=self.registry)
            gauge.set_function(read)

    def text(self) -> bytes:
        """Render all metrics in the Prometheus text format."""
        return generate_latest(self.registry)


class Service:
    """One model, with a lane per worker."""

    def __init__(self, adapter: Adapter, options: ServeOptions) -> None:
        self.adapter, self.name, self.metrics = adapter, options.name, Metrics()
        self.input_name, self.input_shape, self.input_dtype = input_signature(adapter.model)
        self.label_datatype = datatype_of(label_dtype(adapter.classes.dtype))
        self._changed: str | None = None  # why the model must no longer be used
        self._options = options
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
        """Add a worker that answers requests."""
        self._lanes[name] = Lane(worker, self.metrics, self._options)

    @property
    def broken(self) -> str | None:
        """Why no request can be answered; None if all is well."""
        return self._changed or (None if self._lanes else "no process with the model is running")

    def signature(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Describe inputs and outputs as in the protocol's metadata."""
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
        """Raise if a request is for another model or version."""
        if name != self.name or version not in ("", "1"):
            wanted = f"{name!r}, version {version!r}" if version else repr(name)
            message = f"there is no model {wanted}: this is {self.name!r}, version '1'"
            raise RequestError(message, Failure.UNKNOWN)

    async def infer(self, request: InferRequest, outputs: Collection[str] = ()) -> InferAnswer:
        """Answer a request for predictions, or learn from one with labels.

        All `outputs` must exist; they are checked before a stream changes.
        """
        if self.broken is not None:
            raise RequestError(self.broken, Failure.UNAVAILABLE)
        feeds_back = request.inputs.keys() == FEEDBACK
        known = [COUNTED] if feeds_back else [each["name"] for each in self.signature()[1]]
        # The state of a stream is an output only if the client keeps it, and sent or asked for it.
        sends_state = len(request.inputs) > 1 and not feeds_back
        has_state = request.stream is None and (request.wants_state or sends_state)
        for name in outputs:
            if name not in known and not (has_state and name.startswith(NEXT)):
                raise RequestError(f"there is no output {name!r}: choose from {', '.join(known)}")
        if feeds_back:
            if request.stream is None:
                raise RequestError("labels belong to a stream: name it with the parameter `stream`")
            answer = await self._submit(request)
            self.metrics.labels.inc(len(request.inputs["ids"]))
            return answer
        return await self._submit(replace(request, images=self._images(request)))

    async def _submit(self, request: InferRequest) -> InferAnswer:
        (lane,) = self._lanes.values()
        return await lane.batcher.submit(request)

    def _images(self, request: InferRequest) -> Tensor:
        """Check the batch of a request, so that nothing else reaches a stream."""
        images = request.inputs.get(self.input_name)
        if images is None:
            given = ", ".join(map(repr, request.inputs)) or "nothing"
            raise RequestError(f"the request needs an input {self.input_name!r}, and has {given}")
        others = request.inputs.keys() - {self.input_name}
        if others and request.stream is not None:
            raise RequestError(
                f"the server keeps the state of a stream: omit {sorted(others)[0]!r}"
            )
        if images.dtype != self.input_dtype:
            expected, got = datatype_of(self.input_dtype), datatype_of(images.dtype)
            raise RequestError(f"input {self.input_name!r} must be {expected}, not {got}")
        declared = self.input_shape or (None,) * max(2, images.ndim)
        fits = len(declared) == images.ndim and all(
            size in (None, got) for size, got in zip(declared[1:], images.shape[1:], strict=True)
        )
        if not fits or not images.size:
            shape = [-1, *(-1 if size is None else size for size in declared[1:])]
            raise RequestError(
                f"input {self.input_name!r} must have shape {shape}, not {list(images.shape)}"
            )
        # A sum is faster than checking every value, but large values may overflow it.
        if images.dtype.kind == "f":
            with np.errstate(over="ignore", invalid="ignore"):
                suspect = not math.isfinite(float(images.sum()))
            if suspect and not np.isfinite(images).all():
                raise RequestError(f"input {self.input_name!r} has values that are not finite")
        return images

    async def maintain(self) -> None:
        """Move idle streams to disk and verify the weights periodically, until cancelled."""
        verified = time.monotonic()
        while True:
            await asyncio.sleep(min(1.0, self._options.verify_seconds))
            due = time.monotonic() - verified >= self._options.verify_seconds
            for name, lane in list(self._lanes.items()):
                await self._maintain_lane(name, lane, due)
            verified = time.monotonic() if due else verified

    async def _maintain_lane(self, name: str, lane: Lane, verify: bool) -> None:
        try:
            await lane.maintain()
        except WorkerLostError:
            raise
        except Exception:  # the server continues, and tries again later
            logger.exception("idle streams could not be stored")
        if verify:
            self._changed = await lane.batcher.call(lane.worker.verify) or self._changed

    async def close(self) -> None:
        """Take a snapshot of every stream; after the last request."""
        await asyncio.gather(*(lane.close() for lane in self._all()))
