"""Confidence of a model over the samples of a stream: the certificate of layer transport.

The largest probability of a sample is the model's own estimate that its answer is correct. Compared
on the same samples with and without an update of its layers, it indicates which of the two is
closer to the training distribution: empirically, not by a theorem (docs/layer-transport.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from caster.core.arrays import as_real_array
from caster.core.discriminant import confidence
from caster.core.linalg import Array

FLAT = 1e-6  # smallest standard deviation of a sample's logits
# Smaller probabilities count as 0: their products would be subnormal numbers, which some processors
# multiply far more slowly than normal ones.
TINY = 1e-100


@dataclass(frozen=True)
class ConfidenceStats:
    """Sums of confidences over samples; `+` merges two.

    >>> import numpy as np
    >>> found = ConfidenceStats.of(np.log(np.array([[0.9, 0.1], [0.5, 0.5]])))
    >>> found.count, round(found.mean, 3), round(found.deviation, 3)
    (2.0, 0.7, 0.2)
    """

    count: float  # samples; fractional if the past is discounted
    total: float
    squares: float

    @classmethod
    def of(cls, scores: Array) -> Self:  # (n, C)
        """Sum over a batch; scores are log probabilities up to a constant."""
        scores = as_real_array(scores)
        xp = array_namespace(scores)
        p = confidence(xp.astype(scores, xp.float64))  # float64, because 1 - p may be small
        return cls(float(scores.shape[0]), float(xp.sum(p)), float(xp.sum(p**2)))

    def __add__(self, other: Self) -> Self:
        return type(self)(
            self.count + other.count, self.total + other.total, self.squares + other.squares
        )

    def at_most(self, samples: float) -> Self:
        """Cap the weight of the sums at a number of samples.

        >>> ConfidenceStats(8.0, 4.0, 2.0).at_most(2)
        ConfidenceStats(count=2.0, total=1.0, squares=0.5)
        """
        kept = min(1.0, samples / self.count)
        return type(self)(kept * self.count, kept * self.total, kept * self.squares)

    @property
    def mean(self) -> float:
        """Mean confidence: the accuracy that the model itself expects."""
        return self.total / self.count

    @property
    def deviation(self) -> float:
        """Standard deviation of the confidences."""
        return math.sqrt(max(0.0, self.squares / self.count - self.mean**2))


def expected_error_ratio(after: ConfidenceStats, before: ConfidenceStats) -> float:
    """Ratio of expected errors, 1 - mean confidence, after and before an update of the model.

    Infinite if the expected error was 0: such confidence carries no information.

    >>> expected_error_ratio(ConfidenceStats(4.0, 3.0, 2.5), ConfidenceStats(4.0, 2.0, 1.0))
    0.5
    """
    new, old = 1.0 - after.mean, 1.0 - before.mean
    return math.inf if old <= 0 else new / old


def spread(logits: NDArray[Any]) -> float:  # (n, C)
    """Standard deviation of a sample's logits, as a geometric mean over samples.

    The geometric mean keeps a single sample from dominating. The spread acts as an inverse
    temperature.

    >>> round(spread(np.array([[3.0, 1.0], [9.0, 1.0]])), 6)
    2.0
    """
    deviations = np.asarray(logits, np.float64).std(axis=1)
    return float(np.exp(np.log(deviations.clip(min=FLAT)).mean()))


def nuclear_norm(p: NDArray[Any]) -> float:  # (n, C)
    """Sum of the singular values of a matrix of probabilities.

    At most sqrt(n min(n, C)), if every row is one-hot and all classes are equally frequent.

    >>> nuclear_norm(np.eye(4)), nuclear_norm(np.eye(4)[[0, 0, 0, 0]])
    (4.0, 2.0)
    """
    wide = np.asarray(p, np.float64)
    wide = np.where(wide < TINY, 0.0, wide)
    gram = wide @ wide.T if len(wide) < wide.shape[1] else wide.T @ wide
    squares = np.linalg.eigvalsh(gram)
    return float(np.sqrt(squares.clip(min=0.0)).sum())


def has_fallen(now: ConfidenceStats, then: ConfidenceStats, errors: float) -> bool:
    """Whether mean confidence fell by more than `errors` standard errors, or is NaN.

    >>> then = ConfidenceStats(100.0, 80.0, 68.0)
    >>> [has_fallen(ConfidenceStats(25.0, total, 0.0), then, 3.0) for total in (19.0, 14.0)]
    [False, True]
    """
    standard_error = then.deviation * math.sqrt(1 / now.count + 1 / then.count)
    return not now.mean >= then.mean - errors * standard_error
