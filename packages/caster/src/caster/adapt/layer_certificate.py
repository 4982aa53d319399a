"""The certificate of layer transport, and the schedule of its comparisons.

Why it works: good alignment makes a network more confident in its samples without predicting one
class for all of them. On a shuffled stream, the nuclear norm of the probability matrix measures
both (Cui et al. 2020): it is large if rows are confident *and* together use all classes, as
shuffled samples do. Its ratio to the frozen model's separates a helpful alignment from one that
collapses to few classes or loses information. Both models are compared at equal temperature,
because alignment also rescales the logits, most in networks trained with mixup, which says nothing
about accuracy. A correlated stream holds few classes at a time, so the norm is uninformative; the
certificate then compares expected errors, one minus the mean confidence.

Where it fails: both measure confidence, not correctness. A network that is confidently and
diversely wrong after alignment is accepted. On a correlated stream, confidence also comes from
neighbours, so predictions collapsed to one class look like a run of it. Without labels no test can
exclude either (Ben-David et al. 2010); `Stream.feedback` can, with a few.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.core.arrays import as_real_array, to_numpy
from caster.core.confidence import (
    ConfidenceStats,
    expected_error_ratio,
    has_fallen,
    nuclear_norm,
    spread,
)
from caster.core.discriminant import probabilities
from caster.core.linalg import Array
from caster.core.threads import one_blas_thread

# Fraction of the frozen model's nuclear norm that is enough: on the spare corruptions with
# ResNet-18, 0.99 kept the whole gain on shuffled streams; this allows twice that tolerance.
NORM = 0.98
# Largest ratio of expected errors if only the aligned predictions look shuffled: chosen on the
# spare corruptions with ResNet-18.
ERROR_TOLERANCE = 1.1
ERRORS = 3.0  # standard errors by which the mean confidence of a batch may fall by chance

Pair = tuple[ConfidenceStats, ConfidenceStats]  # with aligned layers, and frozen


class LayerCertificate:
    """Compare aligned with frozen predictions over a sliding window of one stream.

    The window holds the last `window` samples compared since the last skip: the newest batch and,
    if that is smaller, earlier ones. A ratio of at most 1 favours the alignment. It is the expected
    error with aligned layers over the frozen model's or, for a shuffled stream, the frozen nuclear
    norm over the aligned one at equal temperature, times `NORM`.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.reset()

    def reset(self) -> None:
        """Forget the stream."""
        self._recent: Pair | None = None
        self._settled: Pair | None = None  # reference while comparisons are skipped
        self._rows = np.empty((2, 0, 0), np.float32)  # logits: aligned and frozen

    def update(self, aligned: Array, frozen: Array) -> float:  # (n, C), (n, C) -> ratio
        """Add a batch of scores, and return the ratio of expected errors over the window."""
        new = ConfidenceStats.of(aligned), ConfidenceStats.of(frozen)
        missing = self.window - new[0].count
        if self._recent is not None and missing > 0:
            old = self._recent
            new = old[0].at_most(missing) + new[0], old[1].at_most(missing) + new[1]
        ratio = expected_error_ratio(*new)
        self._rows = self._rows[:, :0].copy()  # they belong to a shuffled stream
        self._recent = None if math.isnan(ratio) else new  # NaN would never leave the window
        return ratio

    def update_shuffled(
        self,
        logits: Array,  # (n, C), with aligned layers
        frozen: Array,  # (n, C)
        correction: NDArray[np.float64],  # (C,), log prior ratio, added to aligned logits
    ) -> tuple[float, float]:
        """Add a shuffled batch of logits; return the ratios of expected errors and of norms.

        Both cover the window, after aligned logits are rescaled to the spread of the frozen ones.
        """
        self._recent = None  # it belongs to a correlated stream
        rows = np.stack([to_numpy(as_real_array(x)).astype(np.float32) for x in (logits, frozen)])
        if self._rows.shape[2] == rows.shape[2]:
            rows = np.concatenate([self._rows, rows], axis=1)
        self._rows = rows[:, -max(self.window, len(logits)) :].copy()  # contiguous, to be saved
        if not np.isfinite(self._rows).all():  # NaN would never leave the window
            self._rows = self._rows[:, :0].copy()
            return math.nan, math.nan
        after, before = self._rows.astype(np.float64)
        after *= spread(before) / spread(after)
        errors = expected_error_ratio(
            ConfidenceStats.of(after + correction), ConfidenceStats.of(before)
        )
        with one_blas_thread():  # 256 rows are too few for several threads
            norms = [nuclear_norm(np.asarray(probabilities(x))) for x in (after, before)]
        return errors, NORM * norms[1] / norms[0]

    def restart(self) -> None:
        """Empty the window."""
        self._recent = None
        self._rows = self._rows[:, :0].copy()

    def settle(self) -> None:
        """Make the window the reference for batches without a comparison."""
        self._settled = self._recent
        self.restart()

    def has_dropped(self, scores: Array, aligned: bool) -> bool:  # (n, C)
        """Whether the mean confidence of a batch is below the reference."""
        if self._settled is None:
            return True
        reference = self._settled[0 if aligned else 1]
        return has_fallen(ConfidenceStats.of(scores), reference, ERRORS)

    def state(self) -> dict[str, NDArray[Any]]:
        """The memory as named arrays; NaN for missing statistics."""
        found = np.full((2, 2, 3), np.nan)
        for row, pair in zip(found, (self._recent, self._settled), strict=True):
            for part, stats in zip(row, pair or (), strict=False):
                part[:] = stats.count, stats.total, stats.squares
        return {"certificate": found, "certificate.rows": self._rows}

    def resume(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a `state`."""
        self._recent, self._settled = map(_pair, state["certificate"])
        rows = np.asarray(state["certificate.rows"], np.float32)
        if rows.ndim != 3 or len(rows) != 2 or not np.isfinite(rows).all():
            raise ValueError("impossible logits")
        self._rows = rows


def _pair(rows: NDArray[Any]) -> Pair | None:  # (2, 3)
    if np.isnan(rows).any():
        return None
    aligned, frozen = (ConfidenceStats(*row) for row in rows.tolist())
    return aligned, frozen


def gating_ratio(errors: float, norms: float, is_source: bool, frozen_is_source: bool) -> float:
    """Combine both ratios, by whether aligned and frozen predictions look like the source.

    Alignment with the wrong mixture makes runs look shuffled and the nuclear norm large. So if the
    frozen predictions do not look shuffled with the source's classes, both ratios must accept.

    >>> [gating_ratio(1.32, 0.9, True, frozen_is_source) for frozen_is_source in (True, False)]
    [0.9, 1.2]
    """
    if not is_source:
        return errors
    return norms if frozen_is_source else max(norms, errors / ERROR_TOLERANCE)


class ComparisonSchedule:
    """Skip the comparison with the frozen model while the verdict is stable.

    Once a whole `window` of samples has one verdict, comparisons are skipped for as many samples as
    that verdict has lasted, at most `every` - 1 windows; then a window is compared again. So a long
    stationary stream costs little more than one pass per batch, and an undetected change lasts no
    longer than the stable part of the stream before it.

    >>> schedule = ComparisonSchedule(every=8, window=64)
    >>> [schedule.compared(32, True) for _ in range(2)]
    [False, True]
    >>> schedule.skipped(32), schedule.skips, schedule.skipped(32), schedule.skips
    (None, True, None, False)
    """

    def __init__(self, every: int, window: int) -> None:
        self.every = every
        self.window = window
        self.reset()

    def reset(self) -> None:
        """Forget the stream."""
        self.accepted = False  # the last verdict
        self._stable = 0  # samples since it or the outputs last changed
        self._compared = 0  # of these, compared since the last skip
        self._to_skip = 0  # samples

    @property
    def left(self) -> int:
        """Samples that may still be answered without comparison."""
        return self._to_skip

    @property
    def skips(self) -> bool:
        """Whether the next batch may be answered as the last one was."""
        return self._to_skip > 0

    def skipped(self, samples: int) -> None:
        """Count a batch that was answered without comparison."""
        self._to_skip -= samples
        self._stable += samples

    def compared(self, samples: int, accepted: bool, changed: bool = False) -> bool:
        """Count a compared batch; return whether the next comparison is skipped.

        If outputs `changed`, the comparison came early, and the stable part starts with this batch.
        """
        if changed or accepted != self.accepted:
            self.accepted, self._stable, self._compared = accepted, 0, 0
        self._stable += samples
        self._compared += samples
        self._to_skip = 0
        if self._compared >= self.window:
            self._to_skip = min(self._stable, (self.every - 1) * self.window)
            self._compared = 0
        return self.skips

    def state(self) -> NDArray[np.int64]:  # (4,)
        """The memory as an array."""
        return np.array([self.accepted, self._stable, self._compared, self._to_skip], np.int64)

    def resume(self, state: NDArray[Any]) -> None:
        """Continue from a `state`."""
        accepted, self._stable, self._compared, self._to_skip = map(int, state)
        self.accepted = bool(accepted)
