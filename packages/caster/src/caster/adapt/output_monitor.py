"""Detect from outputs alone whether a resting stream has changed.

While a stream rests, no activations are measured. Its outputs still reveal a new shift or other
classes: less confident predictions, a different mean of the features, or more neighbours with the
same prediction. Each is compared with earlier outputs of the same stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from caster.core.arrays import like, to_numpy
from caster.core.channels import ChannelMoments
from caster.core.confidence import ConfidenceStats, has_fallen
from caster.core.discriminant import confidence
from caster.core.linalg import Array, on_gpu

BLOCK = 64  # samples that are judged together: fewer are too noisy
MEMORY = 1024  # samples in the moments of features
MIN_BLOCKS = 4  # blocks needed to estimate the variation between blocks
ERRORS = 4.0  # standard errors by which a block may differ
MIN_DEVIATION = 0.1  # smallest standard deviation of the distance


class OutputMonitor:
    """Learn the statistics of one stream's outputs, and judge whether later blocks match them.

    Consider the squared distance of a block's mean features from the reference, divided by the
    sampling variance of such a mean. While nothing changes its expectation is 1, whatever the
    distribution. Its variance depends on the correlations of the features, and is estimated.

    >>> rng = np.random.default_rng(0)
    >>> monitor = OutputMonitor()
    >>> for _ in range(12):
    ...     monitor.learn(rng.normal(size=(64, 8)), rng.normal(size=(64, 4)))
    >>> features, scores = rng.normal(size=(64, 8)), rng.normal(size=(64, 4))
    >>> monitor.judge(features, scores)(), monitor.judge(features + 1.0, scores)()
    (True, False)
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the stream."""
        self._features: ChannelMoments | None = None
        self._weights: tuple[Array, Array] | None = None  # (d,), (d,): their mean, 1 / (d variance)
        self._confidence: ConfidenceStats | None = None
        self._distances = np.zeros(3)  # number of blocks, sum of distances, sum of their squares
        self._repeats = np.zeros(2)  # pairs of neighbours, and those with the same prediction
        self.begin()

    def begin(self) -> None:
        """Discard samples that do not fill a block yet."""
        self._pending: list[tuple[Array, Array]] = []

    @property
    def is_ready(self) -> bool:
        """Whether enough blocks were learnt to judge others."""
        return bool(self._distances[0] >= MIN_BLOCKS)

    def learn(self, features: Array, scores: Array) -> None:  # (n, d), (n, C)
        """Add a batch to the statistics of the stream."""
        block = self._filled(features, scores)
        if block is None:
            return
        n, known = len(block[0]), self._features
        _, repeats, distance = to_numpy(self.numbers(*block)).tolist()
        sure = ConfidenceStats.of(block[1])
        if not math.isfinite(sure.total + distance):
            return
        if known is not None and known.count >= MEMORY / 2:
            found = distance / (1 / n + 1 / known.count)
            self._distances += 1, found, found**2
        self._confidence = (
            sure if self._confidence is None else self._confidence.at_most(MEMORY) + sure
        )
        self._repeats += n - 1, repeats
        moments = ChannelMoments.of(block[0], 1)
        if known is not None and n < MEMORY:  # NumPy arrays, if they come from a state
            parts = (like(part, moments.mean) for part in (known.mean, known.variance))
            moments = ChannelMoments(known.count, *parts).at_most(MEMORY - n) + moments
        self._features = moments
        self._weights = None

    def judge(
        self,
        features: Array,  # (n, d)
        scores: Array,  # (n, C)
        numbers: Array | None = None,  # (3,), the `numbers` of this batch, if known
    ) -> Callable[[], bool]:
        """Start judging a batch; the returned function waits, and is True if nothing changed."""
        block = self._filled(features, scores)
        if block is None:  # until a block is full, detect only NaN and infinity
            total = _fetched(array_namespace(scores).sum(scores))
            return lambda: math.isfinite(total())
        if numbers is None or block[0] is not features:
            numbers = self.numbers(*block)
        fetched, n = _fetched(numbers), len(block[0])
        return lambda: self._is_unchanged(n, *fetched().tolist())

    def _is_unchanged(self, n: int, total: float, repeats: float, distance: float) -> bool:
        assert self._confidence is not None
        assert self._features is not None
        if has_fallen(ConfidenceStats(float(n), total, 0.0), self._confidence, ERRORS):
            return False
        blocks, sum_1, sum_2 = self._distances.tolist()
        mean = sum_1 / blocks
        deviation = max(MIN_DEVIATION, math.sqrt(max(0.0, sum_2 / blocks - mean**2)))
        if not distance / (1 / n + 1 / self._features.count) <= mean + ERRORS * deviation:
            return False
        pairs, equal = self._repeats.tolist()
        expected = (n - 1) * (equal + 1) / (pairs + 2)  # a count, so about equal to its variance
        return repeats <= expected + ERRORS * math.sqrt(expected) + 1

    def _filled(self, features: Array, scores: Array) -> tuple[Array, Array] | None:
        """Pending samples and the batch, once they fill a block; else None."""
        self._pending.append((features, scores))
        if sum(len(each) for each, _ in self._pending) < BLOCK:
            return None
        waiting, self._pending = self._pending, []
        if len(waiting) == 1:
            return waiting[0]
        xp = array_namespace(features)
        first, second = zip(*waiting, strict=True)
        return xp.concat([like(x, features) for x in first]), xp.concat(
            [like(x, scores) for x in second]
        )

    def numbers(self, features: Array, scores: Array) -> Array:  # (n, d), (n, C) -> (3,)
        """Sum of confidences, number of equal neighbours, distance from the reference.

        On a GPU a kernel launch costs more than this arithmetic, so the operations are few.
        """
        xp = array_namespace(features)
        sums = [xp.sum(confidence(scores)), self._distance(features)]
        answers = xp.argmax(scores, axis=1)
        repeats = xp.astype(xp.sum(answers[1:] == answers[:-1]), sums[0].dtype)
        return xp.stack([sums[0], repeats, xp.astype(sums[1], repeats.dtype, copy=False)])

    def _distance(self, features: Array) -> Array:  # ()
        """Squared distance of the mean features from the reference, in variances, averaged."""
        xp = array_namespace(features)
        mean = xp.mean(features, axis=0)
        if self._features is None:
            return xp.zeros_like(mean[0])
        if self._weights is None:
            centre, variance = (
                like(x, mean) for x in (self._features.mean, self._features.variance)
            )
            varies = variance > 0
            weights = varies / xp.where(varies, variance, xp.ones_like(variance)) / len(mean)
            self._weights = centre, xp.astype(weights, mean.dtype)
        centre, weights = self._weights
        return xp.sum((mean - centre) ** 2 * weights)

    def state(self) -> dict[str, NDArray[Any]]:
        """The memory as named arrays."""
        found = {
            "monitor.distances": self._distances.copy(),
            "monitor.repeats": self._repeats.copy(),
        }
        if self._confidence is not None and self._features is not None:
            sure, known = self._confidence, self._features
            found["monitor.confidence"] = np.array([sure.count, sure.total, sure.squares])
            found["monitor.count"] = np.array(known.count)
            found["monitor.mean"] = to_numpy(known.mean)
            found["monitor.variance"] = to_numpy(known.variance)
        if self._pending:
            first, second = zip(*self._pending, strict=True)
            found["monitor.features"] = np.concatenate([to_numpy(x) for x in first])
            found["monitor.scores"] = np.concatenate([to_numpy(x) for x in second])
        return found

    def resume(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a `state`; raise ValueError if it is invalid."""
        self.reset()
        own = {name: np.asarray(part) for name, part in state.items() if name[:8] == "monitor."}
        if not all(np.isfinite(part).all() for part in own.values()):
            raise ValueError("impossible outputs")
        self._distances = own["monitor.distances"].astype(float).reshape(3)
        self._repeats = own["monitor.repeats"].astype(float).reshape(2)
        if min(*self._distances, *self._repeats) < 0:
            raise ValueError("impossible sums")
        if self._repeats[0] > 0 or "monitor.mean" in own:
            mean, variance = own["monitor.mean"], own["monitor.variance"]
            self._confidence = ConfidenceStats(*own["monitor.confidence"].tolist())
            self._features = ChannelMoments(float(own["monitor.count"]), mean, variance)
            if mean.shape != variance.shape or mean.ndim != 1 or (variance < 0).any():
                raise ValueError("impossible features")
            if min(self._features.count, self._confidence.count) <= 0:
                raise ValueError("impossible counts")
        if "monitor.features" in own or "monitor.scores" in own:
            waiting = own["monitor.features"], own["monitor.scores"]
            if {part.ndim for part in waiting} != {2} or len({len(part) for part in waiting}) > 1:
                raise ValueError("impossible outputs")
            self._pending = [waiting]


def _fetched(numbers: Array) -> Callable[[], NDArray[Any]]:
    """Start copying numbers to the host; the returned function waits for them."""
    if not on_gpu(numbers):
        return lambda: to_numpy(numbers)
    from caster.models import cuda

    return cuda.fetch(numbers)
