"""Distances from the source against SciPy and loops, and error rates of their tests."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom, ks_2samp, kstwobign, wasserstein_distance

from caster.core import drift
from caster.monitor.summary import compare
from tests.conftest import close
from tests.support.monitored import N_CLASSES, PRIORS, draw, state

SHIFT = 1.0  # of one direction, in deviations
THREE = np.where(np.arange(N_CLASSES) < 3, 1 / 3, 0.0)


def samples(seed, ties=False):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(40, 3)), rng.normal(0.3, 1.2, size=(70, 3))
    return (np.round(x, 1), np.round(y, 1)) if ties else (x, y)


# Formulas


@pytest.mark.parametrize("ties", [False, True])
def test_ks_is_scipys(ties):
    x, y = samples(0, ties)
    expected = [ks_2samp(a, b).statistic for a, b in zip(x.T, y.T, strict=True)]
    close(drift.ks_statistics(x, y), expected, 1e-12)


def test_ks_p_values_are_those_of_the_limit():
    statistics = np.array([0.05, 0.2, 0.5])
    close(
        drift.ks_p_values(statistics, 40, 70),
        kstwobign.sf(math.sqrt(2800 / 110) * statistics),
        1e-9,
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_wasserstein_is_scipys(weighted):
    x, y = samples(2, ties=True)
    w = np.random.default_rng(0).random(70) if weighted else None
    expected = [wasserstein_distance(a, b, None, w) for a, b in zip(x.T, y.T, strict=True)]
    close(drift.wasserstein_distances(x, y, w), expected, 1e-9)


def test_weights_are_repeated_samples():
    x, y = samples(3)
    times = np.random.default_rng(0).integers(1, 4, size=70)
    repeated = np.repeat(y, times, axis=0)
    weights = times.astype(float)
    for distance in (drift.ks_statistics, drift.wasserstein_distances):
        close(distance(x, y, weights), distance(x, repeated), 1e-9)


def test_mmd_is_its_definition():
    x, y = samples(4)
    points = np.concatenate([x, y])
    squares = np.array([[((a - b) ** 2).sum() for b in points] for a in points])
    K = np.exp(-squares / (2 * np.median(squares)))
    n = len(x)
    expected = K[:n, :n].mean() + K[n:, n:].mean() - 2 * K[:n, n:].mean()
    close(drift.gaussian_kernel(points), K, 1e-5)
    rng = np.random.default_rng(0)
    close(drift.mmd_test(drift.gaussian_kernel(points), n, rng)[0], expected, 1e-6)
    one_class = drift.Mixture(np.zeros(len(y), np.int64), np.array([1.0]))
    close(drift.mmd_test(drift.gaussian_kernel(points), n, rng, one_class)[0], expected, 1e-6)


def test_equal_samples_have_no_distance():
    kernel = drift.gaussian_kernel(np.ones((50, 2)))
    value, p = drift.mmd_test(kernel, 20, np.random.default_rng(0))
    assert value == pytest.approx(0.0, abs=1e-7)
    assert p == 1.0
    assert drift.wasserstein_distances(np.ones((20, 2)), np.ones((30, 2))).tolist() == [0, 0]


def test_psi_is_its_definition():
    counts, source = np.array([9, 0, 31]), np.array([20, 15, 65])
    p, q = (counts + 0.5) / 41.5, (source + 0.5) / 101.5
    expected = sum((a - b) * math.log(a / b) for a, b in zip(p, q, strict=True))
    close(drift.population_stability(counts, source, np.random.default_rng(0))[0], expected, 1e-12)


def test_a_mixture_is_imitated():
    classes = np.array([0, 3, 0, 1, 0])
    mixture = drift.Mixture(classes, np.array([0.2, 0.5, 0.2, 0.1]))
    expected = [0.25, 0.625, 0.0, 0.125]  # without class 2, of which there is no sample
    close(np.bincount(classes, mixture.weights), expected, 1e-12)
    rng = np.random.default_rng(0)
    windows, sketches = mixture.windows(40, 300, rng), mixture.sketches(300, rng)
    for drawn in (windows, sketches):
        close(drawn.sum(axis=1), np.ones(300), 1e-12)
        assert np.abs(drawn.mean(axis=0) - mixture.weights).max() < 0.03
    shares = windows @ np.eye(4)[classes]
    close(shares, np.tile(expected, (300, 1)), 1e-9)
    assert len(np.unique(windows[:, 0])) > 3  # which sample of a class is drawn is random
    assert drift.effective_size(np.ones(7)) == 7


# Error rates


def rates(windows: int, priors=PRIORS, shift: float = 0.0, n: int = 128) -> dict[str, float]:
    """Shares of windows with a p-value of at most 5 %; window and sketch are drawn each time."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(windows):
        z, p, _ = draw(rng, n, priors, shift)
        one = compare((z, p), state(rng), rng)
        given = one["given_mixture"]
        found.append([one["ks_p"], one["mmd_p"], one["psi_p"], given["ks_p"], given["mmd_p"]])
    names = ("ks", "mmd", "psi", "ks given", "mmd given")
    return dict(zip(names, (np.array(found) <= 0.05).mean(axis=0).tolist(), strict=True))


def most(windows: int) -> float:
    """Share that a test at 5 % exceeds with probability 1 in 1,000."""
    return float(binom.ppf(0.999, windows, 0.05)) / windows


@pytest.mark.slow
def test_windows_like_the_source_seldom_differ():
    assert max(rates(60).values()) <= most(60)


@pytest.mark.slow
def test_other_classes_are_told_from_other_images():
    classes, images = rates(30, THREE), rates(30, PRIORS, SHIFT)
    assert min(classes[name] for name in ("ks", "mmd", "psi")) == 1.0
    assert max(classes[name] for name in ("ks given", "mmd given")) <= most(30)
    assert images["mmd given"] >= 0.9


@pytest.mark.slow
def test_other_images_are_found_among_other_classes():
    assert rates(20, THREE, SHIFT)["mmd given"] >= 0.9


@pytest.mark.whole
@pytest.mark.parametrize("priors", [PRIORS, THREE], ids=["source", "three classes"])
def test_false_alarm_rates(priors):
    found = rates(500, priors, n=256)
    names = found if priors is PRIORS else ("ks given", "mmd given")
    assert max(found[name] for name in names) <= most(500)
