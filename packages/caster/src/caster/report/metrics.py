"""Metrics of a classifier, computed from one number per sample.

`right` marks the samples answered with the true class, `confidence` is the probability of the
answer, and `log_likelihood` the log probability of the true class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError

Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]

BINS = 15  # confidence bins, as in Guo et al. (2017) and most papers since


def log_softmax(scores: NDArray[Any]) -> Floats:  # (B, C) -> (B, C)
    """Log probabilities in float64; a score of minus infinity has probability 0.

    >>> log_softmax(np.array([[1000.0, 1000.0], [0.0, -np.inf]])).round(3)
    array([[-0.693, -0.693],
           [ 0.   ,   -inf]])
    """
    scores = scores.astype(np.float64)
    largest = scores.max(axis=1, keepdims=True)
    if not np.isfinite(largest).all():
        raise CasterError("the largest score of a row is not finite: it has no probabilities")
    shifted = scores - largest
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def accuracy(right: Flags) -> float:  # (N,)
    """Share of samples classified correctly.

    >>> accuracy(np.array([True, True, False, True]))
    0.75
    """
    return float(np.mean(right))


def harm(frozen_right: Flags, right: Flags) -> float:  # (N,), (N,)
    """Share of all samples that the frozen classifier gets right and this one wrong.

    >>> harm(np.array([True, True, False, False]), np.array([True, False, True, True]))
    0.25
    """
    return float(np.mean(frozen_right & ~right))


def help(frozen_right: Flags, right: Flags) -> float:  # (N,), (N,)
    """Share of all samples that the frozen classifier gets wrong and this one right.

    >>> help(np.array([True, True, False, False]), np.array([True, False, True, True]))
    0.5
    """
    return float(np.mean(~frozen_right & right))


def nll(log_likelihood: Floats) -> float:  # (N,)
    """Mean negative log-likelihood in nats; infinite if a true class has probability 0.

    >>> round(nll(np.log([0.5, 0.25])), 3)
    1.04
    """
    return float(-np.mean(log_likelihood)) + 0.0  # never -0.0


@dataclass(frozen=True)
class Bin:
    """Mean confidence, accuracy and number of the samples of a bin."""

    confidence: float
    accuracy: float
    count: int


def reliability(confidence: Floats, right: Flags) -> tuple[Bin, ...]:  # (N,), (N,)
    """Accuracy by confidence in `BINS` intervals of equal width, without empty ones.

    An interval includes its upper end but not its lower, so that a confidence of 1 has a bin.

    >>> reliability(np.array([0.82, 0.84, 1.0]), np.array([True, False, True]))
    (Bin(confidence=0.83, accuracy=0.5, count=2), Bin(confidence=1.0, accuracy=1.0, count=1))
    """
    edges = np.arange(BINS + 1) / BINS
    # Rounding may push a probability above 1.
    index = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, BINS - 1)
    counts = np.bincount(index, minlength=BINS)
    sums = (np.bincount(index, values, BINS) for values in (confidence, right))
    return tuple(
        Bin(float(total / n), float(correct / n), int(n))
        for total, correct, n in zip(*sums, counts, strict=True)
        if n
    )


def calibration_error(confidence: Floats, right: Flags) -> float:  # (N,), (N,)
    """Expected calibration error (ECE), in the bins of `reliability`.

    The gap between mean confidence and accuracy of each bin, weighted by its share of samples.

    >>> round(calibration_error(np.array([0.82, 0.84, 1.0]), np.array([True, False, True])), 2)
    0.22
    """
    bins = reliability(confidence, right)
    return sum(b.count * abs(b.accuracy - b.confidence) for b in bins) / len(right)


def expected_classes(counts: NDArray[np.int64], size: int) -> float:  # (C,)
    """Expected number of distinct classes in `size` independent draws of labels.

    >>> expected_classes(np.array([50, 50]), 2)
    1.5
    """
    shares = counts / counts.sum()
    return float(np.sum(1.0 - (1.0 - shares) ** size))
