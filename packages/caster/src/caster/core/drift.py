"""Measure the distance of a window of samples from the source, and what explains it.

Two sets of samples are compared: the window (x) and a sketch of the source (y). Given the window's
estimated class mixture pi, sample i of the sketch, of class c_i, has weight w_i = pi(c_i) / n(c_i).
The weighted distances then respond to images that look different, not to other classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import kolmogorov

Floats = NDArray[np.float64]

DRAWS = 199  # of a permutation or bootstrap test: the smallest p-value is 1 / 200
ROUNDING = 1e-7  # rounding error of a squared discrepancy in float32
PSEUDOCOUNT = 0.5  # added to class counts: the PSI of an absent class would be infinite


@dataclass(frozen=True)
class Distances:
    """Distances of a window from the source, and p-values under the null of no drift."""

    ks: float  # largest Kolmogorov-Smirnov statistic over the class probabilities
    ks_p: float  # with Bonferroni correction
    mmd: float  # squared, of projected features
    mmd_p: float
    wasserstein: float  # mean over directions, in within-class standard deviations

    @property
    def p(self) -> float:
        """P-value of both tests together, with Bonferroni correction."""
        return min(1.0, 2 * min(self.ks_p, self.mmd_p))


@dataclass(frozen=True, eq=False)
class Mixture:
    """Reweight the samples of a sketch to a class mixture.

    Classes without a sample in the sketch are left out.

    >>> Mixture(np.array([0, 0, 1]), np.array([0.5, 0.5])).weights
    array([0.25, 0.25, 0.5 ])
    """

    classes: NDArray[Any]  # (m,), indices
    pi: Floats  # (C,)

    @cached_property
    def weights(self) -> Floats:  # (m,), adding up to 1
        """w_i = pi(c_i) / n(c_i)."""
        counts = np.bincount(self.classes, minlength=len(self.pi))
        weights = self.pi[self.classes] / counts[self.classes]
        return np.asarray(weights / weights.sum())

    def windows(self, n: int, draws: int, rng: np.random.Generator) -> Floats:  # (draws, m)
        """Weights of sketch samples in random windows of n samples with exactly this mixture."""
        order = np.argsort(self.classes, kind="stable")
        ends = self.weights[order].cumsum()
        own = self.classes[order][np.searchsorted(ends, (np.arange(n) + 0.5) / n * ends[-1])]
        first, counts = (
            np.searchsorted(self.classes[order], own),
            np.bincount(self.classes, minlength=len(self.pi))[own],
        )
        rows = order[first + (rng.random((draws, n)) * counts).astype(np.intp)]
        cells = rows + len(order) * np.arange(draws)[:, None]
        found = np.bincount(cells.ravel(), minlength=draws * len(order))
        return found.reshape(draws, -1) / n

    def sketches(self, draws: int, rng: np.random.Generator) -> Floats:  # (draws, m)
        """Weights of sketch samples in Bayesian bootstrap resamples with the same mixture."""
        member = np.eye(len(self.pi))[self.classes]  # (m, C)
        drawn = rng.standard_exponential((draws, len(self.classes))) * self.weights
        shares = (self.weights @ member)[self.classes]
        return np.asarray(drawn / (drawn @ member)[:, self.classes] * shares)


def distances(
    window: tuple[Floats, Floats],  # (n, k), (n, C): projected features, probabilities
    source: tuple[Floats, Floats],  # (m, k), (m, C)
    kernel: NDArray[np.float32],  # (n + m, n + m), of both sides' features
    rng: np.random.Generator,
    mixture: Mixture | None = None,
) -> Distances:
    """Compute and test all distances, reweighted to a mixture if given."""
    (z, p), (z_s, p_s) = window, source
    weights = None if mixture is None else mixture.weights
    found = ks_statistics(p, p_s, weights)
    effective = len(p_s) if weights is None else effective_size(weights)
    each = ks_p_values(found, len(p), effective)
    mmd, mmd_p = mmd_test(kernel, len(z), rng, mixture)
    return Distances(
        ks=float(found.max()),
        ks_p=min(1.0, float(each.min()) * len(each)),
        mmd=mmd,
        mmd_p=mmd_p,
        wasserstein=float(wasserstein_distances(z, z_s, weights).mean()),
    )


def effective_size(weights: Floats) -> float:
    """Effective sample size (sum w)^2 / sum w^2.

    >>> effective_size(np.array([0.5, 0.5, 0.0]))
    2.0
    """
    return float(weights.sum() ** 2 / (weights**2).sum())


def ks_statistics(
    x: Floats,  # (n, C)
    y: Floats,  # (m, C)
    weights: Floats | None = None,  # (m,)
) -> Floats:  # (C,)
    """Kolmogorov-Smirnov statistic sup |F_x - F_y| of every column.

    >>> ks_statistics(np.array([[1.0], [2.0]]), np.array([[2.0], [3.0]]))
    array([0.5])
    """
    values, gaps = _cdf_gaps(x, y, weights)
    ends = np.ones(values.shape, np.bool_)  # among ties, only the last gap counts
    ends[:-1] = values[1:] != values[:-1]
    return np.asarray(np.abs(gaps * ends).max(axis=0))


def ks_p_values(statistics: Floats, n: float, m: float) -> Floats:
    """P-values by Kolmogorov's limit distribution for sizes n and m.

    >>> ks_p_values(np.array([0.1, 0.3]), 100, 100).round(3)
    array([0.699, 0.   ])
    """
    return np.asarray(kolmogorov(np.sqrt(n * m / (n + m)) * statistics))


def wasserstein_distances(
    x: Floats,  # (n, k)
    y: Floats,  # (m, k)
    weights: Floats | None = None,  # (m,)
) -> Floats:  # (k,)
    """Wasserstein-1 distance of every column: the integral of |F_x - F_y|.

    >>> wasserstein_distances(np.array([[0.0], [1.0]]), np.array([[2.0], [3.0]]))
    array([2.])
    """
    values, gaps = _cdf_gaps(x, y, weights)
    return np.asarray((np.abs(gaps[:-1]) * np.diff(values, axis=0)).sum(axis=0))


def _cdf_gaps(x: Floats, y: Floats, weights: Floats | None) -> tuple[Floats, Floats]:
    """Sorted values of every column, and F_x - F_y after each of them."""
    w = np.full(len(y), 1.0) if weights is None else weights
    steps = np.concatenate([np.full(len(x), 1 / len(x)), -w / w.sum()])
    both = np.concatenate([x, y])
    order = np.argsort(both, axis=0, kind="stable")
    return np.take_along_axis(both, order, axis=0), steps[order].cumsum(axis=0)


def gaussian_kernel(points: Floats) -> NDArray[np.float32]:  # (N, k) -> (N, N)
    """Gaussian kernel exp(-d^2 / (2 median d^2)), with the median heuristic for the bandwidth.

    >>> gaussian_kernel(np.array([[0.0], [1.0]])).round(3)
    array([[1.   , 0.368],
           [0.368, 1.   ]], dtype=float32)
    """
    squares = (points**2).sum(axis=1)
    found = np.maximum(squares[:, None] + squares - 2 * points @ points.T, 0.0).astype(np.float32)
    scale = 2 * np.median(found)
    found /= -(scale if scale > 0 else 1.0)
    return np.asarray(np.exp(found, out=found))


def mmd_test(
    kernel: NDArray[np.float32],  # (n + m, n + m), the window's samples first
    n: int,
    rng: np.random.Generator,
    mixture: Mixture | None = None,
) -> tuple[float, float]:
    """Squared maximum mean discrepancy, and its p-value.

    Without a mixture, the p-value comes from a permutation test, exact at any size. Weighted
    samples are not exchangeable; given a mixture, windows of that mixture are drawn from the sketch
    and compared with resampled sketches.

    >>> rng = np.random.default_rng(0)
    >>> x, y = rng.normal(size=(64, 2)), rng.normal(size=(128, 2))
    >>> same, other = (gaussian_kernel(np.concatenate([each, y])) for each in (x, x + 1))
    >>> mmd_test(same, 64, rng)[1] > 0.05, mmd_test(other, 64, rng)[1]
    (True, 0.005)
    """
    m = len(kernel) - n
    w = np.full(m, 1 / m) if mixture is None else mixture.weights
    found = _quadratic(kernel, np.concatenate([np.full(n, 1 / n), -w])[None])
    if mixture is None:
        drawn = np.full((DRAWS, n + m), -1 / m)
        chosen = np.argpartition(rng.random(drawn.shape), n, axis=1)[:, :n]
        np.put_along_axis(drawn, chosen, 1 / n, axis=1)
        null = _quadratic(kernel, drawn)
    else:
        drawn = mixture.windows(n, DRAWS, rng) - mixture.sketches(DRAWS, rng)
        null = _quadratic(kernel[n:, n:], drawn)
    exceeding = null >= found - ROUNDING  # a permutation may be the identity
    return float(found[0]), (1 + int(exceeding.sum())) / (DRAWS + 1)


def _quadratic(kernel: NDArray[np.float32], a: Floats) -> Floats:  # (N, N), (draws, N) -> (draws,)
    rows = a.astype(np.float32)
    return np.asarray(((rows @ kernel) * rows).sum(axis=1, dtype=np.float64))


def population_stability(
    counts: NDArray[Any],  # (C,), of the window's predicted classes
    source: NDArray[Any],  # (C,)
    rng: np.random.Generator,
) -> tuple[float, float]:
    """PSI = sum (p - q) log(p / q) of predicted classes, and the p-value of a permutation test.

    The usual thresholds of 0.1 and 0.25 are for ten bins and thousands of samples; with more
    classes or fewer samples, chance alone exceeds them, so use the p-value.

    >>> rng = np.random.default_rng(0)
    >>> population_stability(np.array([50, 50]), np.array([500, 500]), rng)
    (0.0, 1.0)
    >>> value, p = population_stability(np.array([90, 10]), np.array([500, 500]), rng)
    >>> round(value, 2), p
    (0.85, 0.005)
    """
    total = counts + source
    drawn = rng.multivariate_hypergeometric(total, int(counts.sum()), DRAWS)
    found = float(_psi(counts, source))
    null = _psi(drawn, total - drawn)
    return found, (1 + int((null >= found - 1e-12).sum())) / (DRAWS + 1)


def _psi(counts: NDArray[Any], source: NDArray[Any]) -> Floats:  # (..., C) -> (...)
    p, q = (c + PSEUDOCOUNT for c in (counts, source))
    p, q = (c / c.sum(axis=-1, keepdims=True) for c in (p, q))
    return np.asarray(((p - q) * np.log(p / q)).sum(axis=-1))
