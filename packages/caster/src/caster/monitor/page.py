"""Summarise the streams in a folder of logs as JSON, and as a self-contained HTML page."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from importlib.resources import files

from caster.core.risk import RiskTest
from caster.errors import CasterError
from caster.io.files import AnyPath
from caster.monitor import log
from caster.monitor.stream_monitor import ALARMS, StreamMonitor
from caster.monitor.summary import Record

COPIED = (  # attributes of a monitor
    *("classes", "batches", "accepted", "acceptance", "repeated", "ratio", "drift", "cause"),
    *("accuracy", "labels", "labelled_errors", "betting"),
)
TIMELINES = 24  # most recently active streams, drawn batch by batch; all are in the table


def from_folder(folder: AnyPath, stream: str | None = None, now: float | None = None) -> Record:
    """Data of one stream, or of all that have a log in a folder."""
    if stream is not None:
        return from_monitors([log.read(folder, stream)], now) | {"damaged": []}
    monitors, damaged = list[StreamMonitor](), list[str]()
    for path in log.newest(folder).values():
        try:
            monitors.append(log.read_segment(path))
        except CasterError as error:
            damaged.append(str(error))
    return from_monitors(monitors, now) | {"damaged": damaged}


def from_monitors(monitors: Iterable[StreamMonitor], now: float | None = None) -> Record:
    """Data of streams as JSON, ordered by alarms and then by last activity."""
    found = sorted(monitors, key=lambda m: (-len(m.active), -_last_time(m), m.stream))
    return {
        "time": now,
        "streams": [_stream(m, drawn=i < TIMELINES) for i, m in enumerate(found)],
        "samples": sum(m.position for m in found),
        "batches": sum(m.batches for m in found),
        "accepted": sum(m.accepted for m in found),
        "alarms": sum(len(m.active) for m in found),
        "texts": ALARMS,
    }


def render(data: Record, live: str | None = None) -> str:
    """Render the page; with `live`, the address of its data, it reloads them every few seconds.

    >>> render(from_monitors([]), live="monitor.json").startswith("<!DOCTYPE html>")
    True
    """
    template = files("caster.monitor").joinpath("page.html").read_text("utf-8")
    # "<" could close the element that contains the data
    embedded = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return template.replace("__LIVE__", json.dumps(live).replace("<", "\\u003c")).replace(
        "__DATA__", embedded
    )


def _stream(monitor: StreamMonitor, drawn: bool) -> Record:
    return {
        "name": monitor.stream,
        "samples": monitor.position,
        **{name: getattr(monitor, name) for name in COPIED},
        "reasons": dict(monitor.reasons.most_common()),
        "calibrated": monitor.calibrations is not None,
        "risk": _risk(monitor.risk),
        "labelled_risk": _risk(monitor.labelled_risk),
        "alarms": [asdict(alarm) for alarm in reversed(monitor.alarms)],
        "active": [alarm.kind for alarm in monitor.active],
        "time": _last_time(monitor),
        "points": list(monitor.points) if drawn else [],
    }


def _risk(test: RiskTest | None) -> Record | None:
    if test is None:
        return None
    found = {"mean": test.mean, "lower": test.lower, "limit": test.limit}
    return {**{name: round(value, 4) for name, value in found.items()}, "alarm": test.alarm}


def _last_time(monitor: StreamMonitor) -> float:
    return float(monitor.points[-1]["time"]) if monitor.points else 0.0
