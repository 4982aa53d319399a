"""Estimate accuracy without labels, from confidences calibrated on the source.

Both estimates assume that confidence means the same under the shift, which nothing guarantees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Z = 1.96  # normal quantile of a 95 % interval


@dataclass(frozen=True)
class Calibration:
    """Relation of confidence to accuracy on the source, for one kind of answer.

    >>> u = np.array([0.01, 0.02, 0.1, 0.4])  # uncertainty: 1 - confidence
    >>> calibration = Calibration.of(u, np.array([0, 0, 0, 1]))
    >>> calibration.threshold, calibration.errors, calibration.correct_above
    (0.1, 1, 0)
    """

    threshold: float  # uncertainty exceeded by as many source samples as are wrong
    samples: int  # of the source
    errors: int  # wrong answers
    correct_above: int  # correct answers above the threshold
    confidence: float  # mean

    @classmethod
    def of(cls, uncertainty: NDArray[Any], wrong: NDArray[Any]) -> Self:  # (m,), (m,)
        """Calibrate on labelled source samples."""
        m, errors = len(wrong), int(wrong.sum())
        threshold = float(np.sort(uncertainty)[m - errors - 1]) if errors < m else -math.inf
        above = uncertainty > threshold
        return cls(
            threshold,
            m,
            errors,
            int((above & (np.asarray(wrong) == 0)).sum()),
            float(1 - uncertainty.mean()),
        )

    @property
    def accuracy(self) -> float:
        """Accuracy on the source."""
        return 1 - self.errors / self.samples


@dataclass(frozen=True)
class EstimatedAccuracy:
    """Two estimates of accuracy, and an interval that covers both and their sampling error."""

    atc: float  # average thresholded confidence (Garg et al. 2022)
    doc: float  # difference of confidences (Guillory et al. 2021)
    low: float
    high: float

    @property
    def value(self) -> float:
        """Mean of both estimates."""
        return (self.atc + self.doc) / 2


def estimate(
    calibration: Calibration,
    samples: int,
    above: int,  # samples whose uncertainty exceeds the threshold
    confidence: float,  # mean
) -> EstimatedAccuracy:
    """Estimate accuracy by thresholded confidence and by the drop of mean confidence.

    ATC is P(u <= threshold); DoC is the source's accuracy minus the drop of mean confidence.

    >>> found = estimate(Calibration(0.1, 100, 10, 2, 0.95), samples=100, above=30, confidence=0.8)
    >>> round(found.atc, 2), round(found.doc, 2), round(found.low, 2), round(found.high, 2)
    (0.7, 0.75, 0.59, 0.86)
    """
    atc = 1 - above / samples
    doc = min(1.0, max(0.0, calibration.accuracy - (calibration.confidence - confidence)))
    variances = (
        _binomial_variance(above, samples),
        _binomial_variance(calibration.errors, calibration.samples),
    )
    reach = Z * math.sqrt(sum(variances))
    low, high = min(atc, doc) - reach, max(atc, doc) + reach
    return EstimatedAccuracy(atc, doc, max(0.0, low), min(1.0, high))


def _binomial_variance(count: int, total: int) -> float:
    """Variance of a proportion, with Agresti and Coull's extra counts so that it is never 0."""
    share = (count + 2) / (total + 4)
    return share * (1 - share) / (total + 4)
