"""What Prometheus reads from the server."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from caster.serve.worker import BatchReport

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


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


READINGS = {
    "streams_in_memory": "Streams in memory.",
    "queued_requests": "Requests that wait for the model.",
    "ready": "1 if the model can be used.",
    "degraded": "1 while streams cannot be stored and answers are frozen.",
    "snapshots": "Snapshots written since the start.",
    "workers": "Processes that run the model.",
}
