"""The certificate of layer transport as a graph: `core.confidence` and `adapt.layer_certificate`.

Sums and norms are float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from caster.adapt.layer_certificate import ERROR_TOLERANCE, NORM
from caster.core.confidence import FLAT
from caster.core.verdict import Reason
from caster.export.graph_arrays import (
    GraphArray,
    choose,
    concat,
    constant,
    exp,
    identity_like,
    is_finite,
    is_nan,
    length,
    log,
    maximum,
    minimum,
    softmax,
    sqrt,
    stack,
    where,
)
from caster.export.matrix_roots import scaled_roots
from caster.models.onnx.compiled import REASONS

CERTIFICATE = ("certificate", "certificate.rows", "certificate.count")  # in a stream's state
NOTHING = np.full((2, 3), np.nan)  # sums of no samples
SMALLEST = 1e-8  # singular value, relative to the Frobenius norm, that the nuclear norm resolves


# --- the verdict -------------------------------------------------------------------------------


def reason_code(reason: Reason) -> GraphArray:  # ()
    """The number of a verdict's reason."""
    return constant(REASONS.index(reason))


def gating_ratio(
    errors: GraphArray,  # (), ratio of expected errors
    norms: GraphArray,  # (), ratio of nuclear norms
    is_source: GraphArray,  # (), whether the aligned answers are shuffled, in the source's mixture
    frozen_is_source: GraphArray,  # (), whether the frozen ones are
) -> GraphArray:  # ()
    """The ratio that decides: both must agree where only the aligned answers look shuffled."""
    allowed = errors / ERROR_TOLERANCE
    both = where(allowed > norms, allowed, norms)
    return where(is_source, where(frozen_is_source, norms, both), errors)


# --- confidence ----------------------------------------------------------------------------------


def confidence_stats(scores: GraphArray) -> GraphArray:  # (n, C) -> (3,)
    """Count, sum and sum of squares of a batch's confidences: `ConfidenceStats.of`."""
    wide = scores.astype(np.float64)
    p = 1.0 / exp(wide - wide.max(1, keepdims=True)).sum(1)
    return stack([length(p).astype(np.float64), p.sum(), (p * p).sum()])


def at_most(stats: GraphArray, samples: GraphArray) -> GraphArray:  # (..., 3)
    """Cap the weight of sums at a number of samples."""
    count = stats[:, :1]
    return minimum(samples / count, 1.0) * stats


def expected_error_ratio(after: GraphArray, before: GraphArray) -> GraphArray:  # (3,), (3,) -> ()
    """Expected error after an update over that before it; infinite if that was 0."""
    new, old = (1.0 - stats[1] / stats[0] for stats in (after, before))
    return where(old <= 0.0, constant(math.inf), new / old)


def has_fallen(
    now: GraphArray,  # (3,)
    then: GraphArray,  # (3,)
    errors: float,
) -> GraphArray:  # ()
    """Whether mean confidence fell by more than so many standard errors, or is NaN."""
    mean = then[1] / then[0]
    deviation = sqrt(maximum(then[2] / then[0] - mean * mean, 0.0))
    standard_error = deviation * sqrt(1.0 / now[0] + 1.0 / then[0])
    return ~(now[1] / now[0] >= mean - errors * standard_error)


def spread(logits: GraphArray) -> GraphArray:  # (n, C) float64 -> ()
    """Standard deviation of a sample's logits, as a geometric mean over samples."""
    centred = logits - logits.mean(1, keepdims=True)
    return exp(log(maximum(sqrt((centred * centred).mean(1)), FLAT)).mean())


def nuclear_norm(p: GraphArray, n_classes: int) -> GraphArray:  # (n, C) -> ()
    """Sum of the singular values: the trace of the root of the smaller Gram matrix."""
    wide = p.astype(np.float64)
    (gram,) = choose(
        length(p) < n_classes,
        lambda: [wide @ wide.transposed(1, 0)],
        lambda: [wide.transposed(1, 0) @ wide],
    )
    return trace_of_root(gram)


def trace_of_root(gram: GraphArray) -> GraphArray:  # (k, k) -> ()
    """Trace of the symmetric root of a semidefinite matrix."""
    identity = identity_like(gram)
    root, _, scale = scaled_roots(gram, identity, SMALLEST)
    return (scale * root * identity).sum()


# --- windows -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CertificateGraph:
    """`LayerCertificate` on arrays of a graph."""

    stats: GraphArray  # (2, 3), with aligned layers and frozen; NaN: none
    rows: GraphArray  # (2, window, C) float32 logits, of which the last `count` rows are known
    count: GraphArray  # () int64
    window: int

    @property
    def parts(self) -> list[GraphArray]:
        """What a stream remembers of it, as `initial_certificate` names it."""
        return [self.stats, self.rows, self.count]

    def update(self, aligned: GraphArray, frozen: GraphArray) -> tuple[Self, GraphArray]:
        """Add the scores of a batch, and return the ratio of expected errors over the window."""
        new, old = stack([confidence_stats(each) for each in (aligned, frozen)]), self.stats
        missing = self.window - length(aligned).astype(np.float64)
        usable = ~is_nan(old).any() & (missing > 0.0)
        new = where(usable, new + at_most(old, missing), new)
        ratio = expected_error_ratio(new[0], new[1])
        stats = where(is_nan(ratio), constant(NOTHING), new)
        return replace(self, stats=stats, count=constant(0) + 0), ratio

    def update_shuffled(
        self, logits: GraphArray, frozen: GraphArray, correction: GraphArray
    ) -> tuple[Self, GraphArray, GraphArray]:
        """Add the logits of a shuffled batch; return the ratios of expected errors and of norms."""
        n_classes = self.rows.shape[2]
        n = length(logits)
        count = minimum(self.count + n, maximum(n, self.window))
        joined = concat([self.rows, stack([logits, frozen]).astype(np.float32)], axis=1)
        rows = joined[:, -count:]
        finite = is_finite(rows)

        def ratios() -> list[GraphArray]:
            after, before = (rows[i].astype(np.float64) for i in range(2))
            after = spread(before) / spread(after) * after
            errors = expected_error_ratio(
                confidence_stats(after + correction), confidence_stats(before)
            )
            norms = [nuclear_norm(softmax(each), n_classes) for each in (after, before)]
            return [errors, NORM * norms[1] / norms[0]]

        nothing = constant(math.nan) + 0.0
        errors, norms = choose(finite, ratios, lambda: [nothing, nothing + 0.0])
        count = where(finite, minimum(count, self.window), 0)
        rows = joined[:, -self.window :]
        known = replace(self, stats=constant(NOTHING) + 0.0, rows=rows, count=count)
        return known, errors, norms

    def restart(self, restarts: GraphArray) -> Self:
        """Empty the window, if `restarts`."""
        return replace(
            self,
            stats=where(restarts, constant(NOTHING), self.stats),
            count=where(restarts, constant(0), self.count),
        )


def initial_certificate(n_classes: int, window: int) -> dict[str, NDArray[Any]]:
    """What a stream remembers before its first batch."""
    rows = np.zeros((2, window, n_classes), np.float32)
    return dict(zip(CERTIFICATE, (NOTHING, rows, np.array(0)), strict=True))


# --- schedule ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ScheduleGraph:
    """`ComparisonSchedule` on an array of a graph."""

    state: GraphArray  # (4,) int64: accepted, stable, compared, to skip
    every: int
    window: int

    @property
    def accepted(self) -> GraphArray:  # ()
        """The last verdict."""
        return self.state[0] > 0

    @property
    def skips(self) -> GraphArray:  # ()
        """Whether the next batch may be answered as the last one was."""
        return self.state[3] > 0

    def skipped(self, samples: GraphArray) -> Self:
        """Note a batch that was answered without comparison."""
        accepted, stable, compared, to_skip = (self.state[i] for i in range(4))
        return self._with(accepted, stable + samples, compared, to_skip - samples)

    def compared(self, samples: GraphArray, accepted: GraphArray) -> Self:
        """Note the verdict of a comparison."""
        same = accepted.equals(self.accepted)
        stable = where(same, self.state[1], 0) + samples
        compared = where(same, self.state[2], 0) + samples
        whole = compared >= self.window
        to_skip = where(whole, minimum(stable, (self.every - 1) * self.window), 0)
        return self._with(
            accepted.astype(np.int64), stable, where(whole, constant(0), compared), to_skip
        )

    def _with(self, *parts: GraphArray) -> Self:
        return replace(self, state=stack(parts))
