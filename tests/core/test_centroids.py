"""The certificate of layer transport: centroids by class probability, and their residual."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caster.core.centroids import ClassShares, residual_ratio
from caster.core.certificate import centroid_residuals
from tests.conftest import close

MEANS = np.arange(6.0).reshape(3, 2)
seeds = st.integers(0, 99)


def samples(n=12, k=2, n_classes=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, k)), 3 * rng.normal(size=(n, n_classes))


def by_loops(z, scores, means, weights=None):
    """Every pair of two samples that are not the same, a class at a time."""
    weights = np.ones(len(z)) if weights is None else weights
    shares = np.array([np.exp(row) / sum(np.exp(row)) for row in scores])
    total = 0.0
    for c in range(scores.shape[1]):
        q = weights * shares[:, c]
        pairs = 0.0
        for i in range(len(z)):
            for j in range(len(z)):
                if i != j:
                    pairs += q[i] * q[j] * ((z[i] - means[c]) @ (z[j] - means[c]))
        total += pairs / sum(q)
    return total / sum(weights)


def test_residual_by_loops(kind):
    z, scores = samples()
    found = ClassShares.of(*(kind.array(x) for x in (z, scores, MEANS)))
    assert kind.holds(found.steps)
    close(found.residual(), by_loops(z, scores, MEANS), kind.tolerance)


@given(seeds, st.integers(1, 11), st.floats(0.5, 20.0))
def test_of_a_discounted_past_it_is_of_weighted_samples(seed, cut, kept):
    z, scores = samples(seed=seed)
    past, batch = (ClassShares.of(z[s], scores[s], MEANS) for s in (slice(cut), slice(cut, None)))
    joined = past.at_most(kept) + batch
    weights = np.where(np.arange(12) < cut, min(1.0, kept / cut), 1.0)
    assert joined.count == pytest.approx(min(cut, kept) + 12 - cut)
    close(joined.residual(), by_loops(z, scores, MEANS, weights), 1e-9)


@given(seeds, st.integers(1, 11))
def test_sums_merge(seed, cut):
    z, scores = samples(seed=seed)
    whole = ClassShares.of(z, scores, MEANS)
    one, other = (ClassShares.of(z[s], scores[s], MEANS) for s in (slice(cut), slice(cut, None)))
    joined = one + other
    assert joined.count == whole.count
    for name in ("mass", "steps", "own"):
        close(getattr(joined, name), getattr(whole, name), 1e-9)


def test_with_certain_classes_and_each_sample_with_itself_it_is_the_papers_residual():
    z, scores = samples(20)
    assigned = scores.argmax(axis=1)
    certain = 1e3 * np.eye(3)[assigned]
    residuals, counts = centroid_residuals(z, assigned, np.ones(20, bool), MEANS)
    found = ClassShares.of(z, certain, MEANS)
    themselves = np.sum(found.own / found.mass) / 20
    expected = np.sum(counts * np.sum(residuals**2, axis=1)) / 20
    close(found.residual() + themselves, expected, 1e-12)


def test_a_class_without_mass_counts_nothing():
    z, certain = np.array([[1.0], [3.0]]), np.array([[0.0, -np.inf], [0.0, -np.inf]])
    found = ClassShares.of(z, certain, np.array([[5.0], [1e9]]))
    assert float(found.residual()) == 2 * (-4.0 * -2.0) / 2 / 2


def test_a_sample_alone_says_nothing_of_its_class():
    z, certain = samples(3)[0], 1e3 * np.eye(3)
    close(ClassShares.of(z, certain, MEANS).residual(), 0.0, 1e-12)


@pytest.mark.parametrize(("n_classes", "spread"), [(2, 1.0), (10, 3.0), (100, 1.0), (100, 3.0)])
def test_its_mean_is_the_step_of_the_classes_whatever_their_spread(n_classes, spread):
    rng = np.random.default_rng(0)
    means, step = 50 * rng.normal(size=(n_classes, 5)), np.array([2.0, 0, 0, 0, 1.0])
    found = []
    for _ in range(300):
        assigned = rng.integers(n_classes, size=128)
        z = means[assigned] + step + spread * rng.normal(size=(128, 5))
        certain = 1e3 * np.eye(n_classes)[assigned]
        found.append(float(ClassShares.of(z, certain, means).residual()))
    # A class that one sample has alone weighs nothing, of n samples n - 1 of n.
    occupied = n_classes * (1 - (1 - 1 / n_classes) ** 128)
    error = np.std(found) / np.sqrt(len(found))
    assert abs(np.mean(found) - 5 * (1 - occupied / 128)) < 4 * error


def test_among_many_classes_it_sees_what_spread_hides():
    """128 samples of 1,000 classes: displaced by four spreads, centroids seem hardly farther."""
    rng = np.random.default_rng(0)
    means, step = 0.8 * rng.normal(size=(1000, 128)), rng.normal(size=128)

    def residuals(rows):
        scores = rows @ means.T - 0.5 * (means**2).sum(axis=1)
        found = ClassShares.of(rows, scores, means)
        return found.residual(), found.residual() + np.sum(found.own / found.mass) / found.count

    still, moved = [], []
    for _ in range(10):
        z = means[rng.integers(1000, size=128)] + rng.normal(size=(128, 128))
        still.append(residuals(z))
        moved.append(residuals(z + 4 * step / np.linalg.norm(step)))
    (still, still_all), (moved, moved_all) = np.mean(still, axis=0), np.mean(moved, axis=0)
    assert math.sqrt(moved_all / still_all) < 1.1
    assert moved > 5 * abs(still)


def test_discounting_changes_the_weight_and_no_centroid():
    whole = ClassShares.of(*samples(), MEANS)
    less = whole.at_most(3)
    assert less.count == 3
    close(less.mass.sum(), 3.0, 1e-12)
    close(less.steps / less.mass[:, None], whole.steps / whole.mass[:, None], 1e-12)
    assert whole.at_most(100).count == 12
    assert whole.at_most(0).count == 0


def test_shares_of_one_class_move_away_as_an_aligned_class_does():
    """A batch of one class, carried to the mean of all: what the certificate is to refuse."""
    rng = np.random.default_rng(0)
    means = 6 * np.eye(3)
    z = means[rng.integers(3, size=90)] + rng.normal(size=(90, 3))
    alone = means[0] + rng.normal(size=(90, 3))
    forced = alone - alone.mean(axis=0) + means.mean(axis=0)

    def residual(rows):
        distance = ((rows[:, None] - means) ** 2).sum(axis=2)
        return ClassShares.of(rows, -0.5 * distance, means).residual()

    assert residual(z) < 1
    assert residual(alone) < 1
    assert residual(forced) > 4


def test_ratios_that_are_no_numbers_are_never_small():
    for bad in (math.nan, math.inf, -math.inf):
        assert math.isnan(residual_ratio(bad, 1.0))
        assert math.isnan(residual_ratio(1.0, bad))
    assert residual_ratio(0.0, 0.0) == math.inf
    assert residual_ratio(0.0, 1.0) == 0.0
