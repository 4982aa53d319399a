"""Whether a resting stream still looks as it did, as a graph: `adapt.output_monitor`.

Sums and moments are float64.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from caster.adapt.output_monitor import BLOCK, ERRORS, FEWEST, LEAST, MEMORY
from caster.export import moment_graph
from caster.export.certificate_graph import at_most, confidence_stats, has_fallen
from caster.export.graph_arrays import (
    GraphArray,
    choose,
    concat,
    constant,
    is_finite,
    length,
    maximum,
    minimum,
    sqrt,
    stack,
    where,
)


@dataclass(frozen=True, eq=False)
class MonitorGraph:
    """`OutputMonitor` on arrays of a graph; zeros know nothing."""

    distances: GraphArray  # (3,): blocks, and sums of their distances and squares of them
    repeats: GraphArray  # (2,): pairs of neighbours, and those with the same answer
    confidence: GraphArray  # (3,), sums as of `confidence_stats`
    moments: GraphArray  # (2, d), of features
    count: GraphArray  # (), samples behind them
    features: GraphArray  # (BLOCK - 1, d) float32, of which the last `pending` rows wait
    scores: GraphArray  # (BLOCK - 1, C) float32, the same
    pending: GraphArray  # () int64

    def parts(self) -> dict[str, GraphArray]:
        """All of it, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def is_ready(self) -> GraphArray:  # ()
        """Whether enough is known to judge by."""
        return self.distances[0] >= float(FEWEST)

    def reset(self, resets: GraphArray) -> Self:
        """Forget the stream, if `resets`."""
        return replace(self, **{n: where(~resets, each, 0) for n, each in self.parts().items()})

    def begin(self, begins: GraphArray) -> Self:
        """Forget samples that do not fill a block yet, if `begins`."""
        return replace(self, pending=where(begins, constant(0), self.pending))

    def wait(self, features: GraphArray, scores: GraphArray) -> Self:  # (n, d), (n, C)
        """Let a batch wait, unless it fills a block with those that wait."""
        total = self.pending + length(scores)
        return replace(
            self,
            features=concat([self.features, features])[1 - BLOCK :],
            scores=concat([self.scores, scores])[1 - BLOCK :],
            pending=where(total < BLOCK, total, 0),
        )

    def learn(self, features: GraphArray, scores: GraphArray) -> Self:  # (n, d), (n, C)
        """Add a batch to what the stream is like."""
        names = ("distances", "repeats", "confidence", "moments", "count")
        before = [getattr(self, name) for name in names]

        def learnt() -> list[GraphArray]:
            n, wide, sure, repeats, distance = self._block(features, scores)
            f = distance / (1.0 / n + 1.0 / self.count)
            one = constant(1.0)
            known = self.count >= MEMORY / 2
            mean = wide.mean(0)
            step = wide - mean
            kept = where(n < float(MEMORY), minimum(self.count, MEMORY - n), 0.0)
            found = [
                where(known, self.distances + stack([one, f, f * f]), self.distances),
                self.repeats + stack([n - 1.0, repeats]),
                where(
                    self.count > 0.0,
                    at_most(self.confidence.reshape(1, 3), constant(float(MEMORY))).reshape(3)
                    + sure,
                    sure,
                ),
                moment_graph.merged(
                    self.moments, stack([mean, (step * step).mean(0)]), n / (kept + n)
                ),
                kept + n,
            ]
            finite = is_finite(sure[1] + distance)
            return [where(finite, new, old) for new, old in zip(found, before, strict=True)]

        after = choose(self._fills(scores), learnt, lambda: before)
        return replace(self.wait(features, scores), **dict(zip(names, after, strict=True)))

    def is_usual(self, features: GraphArray, scores: GraphArray) -> GraphArray:  # (n, d), (n, C)
        """Whether nothing has changed; if a batch fills no block, whether it is finite."""

        def judged() -> list[GraphArray]:
            n, _, sure, repeats, distance = self._block(features, scores)
            blocks, sum_1, sum_2 = (self.distances[i] for i in range(3))
            mean = sum_1 / blocks
            deviation = maximum(sqrt(maximum(sum_2 / blocks - mean * mean, 0.0)), LEAST)
            near = distance / (1.0 / n + 1.0 / self.count) <= mean + ERRORS * deviation
            pairs, equal = self.repeats[0], self.repeats[1]
            expected = (n - 1.0) * (equal + 1.0) / (pairs + 2.0)
            varied = repeats <= expected + ERRORS * sqrt(expected) + 1.0
            return [~has_fallen(sure, self.confidence, ERRORS) & near & varied]

        (usual,) = choose(self._fills(scores), judged, lambda: [is_finite(scores)])
        return usual

    def _fills(self, scores: GraphArray) -> GraphArray:  # ()
        return self.pending + length(scores) >= BLOCK

    def _block(
        self, features: GraphArray, scores: GraphArray
    ) -> tuple[GraphArray, GraphArray, GraphArray, GraphArray, GraphArray]:
        """A batch with the samples that wait: their number, and features in float64 (n, d).

        Then sums of confidences (3,), equal neighbours, and the distance from the reference.
        """
        total = self.pending + length(scores)
        wide = concat([self.features, features])[-total:].astype(np.float64)
        joined = concat([self.scores, scores])[-total:]
        answers = joined.argmax(1)
        equal = answers[1:].equals(answers[:-1]).astype(np.float64)
        variance = self.moments[1]
        varies = variance > 0.0
        step = wide.mean(0) - self.moments[0]
        each = where(varies, step * step / where(varies, variance, 1.0), 0.0)
        distance = where(self.count > 0.0, each.mean(), 0.0)
        return total.astype(np.float64), wide, confidence_stats(joined), equal.sum(), distance


def initial_monitor(width: int, n_classes: int) -> dict[str, NDArray[Any]]:
    """What it knows before the first batch, of so many features and classes."""
    return {
        "distances": np.zeros(3),
        "repeats": np.zeros(2),
        "confidence": np.zeros(3),
        "moments": np.zeros((2, width)),
        "count": np.array(0.0),
        "features": np.zeros((BLOCK - 1, width), np.float32),
        "scores": np.zeros((BLOCK - 1, n_classes), np.float32),
        "pending": np.array(0),
    }
