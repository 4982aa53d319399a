"""Prometheus metrics of streams, as plain values for the server to format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from caster.monitor.stream_monitor import ALARMS, StreamMonitor
from caster.monitor.summary import Record


class Metric(NamedTuple):
    """One sample of a metric, as in Prometheus's text format."""

    name: str
    help: str
    type: Literal["counter", "gauge"]
    labels: dict[str, str]
    value: float


HELP: dict[str, tuple[Literal["counter", "gauge"], str]] = {
    "samples_total": ("counter", "Samples answered."),
    "batches_total": ("counter", "Batches by the reason of their verdict."),
    "repeated_batches_total": ("counter", "Batches answered again after a restart."),
    "acceptance_ratio": ("gauge", "Share of the last batches that were accepted."),
    "certificate_ratio": ("gauge", "Last certificate that was measured."),
    "drift_distance": ("gauge", "Wasserstein distance of the last window from the source."),
    "drift_p_value": ("gauge", "P-value of the last window if it were like the source."),
    "drift_psi": ("gauge", "Population stability index of predicted classes."),
    "estimated_accuracy": ("gauge", "Estimated accuracy of the last samples, without labels."),
    "estimated_accuracy_low": ("gauge", "Lower end of the interval of both estimates."),
    "estimated_accuracy_high": ("gauge", "Upper end of the interval of both estimates."),
    "risk": ("gauge", "Mean loss so far: uncertain answers, or errors of labelled ones."),
    "risk_lower_bound": ("gauge", "Lower confidence sequence of the running risk."),
    "risk_limit": ("gauge", "Largest risk without an alarm."),
    "labels_total": ("counter", "Labels that were logged."),
    "labelled_errors_total": ("counter", "Answers that were wrong by their label."),
    "alarm": ("gauge", "1 while an alarm lasts, else 0."),
}


def metrics(monitors: Iterable[StreamMonitor]) -> Iterator[Metric]:
    """Yield all metrics of all streams, grouped by metric as Prometheus requires.

    >>> first, *_ = metrics([StreamMonitor("camera 7", [], None)])
    >>> first.name, first.labels, first.value
    ('caster_stream_samples_total', {'stream': 'camera 7'}, 0.0)
    """
    found: dict[str, list[Metric]] = {name: [] for name in HELP}
    for monitor in monitors:
        for name, value, labels in _values(monitor):
            if value is not None:
                kind, words = HELP[name]
                own = {"stream": monitor.stream, **labels}
                found[name].append(Metric(f"caster_stream_{name}", words, kind, own, float(value)))
    for group in found.values():
        yield from group


def _values(m: StreamMonitor) -> Iterator[tuple[str, float | None, dict[str, str]]]:
    yield "samples_total", m.position, {}
    for reason, count in m.reasons.items():
        yield "batches_total", count, {"reason": reason}
    yield "repeated_batches_total", m.repeated, {}
    yield "acceptance_ratio", m.acceptance, {}
    yield "certificate_ratio", m.ratio, {}
    if m.drift is not None:
        given: Record = m.drift["given_mixture"]
        yield "drift_distance", m.drift["wasserstein"], {"given": "nothing"}
        yield "drift_distance", given["wasserstein"], {"given": "mixture"}
        yield "drift_p_value", m.drift["p"], {"given": "nothing"}
        yield "drift_p_value", given["p"], {"given": "mixture"}
        yield "drift_psi", m.drift["psi"], {}
    for answer, (value, low, high, atc, doc) in m.accuracy.items():
        yield "estimated_accuracy", value, {"answer": answer, "method": "mean"}
        yield "estimated_accuracy", atc, {"answer": answer, "method": "atc"}
        yield "estimated_accuracy", doc, {"answer": answer, "method": "doc"}
        yield "estimated_accuracy_low", low, {"answer": answer}
        yield "estimated_accuracy_high", high, {"answer": answer}
    for labelled, test in (("no", m.risk), ("yes", m.labelled_risk)):
        if test is not None:
            labels = {"labelled": labelled}
            yield "risk", test.mean if test.samples else None, labels
            yield "risk_lower_bound", test.lower, labels
            yield "risk_limit", test.limit, labels
    yield "labels_total", m.labels, {}
    yield "labelled_errors_total", m.labelled_errors, {}
    active = {alarm.kind for alarm in m.active}
    for kind in ALARMS:
        yield "alarm", float(kind in active), {"kind": kind}
