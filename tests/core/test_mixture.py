"""How far a mixture of classes is from the source's, by pairs of samples and by known mixtures."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caster.core.mixture import MeanStep, class_spread
from tests.conftest import close

seeds = st.integers(0, 99)


def samples(n=12, k=3, seed=0):
    return np.random.default_rng(seed).normal(size=(n, k)) + 0.5


def by_loops(z, weights=None):
    """The mean inner product of every two samples that are not the same."""
    weights = np.ones(len(z)) if weights is None else weights
    total = pairs = 0.0
    for i in range(len(z)):
        for j in range(len(z)):
            if i != j:
                total += weights[i] * weights[j] * float(z[i] @ z[j])
                pairs += weights[i] * weights[j]
    return total / pairs


def test_the_squared_step_by_loops(kind):
    z = samples()
    found = MeanStep.of(kind.array(z))
    assert kind.holds(found.total)
    close(found.squared(), by_loops(z), kind.tolerance)


@given(seeds, st.integers(2, 20), st.integers(1, 5))
def test_of_any_samples_it_is_the_pairs(seed, n, k):
    z = samples(n, k, seed)
    close(MeanStep.of(z).squared(), by_loops(z), 1e-9)


@given(seeds, st.lists(st.tuples(st.integers(1, 5), st.floats(0.5, 20.0)), min_size=2, max_size=5))
def test_of_a_past_that_is_discounted_again_and_again_it_is_of_weighted_samples(seed, parts):
    seen, weights, z = None, np.zeros(0), np.zeros((0, 3))
    for i, (n, kept) in enumerate(parts):
        batch = samples(n, seed=(seed, i))
        if seen is None:
            seen = MeanStep.of(batch)
        else:
            weights = weights * min(1.0, kept / weights.sum())
            seen = seen.at_most(kept) + MeanStep.of(batch)
        weights, z = np.concatenate([weights, np.ones(n)]), np.concatenate([z, batch])
    assert seen.count == pytest.approx(weights.sum())
    assert seen.weights == pytest.approx(np.sum(weights**2))
    close(seen.total, weights @ z, 1e-9)
    close(seen.squared(), by_loops(z, weights), 1e-8)


@given(seeds, st.integers(1, 11))
def test_sums_merge(seed, cut):
    z = samples(seed=seed)
    whole, joined = MeanStep.of(z), MeanStep.of(z[:cut]) + MeanStep.of(z[cut:])
    assert (joined.count, joined.weights) == (whole.count, whole.weights) == (12, 12)
    for name in ("total", "own"):
        close(getattr(joined, name), getattr(whole, name), 1e-9)
    close(joined.squared(), whole.squared(), 1e-9)


@given(seeds, st.permutations(range(12)))
def test_order_does_not_matter(seed, order):
    z = samples(seed=seed)
    close(MeanStep.of(z[order]).squared(), MeanStep.of(z).squared(), 1e-9)


@given(seeds, st.floats(0.01, 40.0))
def test_at_most(seed, kept):
    held = MeanStep.of(samples(seed=seed))
    less = held.at_most(kept)
    assert less.count == min(12.0, kept)  # to the last bit, so that a window can be full
    close(less.total / less.count, held.total / held.count, 1e-9)  # their mean stays
    if kept >= 12:
        assert less.weights == held.weights
        assert np.array_equal(less.total, held.total)
        assert np.array_equal(less.own, held.own)


@given(seeds, st.integers(2, 4))
def test_its_mean_over_all_draws_is_the_squared_mean_whatever_the_spread(seed, n):
    population = samples(4, k=2, seed=seed)
    found = [MeanStep.of(population[list(rows)]).squared() for rows in product(range(4), repeat=n)]
    assert np.mean(found) == pytest.approx(np.sum(population.mean(axis=0) ** 2), abs=1e-12)


def test_a_spread_by_loops(kind):
    means, priors = samples(5), np.array([0.1, 0.2, 0.3, 0.15, 0.25])
    expected = sum(p * float(m @ m) for m, p in zip(means, priors, strict=True))
    assert class_spread(kind.array(means), kind.array(priors)) == pytest.approx(expected, rel=1e-5)


# Classes as far from each other as any, about their mean, whose samples spread by far more.

C, DIM, NOISE = 10, 24, 1.5
MEANS = 2 * (np.eye(C, DIM) - np.eye(C, DIM).mean(axis=0))
SPREAD = class_spread(MEANS, np.full(C, 1 / C))


def ratios(classes, n, repeats=400, seed=0):
    """Of streams of `n` samples of some classes, drawn again and again."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(repeats):
        z = MEANS[rng.choice(classes, n)] + NOISE * rng.normal(size=(n, DIM))
        found.append(MeanStep.of(z).squared() / SPREAD)
    return np.array(found)


@pytest.mark.parametrize("k", [1, 2, 5, 10])
def test_of_k_classes_of_c(k):
    found = ratios(np.arange(k), 64)
    error = found.std() / np.sqrt(len(found))
    assert error < 0.02
    assert abs(found.mean() - (1 / k - 1 / C) / (1 - 1 / C)) < 4 * error


def test_of_all_classes_it_spreads_about_nothing_and_less_the_more_samples_there_are():
    covariance = MEANS.T @ MEANS / C + NOISE**2 * np.eye(DIM)
    for n in (16, 64, 256):
        found = ratios(np.arange(C), n)
        # The mean of n (n - 1) / 2 pairs, uncorrelated, of variance tr(S S) each: as 1 / n
        expected = np.sqrt(2 * np.sum(covariance**2) / (n * (n - 1))) / SPREAD
        assert found.std() == pytest.approx(expected, rel=0.15)
        assert abs(found.mean()) < 4 * found.std() / np.sqrt(len(found))
        assert 0.3 < np.mean(found < 0) < 0.7  # it is no length: as often below as above, about


def test_the_samples_own_spread_is_no_part_of_it():
    """The plain squared mean of 64 samples would tell of a mixture where there is none."""
    rng = np.random.default_rng(0)
    z = MEANS[rng.choice(C, (200, 64))] + NOISE * rng.normal(size=(200, 64, DIM))
    plain = np.sum(z.mean(axis=1) ** 2, axis=1).mean() / SPREAD
    ours = np.mean([MeanStep.of(batch).squared() for batch in z]) / SPREAD
    assert plain > 0.2
    assert abs(ours) < 0.05 * plain
