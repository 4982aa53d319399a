"""Summarise a batch for the log: verdict, classes, confidences and, once per window, drift."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.core import drift
from caster.core.adaptation import Adaptation, classes_of
from caster.core.arrays import as_real_array, to_numpy
from caster.core.class_prior import estimated_prior
from caster.core.discriminant import host_probabilities
from caster.core.linalg import Array
from caster.state import State

Record = dict[str, Any]  # a line of the log
Floats = NDArray[np.float64]

WINDOW = 256  # smallest number of samples that are compared with the source together
MAX_SAMPLES = 512  # samples of one large batch that are used
PAUSE = 768  # samples to skip after a window without drift: a comparison takes as long as a batch
LEVEL = 0.01  # p-value up to which a window has drifted
DIGITS = 6  # of a number in the log
PRIOR_WEIGHT = 1.0  # weight of the source's mixture in the estimate for a window, in samples


class Summarizer:
    """Build the log records of one stream; features are stored until a window is full."""

    def __init__(self, state: State | None) -> None:
        self._state = state
        self._sketch = None if state is None else state.sketch
        self._window: list[tuple[Floats, Floats]] = []  # projected features, probabilities
        self._pause = 0  # samples left to skip

    def record(self, out: Adaptation, *, position: int, time: float) -> Record:
        """Build the record of the next batch, which starts at this position of the stream."""
        verdict = out.verdict
        answers = classes_of(out.scores)
        classes, counts = np.unique(answers, return_counts=True)
        layers = out.map is None
        scores = {"frozen": out.frozen, "adapted": out.adapted}
        compared = out.adapted is not None and out.frozen is not None
        return {
            "kind": "batch",
            "time": time,
            "position": position,
            "samples": len(answers),
            "accepted": verdict.accepted,
            "reason": verdict.reason,
            "ratio": round(verdict.ratio, DIGITS) if math.isfinite(verdict.ratio) else None,
            "layers": layers,
            "changed": int(out.disputed.sum()) if compared else None,
            "implausible": out.implausible,
            "predicted": {
                str(c): n for c, n in zip(classes.tolist(), counts.tolist(), strict=True)
            },
            "confidence": {
                name: self._confidence(found, calibration_of(name, layers))
                for name, found in scores.items()
                if found is not None
            },
            "drift": self._drift(out, position),
        }

    def _confidence(self, scores: Array, calibration: str) -> list[float | None]:
        """Mean confidence, and the number of samples above the threshold of uncertainty."""
        uncertainty = 1 - _probabilities(scores).max(axis=1)
        mean = round(float(1 - uncertainty.mean()), DIGITS)
        if self._sketch is None:
            return [mean, None]
        threshold = self._sketch.calibrations[calibration].threshold
        return [mean, int((uncertainty.astype(np.float32) > np.float32(threshold)).sum())]

    def _drift(self, out: Adaptation, position: int) -> Record | None:
        """Distances of the window that this batch completes, if any."""
        if (
            self._sketch is None
            or self._state is None
            or out.features is None
            or out.frozen is None
        ):
            return None
        if position == 0:  # a new stream
            self._window.clear()
            self._pause = 0
        if self._pause > 0:
            self._pause -= len(out.features)
            return None
        features = to_numpy(as_real_array(out.features)).astype(np.float64)
        z = features[:MAX_SAMPLES] @ self._state.moments.U
        self._window.append((z, _probabilities(out.frozen)[:MAX_SAMPLES]))
        if sum(len(part) for part, _ in self._window) < WINDOW:
            return None
        z, p = (np.concatenate(parts) for parts in zip(*self._window, strict=True))
        self._window.clear()
        found = compare((z, p), self._state, np.random.default_rng(position))
        self._pause = 0 if min(found["p"], found["psi_p"]) <= LEVEL else PAUSE
        return found


def calibration_of(answer: str, layers: bool) -> str:
    """Name of the calibration for an answer: aligned layers use that of the frozen model.

    A fit runs no pass with aligned layers. Aligning the source with its own statistics would change
    nothing, so its answers are the frozen model's.
    """
    return "frozen" if layers else answer


def compare(window: tuple[Floats, Floats], state: State, rng: np.random.Generator) -> Record:
    """Compare a window of projected features and frozen probabilities with the state's sketch."""
    z, p = window
    sketch = state.sketch
    assert sketch is not None
    rounded = p.astype(np.float16).astype(np.float64)  # as in the sketch, so that ties match
    source = sketch.features.astype(np.float64), sketch.probabilities.astype(np.float64)
    pi = estimated_prior(p, state.moments.priors.astype(np.float64), PRIOR_WEIGHT)
    counts, source_counts = (
        np.bincount(found.argmax(axis=1), minlength=p.shape[1]) for found in (p, source[1])
    )
    psi, psi_p = drift.population_stability(counts, source_counts, rng)
    kernel = drift.gaussian_kernel(np.concatenate([z, source[0]]))
    whole = drift.distances((z, rounded), source, kernel, rng)
    given = drift.distances((z, rounded), source, kernel, rng, drift.Mixture(sketch.labels, pi))
    found = {
        "samples": len(z),
        **asdict(whole),
        "p": whole.p,
        "psi": psi,
        "psi_p": psi_p,
        "given_mixture": asdict(given) | {"p": given.p},
    }
    return _rounded(found)


def _rounded(found: Record) -> Record:
    return {
        name: _rounded(value) if isinstance(value, dict) else float(f"{value:.{DIGITS}g}")
        for name, value in found.items()
    }


def _probabilities(scores: Array) -> Floats:  # (n, C); uniform for scores that are not finite
    p = host_probabilities(scores)
    return np.where(np.isfinite(p).all(axis=1, keepdims=True), p, 1 / p.shape[1])
