"""The certificate of layer transport in a graph: `core.confidence`, `adapt.layer_certificate`.

Sums and norms are float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from caster.adapt.layer_certificate import ERROR_TOLERANCE, NORM
from caster.core.confidence import FLAT, TINY
from caster.core.verdict import Reason
from caster.export import graph_arrays as xp
from caster.export.graph_arrays import GraphArray
from caster.export.matrix_roots import scaled_roots
from caster.models.onnx.compiled import REASONS

CERTIFICATE = ("certificate", "certificate.rows", "certificate.count")  # tensors of the state
NOTHING = np.full((2, 3), np.nan)  # marks an empty window
MIN_SINGULAR = 1e-8  # smallest singular value that counts, relative to the Frobenius norm


# --- the verdict -------------------------------------------------------------------------------


def reason_code(reason: Reason) -> GraphArray:  # ()
    """Code of a verdict's reason, an index into `REASONS`."""
    return xp.constant(REASONS.index(reason))


def gating_ratio(
    errors: GraphArray,  # (), ratio of expected errors
    norms: GraphArray,  # (), ratio of nuclear norms
    is_source: GraphArray,  # (), whether aligned answers are shuffled with the source's mixture
    frozen_is_source: GraphArray,  # (), whether the frozen answers are
) -> GraphArray:  # ()
    """Choose the ratio that decides; both must agree if only the aligned answers look shuffled."""
    allowed = errors / ERROR_TOLERANCE
    both = xp.where(allowed > norms, allowed, norms)
    return xp.where(is_source, xp.where(frozen_is_source, norms, both), errors)


# --- confidence ----------------------------------------------------------------------------------


def confidence_stats(scores: GraphArray) -> GraphArray:  # (n, C) -> (3,)
    """Count, sum and sum of squares of a batch's confidences: `ConfidenceStats.of`."""
    wide = scores.astype(np.float64)
    p = 1.0 / xp.exp(wide - wide.max(1, keepdims=True)).sum(1)
    return xp.stack([xp.length(p).astype(np.float64), p.sum(), (p * p).sum()])


def at_most(stats: GraphArray, samples: GraphArray) -> GraphArray:  # (..., 3)
    """Scale sums down to a weight of at most this many samples."""
    count = stats[:, :1]
    return xp.minimum(samples / count, 1.0) * stats


def expected_error_ratio(after: GraphArray, before: GraphArray) -> GraphArray:  # (3,), (3,) -> ()
    """Expected error after an update, divided by that before it; infinite if that was 0."""
    new, old = (1.0 - stats[1] / stats[0] for stats in (after, before))
    return xp.where(old <= 0.0, math.inf, new / old)


def has_fallen(
    now: GraphArray,  # (3,)
    then: GraphArray,  # (3,)
    errors: float,
) -> GraphArray:  # ()
    """Whether mean confidence fell by more than `errors` standard errors, or is NaN."""
    mean = then[1] / then[0]
    deviation = xp.sqrt(xp.maximum(then[2] / then[0] - mean * mean, 0.0))
    standard_error = deviation * xp.sqrt(1.0 / now[0] + 1.0 / then[0])
    return ~(now[1] / now[0] >= mean - errors * standard_error)


def spread(logits: GraphArray) -> GraphArray:  # (n, C) float64 -> ()
    """Geometric mean, over samples, of the standard deviation of their logits."""
    centred = logits - logits.mean(1, keepdims=True)
    return xp.exp(xp.log(xp.maximum(xp.sqrt((centred * centred).mean(1)), FLAT)).mean())


def nuclear_norm(p: GraphArray, n_classes: int) -> GraphArray:  # (n, C) -> ()
    """Sum of singular values: the trace of the root of the smaller Gram matrix."""
    wide = p.astype(np.float64)
    wide = xp.where(wide < TINY, 0.0, wide)
    gram = xp.choose_one(
        xp.length(p) < n_classes,
        lambda: wide @ wide.transposed(1, 0),
        lambda: wide.transposed(1, 0) @ wide,
    )
    identity = xp.identity_like(gram)
    root, _, scale = scaled_roots(gram, identity, MIN_SINGULAR)
    return (scale * root * identity).sum()


# --- windows -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CertificateGraph:
    """`LayerCertificate` on arrays of a graph."""

    stats: GraphArray  # (2, 3), with aligned layers and frozen; NaN if there are none
    rows: GraphArray  # (2, window, C) float32 logits; the last `count` rows are valid
    count: GraphArray  # () int64
    window: int

    @property
    def parts(self) -> list[GraphArray]:
        """The state tensors, in the order of `initial_certificate`."""
        return [self.stats, self.rows, self.count]

    def update(self, aligned: GraphArray, frozen: GraphArray) -> tuple[Self, GraphArray]:
        """Add the scores of a batch; return the ratio of expected errors over the window."""
        new, old = xp.stack([confidence_stats(each) for each in (aligned, frozen)]), self.stats
        missing = self.window - xp.length(aligned).astype(np.float64)
        usable = ~xp.is_nan(old).any() & (missing > 0.0)
        new = xp.where(usable, new + at_most(old, missing), new)
        ratio = expected_error_ratio(new[0], new[1])
        stats = xp.where(xp.is_nan(ratio), NOTHING, new)
        return replace(self, stats=stats, count=xp.constant(0) + 0), ratio

    def update_shuffled(
        self, logits: GraphArray, frozen: GraphArray, correction: GraphArray
    ) -> tuple[Self, GraphArray, GraphArray]:
        """Add the logits of a shuffled batch; return the ratios of expected errors and norms."""
        n_classes = self.rows.shape[2]
        n = xp.length(logits)
        count = xp.minimum(self.count + n, xp.maximum(n, self.window))
        joined = xp.concat([self.rows, xp.stack([logits, frozen]).astype(np.float32)], axis=1)
        rows = joined[:, -count:]
        finite = xp.is_finite(rows)

        def ratios() -> list[GraphArray]:
            after, before = (rows[i].astype(np.float64) for i in range(2))
            after = spread(before) / spread(after) * after
            errors = expected_error_ratio(
                confidence_stats(after + correction), confidence_stats(before)
            )
            norms = [nuclear_norm(xp.softmax(each), n_classes) for each in (after, before)]
            return [errors, NORM * norms[1] / norms[0]]

        nothing = xp.constant(math.nan) + 0.0
        errors, norms = xp.choose(finite, ratios, lambda: [nothing, nothing + 0.0])
        count = xp.where(finite, xp.minimum(count, self.window), 0)
        rows = joined[:, -self.window :]
        known = replace(self, stats=xp.constant(NOTHING) + 0.0, rows=rows, count=count)
        return known, errors, norms

    def restart(self, restarts: GraphArray) -> Self:
        """Empty the window, if `restarts`."""
        return replace(
            self,
            stats=xp.where(restarts, NOTHING, self.stats),
            count=xp.where(restarts, 0, self.count),
        )


def initial_certificate(n_classes: int, window: int) -> dict[str, NDArray[Any]]:
    """The certificate's state before the first batch."""
    rows = np.zeros((2, window, n_classes), np.float32)
    return dict(zip(CERTIFICATE, (NOTHING, rows, np.array(0)), strict=True))


# --- schedule ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ScheduleGraph:
    """`ComparisonSchedule` on arrays of a graph."""

    state: GraphArray  # (4,) int64: last verdict; samples stable, compared and to skip
    every: int
    window: int

    @property
    def accepted(self) -> GraphArray:  # ()
        """The last verdict."""
        return self.state[0] > 0

    @property
    def skips(self) -> GraphArray:  # ()
        """Whether the next batch may keep the last verdict without a comparison."""
        return self.state[3] > 0

    def skipped(self, samples: GraphArray) -> Self:
        """Record a batch that was answered without comparison."""
        accepted, stable, compared, to_skip = (self.state[i] for i in range(4))
        return self._with(accepted, stable + samples, compared, to_skip - samples)

    def compared(self, samples: GraphArray, accepted: GraphArray, changed: GraphArray) -> Self:
        """Record the verdict of a comparison, which was early if outputs `changed`."""
        same = accepted.equals(self.accepted) & ~changed
        stable = xp.where(same, self.state[1], 0) + samples
        compared = xp.where(same, self.state[2], 0) + samples
        whole = compared >= self.window
        to_skip = xp.where(whole, xp.minimum(stable, (self.every - 1) * self.window), 0)
        return self._with(accepted.astype(np.int64), stable, xp.where(whole, 0, compared), to_skip)

    def _with(self, *parts: GraphArray) -> Self:
        return replace(self, state=xp.stack(parts))
