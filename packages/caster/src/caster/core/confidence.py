"""How sure a model is of its answers, over the samples of a stream.

The certificate of layer transport. The largest probability that a model gives a sample is the
chance it gives its answer to be right. Said of the same samples twice, with an update of what deep
layers are given and without, it tells which of the two is more like what they learnt: not by a
theorem, but see docs/layer-transport.md for how often.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from array_api_compat import array_namespace

from caster.core.discriminant import confidence
from caster.core.linalg import Array


@dataclass(frozen=True)
class ConfidenceStats:
    """Sums of confidences. `+` merges two; a past can be weighed as fewer samples.

    >>> import numpy as np
    >>> found = ConfidenceStats.of(np.log(np.array([[0.9, 0.1], [0.5, 0.5]])))
    >>> found.count, round(found.mean, 3), round(found.deviation, 3)
    (2.0, 0.7, 0.2)
    """

    count: float  # samples; a fraction of one where the past is discounted
    total: float
    squares: float

    @classmethod
    def of(cls, scores: Array) -> Self:  # (n, C)
        """Of a batch's scores, the logarithms of probabilities but for a constant."""
        xp = array_namespace(scores)
        sure = confidence(xp.astype(scores, xp.float64))  # 1 less it may be small
        return cls(float(scores.shape[0]), float(xp.sum(sure)), float(xp.sum(sure**2)))

    def __add__(self, other: Self) -> Self:
        return type(self)(
            self.count + other.count, self.total + other.total, self.squares + other.squares
        )

    def at_most(self, samples: float) -> Self:
        """The same, weighed as no more than so many samples.

        >>> ConfidenceStats(8.0, 4.0, 2.0).at_most(2)
        ConfidenceStats(count=2.0, total=1.0, squares=0.5)
        """
        kept = min(1.0, samples / self.count)
        return type(self)(kept * self.count, kept * self.total, kept * self.squares)

    @property
    def mean(self) -> float:
        """Mean confidence: the share of answers that the model itself expects to be right."""
        return self.total / self.count

    @property
    def deviation(self) -> float:
        """Standard deviation of the samples' confidences."""
        return math.sqrt(max(0.0, self.squares / self.count - self.mean**2))


def expected_error_ratio(after: ConfidenceStats, before: ConfidenceStats) -> float:
    """The share of wrong answers that a model expects after an update, over that before it.

    Infinite where there was no doubt at all: such a model's word says nothing.

    >>> expected_error_ratio(ConfidenceStats(4.0, 3.0, 2.5), ConfidenceStats(4.0, 2.0, 1.0))
    0.5
    """
    new, old = 1.0 - after.mean, 1.0 - before.mean
    return math.inf if old <= 0 else new / old


def has_fallen(now: ConfidenceStats, then: ConfidenceStats, errors: float) -> bool:
    """Whether confidence is lower than it was, by more than so many standard errors, or no number.

    >>> then = ConfidenceStats(100.0, 80.0, 68.0)
    >>> [has_fallen(ConfidenceStats(25.0, total, 0.0), then, 3.0) for total in (19.0, 14.0)]
    [False, True]
    """
    chance = then.deviation * math.sqrt(1 / now.count + 1 / then.count)
    return not now.mean >= then.mean - errors * chance
