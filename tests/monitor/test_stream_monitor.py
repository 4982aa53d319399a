"""Alarms and estimates of simulated streams, and snapshots of them."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from caster.core.betting import BettingTest
from caster.core.estimated_accuracy import Calibration
from caster.monitor.stream_metrics import metrics
from caster.monitor.stream_monitor import ALARMS, StreamMonitor
from caster.monitor.summary import Summarizer
from tests.support.monitored import FEW, PRIORS, adapter, draw

BATCH = 64


def monitor(state=None) -> StreamMonitor:
    state = state or adapter().state
    calibrations = None if state.sketch is None else state.sketch.calibrations
    return StreamMonitor("s", [str(c) for c in state.classes], calibrations)


def watched(*parts, seed=0, fitted=None) -> tuple[StreamMonitor, list[float]]:
    """A stream of parts (batches, priors, shift), and the accuracy of each part."""
    fitted = fitted or adapter()
    rng = np.random.default_rng(seed)
    found, summarizer, stream = monitor(fitted.state), Summarizer(fitted.state), fitted.new_stream()
    right: list[float] = []
    for count, priors, shift in parts:
        hits = []
        for _ in range(count):
            z, _, y = draw(rng, BATCH, priors, shift)
            found.update(summarizer.record(out := stream(z), position=found.position, time=0.0))
            hits.append((out.labels == y).mean())
        right.append(float(np.mean(hits)))
    return found, right


def kinds(found: StreamMonitor) -> list[str]:
    return [alarm.kind for alarm in found.active]


def test_a_stream_like_the_source_rings_nothing():
    found, (right,) = watched((60, PRIORS, 0.0))
    assert found.alarms == []
    assert found.batches == sum(found.reasons.values()) == 60
    assert found.drift["given_mixture"]["p"] > 0.01
    value, low, high, *_ = found.accuracy["served"]
    assert low <= right <= high
    assert value == pytest.approx(right, abs=0.05)
    assert found.risk.lower <= found.risk.mean < found.risk.limit


def test_other_classes_ring_one_alarm_and_end_it():
    found, _ = watched((16, PRIORS, 0.0), (20, FEW, 0.0))
    assert kinds(found) == ["classes"]
    assert found.cause == "classes"
    (alarm,) = found.alarms
    assert 16 * BATCH <= alarm.position < 36 * BATCH
    found, _ = watched((16, FEW, 0.0), (20, PRIORS, 0.0))
    assert kinds(found) == []
    assert [alarm.kind for alarm in found.alarms] == ["classes"]
    assert found.alarms[0].until >= 16 * BATCH


def test_other_images_ring_and_uncertain_answers_with_them():
    found, _ = watched((16, PRIORS, 0.0), (40, PRIORS, 2.5))
    assert "images" in kinds(found)
    assert "classes" not in kinds(found)
    assert found.accuracy["frozen"][0] < found.points[15]["accuracy"]["frozen"][0]


def record(position: int, above: int, samples: int = BATCH) -> dict:
    return {
        "kind": "batch", "time": 0.0, "position": position, "samples": samples, "accepted": True,
        "reason": "accepted", "ratio": 0.5, "layers": False, "changed": 0, "implausible": 0,
        "predicted": {"0": samples}, "confidence": {"adapted": [0.9, above]}, "drift": None,
    }  # fmt: skip


def labels(n: int, wrong: int, position="open") -> dict:
    test = {**asdict(BettingTest()), "position": position}
    betting = {name: test[name] for name in ("position", "phase", "wins", "losses", "alpha")}
    record = {"kind": "feedback", "time": 0.0, "position": 0, "labels": n, "wrong": wrong}
    return record | {"betting": betting}


def calibrated() -> StreamMonitor:
    calibration = Calibration(0.2, samples=500, errors=25, correct_above=10, confidence=0.95)
    return StreamMonitor("s", ["a"], {"frozen": calibration, "adapted": calibration})


def test_risk_rings_for_uncertain_answers_and_for_wrong_ones():
    found = calibrated()
    for i in range(40):
        found.update(record(i * BATCH, above=3))
        found.update(labels(8, 0))
    assert found.alarms == []
    for i in range(40, 60):
        found.update(record(i * BATCH, above=40))
    assert kinds(found) == ["risk"]
    for _ in range(20):
        found.update(labels(8, 6))
    assert kinds(found) == ["risk", "labelled_risk"]
    assert (found.labels, found.labelled_errors) == (480, 120)


def test_a_revoked_stream_rings_until_it_is_accepted_again():
    found = calibrated()
    for position, expected in (
        ("open", []), ("accepted", []), ("revoked", ["revoked"]), ("revoked", ["revoked"]),
        ("accepted", []), ("revoked", ["revoked"]),
    ):  # fmt: skip
        found.update(labels(1, 0, position))
        assert kinds(found) == expected
    assert len(found.alarms) == 2


def test_estimates_are_of_the_answers_served():
    found = calibrated()
    for i in range(4):
        line = record(i * BATCH, above=32)
        line["confidence"]["frozen"] = [0.99, 0]
        found.update(line | {"accepted": i >= 2})
    assert found.accuracy["frozen"][3] == 1.0
    assert found.accuracy["adapted"][3] == 0.5
    assert found.accuracy["served"][3] == 0.75  # half of the batches each


def test_a_snapshot_continues_exactly():
    parts = ((12, PRIORS, 0.0), (12, PRIORS, 2.5))
    whole, _ = watched(*parts)
    stored = json.dumps(whole.snapshot(), allow_nan=False)
    copy = monitor()
    copy.restore(json.loads(stored))
    assert json.dumps(copy.snapshot()) == stored
    for i in range(24, 40):
        for each in (whole, copy):
            each.update(record(i * BATCH, above=40))
    assert copy.snapshot() == whole.snapshot()


def test_without_a_sketch_there_are_verdicts_alone():
    found, _ = watched((6, PRIORS, 0.0), fitted=adapter(sketch=False))
    assert found.risk is found.drift is found.cause is None
    assert found.accuracy == {}
    assert found.batches == 6


def test_every_metric_is_well_formed():
    found, _ = watched((16, PRIORS, 0.0), (20, FEW, 0.0))
    other = calibrated()
    got = list(metrics([found, other, monitor(adapter(sketch=False).state)]))
    names = [metric.name for metric in got]
    assert names == sorted(names, key=names.index)  # samples of one metric follow each other
    assert len({(m.type, m.help) for m in got if m.name == "caster_stream_alarm"}) == 1
    assert {m.labels["kind"] for m in got if m.name == "caster_stream_alarm"} == set(ALARMS)
    first = list(metrics([found]))
    assert len({(m.name, tuple(sorted(m.labels.items()))) for m in first}) == len(first)
    values = {(m.name, m.labels.get("kind", "")): m.value for m in first}
    assert values["caster_stream_alarm", "classes"] == 1.0
    assert values["caster_stream_alarm", "images"] == 0.0
    assert values["caster_stream_samples_total", ""] == 36 * BATCH
    assert all(np.isfinite(m.value) and m.help.endswith(".") for m in got)
    assert all(m.type == ("counter" if m.name.endswith("_total") else "gauge") for m in got)
