"""The certificate of layer transport: centroids by class probability, and their residual."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from caster.core.centroids import ClassShares
from caster.core.certificate import centroid_residuals
from tests.conftest import close


def samples(n=12, k=2, n_classes=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, k)), 3 * rng.normal(size=(n, n_classes))


def by_loops(z, scores, means, metric):
    """Root mean square residual, a class at a time."""
    inverse = np.linalg.inv(metric @ metric.T)
    total = 0.0
    shares = np.array([np.exp(row) / sum(np.exp(row)) for row in scores])
    for c in range(scores.shape[1]):
        mass = sum(shares[:, c])
        away = sum(shares[i, c] * z[i] for i in range(len(z))) / mass - means[c]
        total += mass * (away @ inverse @ away)
    return np.sqrt(total / len(z))


def test_residual_by_loops(kind):
    z, scores = samples()
    means, metric = np.arange(6.0).reshape(3, 2), np.array([[2.0, 0.0], [1.0, 0.5]])
    found = ClassShares.of(kind.array(z), kind.array(scores))
    assert kind.holds(found.sums)
    residual = found.residual(kind.array(means), kind.array(metric))
    close(residual, by_loops(z, scores, means, metric), kind.tolerance)


def test_with_certain_classes_it_is_the_papers_residual():
    z, scores = samples(20)
    assigned = scores.argmax(axis=1)
    means, certain = np.arange(6.0).reshape(3, 2), 1e3 * np.eye(3)[assigned]
    residuals, counts = centroid_residuals(z, assigned, np.ones(20, bool), means)
    expected = np.sqrt(np.sum(counts * np.sum(residuals**2, axis=1)) / 20)
    close(ClassShares.of(z, certain).residual(means, np.eye(2)), expected, 1e-12)


def test_a_class_without_mass_counts_nothing():
    z, certain = np.array([[1.0], [3.0]]), np.array([[0.0, -np.inf], [0.0, -np.inf]])
    assert float(ClassShares.of(z, certain).residual(np.array([[5.0], [1e9]]), np.eye(1))) == 3.0


@given(st.integers(1, 11), st.integers(0, 99))
def test_sums_merge(cut, seed):
    z, scores = samples(seed=seed)
    whole = ClassShares.of(z, scores)
    parts = ClassShares.of(z[:cut], scores[:cut]) + ClassShares.of(z[cut:], scores[cut:])
    assert parts.count == whole.count
    close(parts.mass, whole.mass, 1e-12)
    close(parts.sums, whole.sums, 1e-12)


def test_discounting_changes_the_weight_and_no_centroid():
    z, scores = samples()
    whole, means = ClassShares.of(z, scores), np.zeros((3, 2))
    less = whole.at_most(3)
    assert less.count == 3
    close(less.mass.sum(), 3.0, 1e-12)
    close(less.residual(means, np.eye(2)), whole.residual(means, np.eye(2)), 1e-12)
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
        return ClassShares.of(rows, -0.5 * distance).residual(means, np.eye(3))

    assert residual(z) < 1
    assert residual(alone) < 1
    assert residual(forced) > 2
