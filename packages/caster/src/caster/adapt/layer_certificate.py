"""The certificate of layer transport, and when it is measured.

Why it works. Good alignment makes a network more confident in every sample without giving all of
them one answer. On a shuffled stream one number measures both, the nuclear norm of the matrix of
probabilities (Cui et al. 2020): it is large if rows are confident *and* together use all classes,
as shuffled samples do. Its ratio to the frozen model's separates a helpful alignment from one that
collapses to few classes or loses information. Both models are compared at equal temperature:
alignment also rescales the logits, most in networks trained with mixup, and that says nothing
about the answers. On a correlated stream few classes are right and the norm says nothing;
there the error that the answers themselves expect is compared with the frozen model's.

Where it fails. Both measure confidence, not correctness: a network that is confidently and
diversely wrong after alignment is accepted. On a correlated stream, confidence comes from the
neighbours too, so predictions collapsed to one class pass for a run of it. Without labels no test
can exclude either (Ben-David et al. 2010); `Stream.feedback` can, with a few.
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

# The share of the frozen model's nuclear norm that suffices: on the spare corruptions with
# ResNet-18, 0.99 kept the whole gain on shuffled streams, and twice that tolerance is taken.
NORM = 0.98
# Largest ratio of expected errors where only aligned answers look shuffled: chosen on the spare
# corruptions with ResNet-18.
DOUBTED = 1.1
ERRORS = 3.0  # standard errors by which the confidence of a batch may fall by chance

Pair = tuple[ConfidenceStats, ConfidenceStats]  # with aligned layers, and frozen


class LayerCertificate:
    """Ratio that indicates whether aligned layers help, over the last samples of one stream.

    It covers the last `window` samples that were compared since the last skip: the newest batch
    and, if that is smaller, the ones before it. At most 1 is in favour of the alignment: the
    expected error with aligned layers over that without or, for a shuffled stream, the nuclear
    norms the other way round and times `NORM`, at equal temperature.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.reset()

    def reset(self) -> None:
        """Forget the stream."""
        self._recent: Pair | None = None
        self._settled: Pair | None = None  # the reference while comparisons are skipped
        self._rows = np.empty((2, 0, 0), np.float32)  # logits: aligned and frozen

    def update(self, aligned: Array, frozen: Array) -> float:  # (n, C), (n, C) -> ratio
        """Add the scores of a batch, and return the ratio of expected errors over the window."""
        new = ConfidenceStats.of(aligned), ConfidenceStats.of(frozen)
        missing = self.window - new[0].count
        if self._recent is not None and missing > 0:
            old = self._recent
            new = old[0].at_most(missing) + new[0], old[1].at_most(missing) + new[1]
        ratio = expected_error_ratio(*new)
        self._rows = self._rows[:, :0].copy()  # of another kind of stream
        self._recent = None if math.isnan(ratio) else new  # NaN would never leave the window
        return ratio

    def update_shuffled(
        self,
        logits: Array,  # (n, C), with aligned layers
        frozen: Array,  # (n, C)
        correction: NDArray[np.float64],  # (C,), what the stream's prior adds to aligned logits
    ) -> tuple[float, float]:
        """Add the logits of a shuffled batch; return the ratios of expected errors and of norms.

        Over the window, whose aligned logits are first made as spread as the frozen ones.
        """
        self._recent = None  # of another kind of stream
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
        with one_blas_thread():  # several wait for each other: a matrix of 256 rows is small
            norms = [nuclear_norm(np.asarray(probabilities(x))) for x in (after, before)]
        return errors, NORM * norms[1] / norms[0]

    def restart(self) -> None:
        """Empty the window."""
        self._recent = None
        self._rows = self._rows[:, :0].copy()

    def settle(self) -> None:
        """Make the window the reference for batches that are answered without a comparison."""
        self._settled = self._recent
        self.restart()

    def has_dropped(self, scores: Array, aligned: bool) -> bool:  # (n, C)
        """Whether a batch answered without a comparison is less confident than the reference."""
        if self._settled is None:
            return True
        reference = self._settled[0 if aligned else 1]
        return has_fallen(ConfidenceStats.of(scores), reference, ERRORS)

    def state(self) -> dict[str, NDArray[Any]]:
        """Everything it remembers; NaN for statistics it does not have."""
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
    """The ratio that decides, by whether aligned and frozen answers look shuffled.

    Alignment with the wrong mixture makes runs look shuffled and the norms large: where the frozen
    model sees other classes than the source's, both ratios must agree.

    >>> [gating_ratio(1.32, 0.9, True, frozen_is_source) for frozen_is_source in (True, False)]
    [0.9, 1.2]
    """
    if not is_source:
        return errors
    return norms if frozen_is_source else max(norms, errors / DOUBTED)


class ComparisonSchedule:
    """Skip the comparison with the frozen model while the verdict is stable.

    Once a whole `window` of samples got one verdict, that verdict stands without comparison for as
    many samples as it has stood so far, at most `every` - 1 windows; then a window is compared
    again. So a long stationary stream costs little more than one pass per batch, and a change that
    goes unnoticed is answered wrongly for no longer than the stream was answered rightly.

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
        self._stable = 0  # samples since it last changed
        self._compared = 0  # of those, compared since the last skip
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
        """Note a batch that was answered without comparison."""
        self._to_skip -= samples
        self._stable += samples

    def compared(self, samples: int, accepted: bool) -> bool:
        """Note the verdict of a comparison; return whether the next ones are skipped."""
        if accepted != self.accepted:
            self.accepted, self._stable, self._compared = accepted, 0, 0
        self._stable += samples
        self._compared += samples
        self._to_skip = 0
        if self._compared >= self.window:
            self._to_skip = min(self._stable, (self.every - 1) * self.window)
            self._compared = 0
        return self.skips

    def state(self) -> NDArray[np.int64]:  # (4,)
        """Everything it remembers."""
        return np.array([self.accepted, self._stable, self._compared, self._to_skip], np.int64)

    def resume(self, state: NDArray[Any]) -> None:
        """Continue from a `state`."""
        accepted, self._stable, self._compared, self._to_skip = map(int, state)
        self.accepted = bool(accepted)
