"""Monitor the outputs of a resting stream in a graph, as `adapt.output_monitor` does.

Sums and moments are float64.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from caster.adapt.output_monitor import BLOCK, ERRORS, MEMORY, MIN_BLOCKS, MIN_DEVIATION
from caster.export import graph_arrays as xp
from caster.export import moment_graph
from caster.export.certificate_graph import at_most, confidence_stats, has_fallen
from caster.export.graph_arrays import GraphArray


@dataclass(frozen=True, eq=False)
class MonitorGraph:
    """`OutputMonitor` on arrays of a graph, initially zero."""

    distances: GraphArray  # (3,): number of blocks, sum of their distances, sum of squares
    repeats: GraphArray  # (2,): pairs of neighbours, and how many have the same answer
    confidence: GraphArray  # (3,): `confidence_stats`
    moments: GraphArray  # (2, d): mean and variance of features
    count: GraphArray  # (), samples behind the moments
    features: GraphArray  # (BLOCK - 1, d) float32; the last `pending` rows await a full block
    scores: GraphArray  # (BLOCK - 1, C) float32, likewise
    pending: GraphArray  # () int64

    def parts(self) -> dict[str, GraphArray]:
        """All fields, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def is_ready(self) -> GraphArray:  # ()
        """Whether enough blocks have been seen to judge new ones."""
        return self.distances[0] >= float(MIN_BLOCKS)

    def reset(self, resets: GraphArray) -> Self:
        """Forget the stream, if `resets`."""
        return replace(self, **{n: xp.where(~resets, each, 0) for n, each in self.parts().items()})

    def begin(self, begins: GraphArray) -> Self:
        """Drop the pending samples, if `begins`."""
        return replace(self, pending=xp.where(begins, 0, self.pending))

    def wait(self, features: GraphArray, scores: GraphArray) -> Self:  # (n, d), (n, C)
        """Add a batch to the pending samples; a full block leaves none pending."""
        total = self.pending + xp.length(scores)
        return replace(
            self,
            features=xp.concat([self.features, features])[1 - BLOCK :],
            scores=xp.concat([self.scores, scores])[1 - BLOCK :],
            pending=xp.where(total < BLOCK, total, 0),
        )

    def learn(self, features: GraphArray, scores: GraphArray) -> Self:  # (n, d), (n, C)
        """Learn the usual outputs of the stream from a batch."""
        names = ("distances", "repeats", "confidence", "moments", "count")
        before = [getattr(self, name) for name in names]

        def learnt() -> list[GraphArray]:
            n, wide, sure, repeats, distance = self._block(features, scores)
            f = distance / (1.0 / n + 1.0 / self.count)
            one = xp.constant(1.0)
            known = self.count >= MEMORY / 2
            mean = wide.mean(0)
            step = wide - mean
            kept = xp.where(n < float(MEMORY), xp.minimum(self.count, MEMORY - n), 0.0)
            moments = xp.stack([mean, (step * step).mean(0)])
            past = at_most(self.confidence.reshape(1, 3), xp.constant(float(MEMORY))).reshape(3)
            found = [
                xp.where(known, self.distances + xp.stack([one, f, f * f]), self.distances),
                self.repeats + xp.stack([n - 1.0, repeats]),
                xp.where(self.count > 0.0, past + sure, sure),
                moment_graph.merged(self.moments, moments, n / (kept + n)),
                kept + n,
            ]
            finite = xp.is_finite(sure[1] + distance)
            return [xp.where(finite, new, old) for new, old in zip(found, before, strict=True)]

        after = xp.choose(self._fills(scores), learnt, lambda: before)
        return replace(self.wait(features, scores), **dict(zip(names, after, strict=True)))

    def is_unchanged(
        self, features: GraphArray, scores: GraphArray
    ) -> GraphArray:  # (n, d), (n, C)
        """Whether the outputs look unchanged; before a block is full, whether they are finite."""

        def judged() -> GraphArray:
            n, _, sure, repeats, distance = self._block(features, scores)
            blocks, sum_1, sum_2 = (self.distances[i] for i in range(3))
            mean = sum_1 / blocks
            deviation = xp.maximum(
                xp.sqrt(xp.maximum(sum_2 / blocks - mean * mean, 0.0)), MIN_DEVIATION
            )
            near = distance / (1.0 / n + 1.0 / self.count) <= mean + ERRORS * deviation
            pairs, equal = self.repeats[0], self.repeats[1]
            expected = (n - 1.0) * (equal + 1.0) / (pairs + 2.0)
            varied = repeats <= expected + ERRORS * xp.sqrt(expected) + 1.0
            return ~has_fallen(sure, self.confidence, ERRORS) & near & varied

        return xp.choose_one(self._fills(scores), judged, lambda: xp.is_finite(scores))

    def _fills(self, scores: GraphArray) -> GraphArray:  # ()
        return self.pending + xp.length(scores) >= BLOCK

    def _block(
        self, features: GraphArray, scores: GraphArray
    ) -> tuple[GraphArray, GraphArray, GraphArray, GraphArray, GraphArray]:
        """Summarise the pending samples and a batch as one block.

        Returns the number of samples, their features (n, d) in float64, the sums of confidences
        (3,), the number of equal neighbours, and the distance from the usual features.
        """
        total = self.pending + xp.length(scores)
        wide = xp.concat([self.features, features])[-total:].astype(np.float64)
        joined = xp.concat([self.scores, scores])[-total:]
        answers = joined.argmax(1)
        equal = answers[1:].equals(answers[:-1]).astype(np.float64)
        variance = self.moments[1]
        varies = variance > 0.0
        step = wide.mean(0) - self.moments[0]
        each = xp.where(varies, step * step / xp.where(varies, variance, 1.0), 0.0)
        distance = xp.where(self.count > 0.0, each.mean(), 0.0)
        return total.astype(np.float64), wide, confidence_stats(joined), equal.sum(), distance


def initial_monitor(width: int, n_classes: int) -> dict[str, NDArray[Any]]:
    """The state of the monitor before the first batch."""
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
