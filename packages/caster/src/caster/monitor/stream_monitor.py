"""Monitor of a stream, from the records of its log: totals, tests, estimates and alarms."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from caster.core.betting import ALPHA
from caster.core.estimated_accuracy import Calibration, estimate
from caster.core.risk import RiskTest, upper_bound
from caster.monitor.summary import LEVEL, Record, calibration_of
from caster.state import Sketch

TOLERANCE = 0.05  # by which a risk may exceed the source's
CONSECUTIVE = 2  # windows with drift that raise an alarm
RECENT = 512  # samples in an estimate of accuracy
POINTS = 240  # batches in the timeline
MAX_ALARMS = 100  # older ones are dropped
SOURCE_BOUNDS = 3  # upper bounds on the source that the limit without labels combines
STORED = (  # attributes that a snapshot stores unchanged
    *("position", "batches", "accepted", "repeated", "labels", "labelled_errors"),
    *("betting", "drift"),
)

ALARMS = {  # meaning, and what to do
    "images": (
        "Images look different from the source, whatever their classes.",
        "Check the camera and the preprocessing; label some samples to see whether answers suffer.",
    ),
    "classes": (
        "The class mix differs from the source; the images themselves look the same.",
        "Expected? Then do nothing: feature transport rejects such batches by itself.",
    ),
    "risk": (
        "More answers are uncertain than the source's errors and the tolerance explain.",
        "Label some samples: this alarm has none, and cannot tell doubt from error.",
    ),
    "labelled_risk": (
        "Labels show more errors than on the source, by more than the tolerance.",
        "Stop relying on the answers; find the cause, then fit again or retrain.",
    ),
    "revoked": (
        "Labels show that adapted answers are worse than the frozen model's.",
        "The frozen model answers now; evaluate adaptation on labelled data of this kind.",
    ),
}


@dataclass
class Alarm:
    """An alarm, with the positions of its start and end."""

    kind: str
    position: int
    time: float
    until: int | None = None  # None: still active


def limits(
    calibrations: Mapping[str, Calibration], tolerance: float, alpha: float
) -> tuple[float, float]:
    """Largest risks without an alarm: of uncertain answers, and of labelled errors.

    An answer above the threshold of uncertainty is either wrong, or correct but uncertain. If the
    latter are no more frequent than on the source, a rate above the first limit means that the
    error rate exceeds the source's by more than the tolerance (Schirmer et al. 2025). Either limit
    is too low with probability at most alpha / 2.

    >>> calibration = Calibration(0.1, samples=512, errors=26, correct_above=10, confidence=0.95)
    >>> both = {"frozen": calibration, "adapted": calibration}
    >>> [round(limit, 3) for limit in limits(both, tolerance=0.05, alpha=0.05)]
    [0.168, 0.124]
    """
    source, level = calibrations["frozen"], alpha / (2 * SOURCE_BOUNDS)
    uncertain = max(upper_bound(c.correct_above, c.samples, level) for c in calibrations.values())
    return (
        upper_bound(source.errors, source.samples, level) + uncertain + tolerance,
        upper_bound(source.errors, source.samples, alpha / 2) + tolerance,
    )


class StreamMonitor:
    """Totals, tests and a timeline of the last batches of one stream; `update` adds a record.

    Drift, risk and estimated accuracy need a sketch of the source.
    """

    def __init__(
        self,
        stream: str,
        classes: list[str],
        calibrations: Mapping[str, Calibration] | None,
        tolerance: float = TOLERANCE,
        alpha: float = ALPHA,
    ) -> None:
        self.stream, self.classes, self.calibrations = stream, classes, calibrations
        self.tolerance, self.alpha = tolerance, alpha
        self._start()

    def _start(self) -> None:
        self.position = 0  # samples of the stream
        self.batches = self.accepted = self.repeated = 0
        self.reasons: Counter[str] = Counter()
        self.labels = self.labelled_errors = 0
        self.betting: Record | None = None
        self.drift: Record | None = None  # of the last window
        self.points: deque[Record] = deque(maxlen=POINTS)
        self.alarms: list[Alarm] = []
        self._streaks = dict.fromkeys(("images", "classes"), 0)
        self.risk = self.labelled_risk = None
        if self.calibrations is not None:
            both = limits(self.calibrations, self.tolerance, self.alpha)
            self.risk, self.labelled_risk = (RiskTest(limit, self.alpha / 2) for limit in both)

    def update(self, record: Record) -> None:
        """Add a record of the log.

        Position 0 starts a new stream. A batch before the current position was answered again after
        a restart: it is counted as repeated, and nothing else changes.
        """
        if record["kind"] == "feedback":
            self._learn(record)
            return
        if record["position"] == 0:
            self._start()
        if record["position"] < self.position:
            self.repeated += 1
            return
        self.position = record["position"] + record["samples"]
        self.batches += 1
        self.accepted += record["accepted"]
        self.reasons[record["reason"]] += 1
        self._judge_drift(record)
        self._judge_risk(record)
        kept = {name: value for name, value in record.items() if name != "kind"}
        self.points.append(kept)
        kept["accuracy"] = self._estimates()
        if self.risk is not None:
            kept["risk"] = [round(self.risk.mean, 4), round(self.risk.lower, 4)]

    @property
    def active(self) -> list[Alarm]:
        """Alarms that are still active."""
        return [alarm for alarm in self.alarms if alarm.until is None]

    @property
    def acceptance(self) -> float | None:
        """Fraction of accepted batches in the timeline."""
        return sum(p["accepted"] for p in self.points) / len(self.points) if self.points else None

    @property
    def ratio(self) -> float | None:
        """Last measured certificate."""
        return next((p["ratio"] for p in reversed(self.points) if p["ratio"] is not None), None)

    @property
    def accuracy(self) -> Record:
        """Estimates for the last samples, for frozen, adapted and served answers."""
        return self.points[-1]["accuracy"] if self.points else {}

    @property
    def cause(self) -> str | None:
        """Cause of drift in the last window: "images", "classes" or None.

        Images come first, because images that look different also change the predicted classes.
        """
        if self.drift is None:
            return None
        if self.drift["given_mixture"]["p"] <= LEVEL:
            return "images"
        return "classes" if self.drift["psi_p"] <= LEVEL else None

    def _judge_drift(self, record: Record) -> None:
        found = record["drift"]
        if found is None:
            return
        self.drift = found
        for kind in self._streaks:
            seen = kind == self.cause
            self._streaks[kind] = self._streaks[kind] + 1 if seen else 0
            if self._streaks[kind] == CONSECUTIVE:
                self._raise_alarm(kind, record)
            elif not seen:
                self._clear_alarm(kind, record)

    def _judge_risk(self, record: Record) -> None:
        confidence = record["confidence"].get(_served(record))
        if self.risk is not None and confidence is not None and confidence[1] is not None:
            before, self.risk = self.risk, self.risk.after(record["samples"], confidence[1])
            if self.risk.alarm and not before.alarm:
                self._raise_alarm("risk", record)

    def _learn(self, record: Record) -> None:
        self.labels += record["labels"]
        self.labelled_errors += record["wrong"]
        revoked = self.betting is not None and self.betting["position"] == "revoked"
        self.betting = record["betting"]
        if self.betting["position"] == "revoked" and not revoked:
            self._raise_alarm("revoked", record)
        elif self.betting["position"] != "revoked":
            self._clear_alarm("revoked", record)
        if self.labelled_risk is not None:
            before = self.labelled_risk
            self.labelled_risk = before.after(record["labels"], record["wrong"])
            if self.labelled_risk.alarm and not before.alarm:
                self._raise_alarm("labelled_risk", record)

    def _raise_alarm(self, kind: str, record: Record) -> None:
        self.alarms.append(Alarm(kind, record["position"], record["time"]))
        del self.alarms[:-MAX_ALARMS]

    def _clear_alarm(self, kind: str, record: Record) -> None:
        for alarm in self.active:
            if alarm.kind == kind:
                alarm.until = record["position"]

    def _estimates(self) -> Record:
        """For every kind of answer: the estimate, its interval, and its two components."""
        if self.calibrations is None:
            return {}
        found = {name: self._estimate(name, served=False) for name in self.calibrations}
        parts = [part for name in self.calibrations if (part := self._estimate(name, served=True))]
        total = sum(samples for samples, _ in parts)
        served = [sum(n * values[i] for n, values in parts) / total for i in range(5) if parts]
        shown = {name: part[1] for name, part in found.items() if part} | {"served": served}
        return {name: [round(v, 4) for v in values] for name, values in shown.items() if values}

    def _estimate(self, name: str, served: bool) -> tuple[int, list[float]] | None:
        """Samples and estimates of the last batches with this answer, or served with it."""
        assert self.calibrations is not None
        samples = above = seen = 0
        total, layers = 0.0, False
        for point in reversed(self.points):
            if seen >= RECENT:
                break
            seen += point["samples"]
            confidence = point["confidence"].get(name)
            if confidence is None or (served and _served(point) != name):
                continue
            layers = point["layers"]
            samples += point["samples"]
            total += point["samples"] * confidence[0]
            above += confidence[1]
        if samples == 0:
            return None
        calibration = self.calibrations[calibration_of(name, layers)]
        e = estimate(calibration, samples, above, total / samples)
        return samples, [e.value, e.low, e.high, e.atc, e.doc]

    # --- a snapshot, which begins every segment of the log ---------------------------------------

    def snapshot(self) -> Record:
        """The whole state as JSON."""
        return {
            **{name: getattr(self, name) for name in STORED},
            "reasons": dict(self.reasons),
            "points": list(self.points),
            "alarms": [asdict(alarm) for alarm in self.alarms],
            "streaks": self._streaks,
            **{name: _plain(getattr(self, name)) for name in ("risk", "labelled_risk")},
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Continue from a `snapshot`."""
        for name in STORED:
            setattr(self, name, snapshot[name])
        self.reasons = Counter(snapshot["reasons"])
        self.points.extend(snapshot["points"])
        self.alarms = [Alarm(**alarm) for alarm in snapshot["alarms"]]
        self._streaks = dict(snapshot["streaks"])
        for name in ("risk", "labelled_risk"):
            test, stored = getattr(self, name), snapshot[name]
            if test is not None and stored is not None:
                bets = tuple(-math.inf if bet is None else bet for bet in stored["bets"])
                setattr(self, name, replace(test, **{**stored, "bets": bets}))


def calibrations_of(sketch: Sketch | None) -> dict[str, Record] | None:
    """Calibrations of a sketch as JSON."""
    if sketch is None:
        return None
    return {name: asdict(found) for name, found in sketch.calibrations.items()}


def _served(record: Record) -> str:
    return "adapted" if record["accepted"] else "frozen"


def _plain(test: RiskTest | None) -> Record | None:
    if test is None:
        return None
    finite = [bet if math.isfinite(bet) else None for bet in test.bets]
    return {**asdict(test), "bets": finite}
