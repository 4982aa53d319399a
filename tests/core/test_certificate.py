from dataclasses import replace

import numpy as np
import pytest

from caster.config import Settings
from caster.core import certificate
from caster.core.linalg import cholesky
from caster.core.proposal import propose
from caster.core.types import SourceMoments
from tests.conftest import close, problem
from tests.support import reference
from tests.support.moments import source_moments

SETTINGS = Settings(lam=0.7, beta=0.3)


@pytest.mark.parametrize("batch_size", [2, 6, 64])
def test_evidence_is_the_reference(kind, batch_size):
    k = min(4, batch_size - 1)
    z, y = problem(d=4)
    z = z[:, :k]
    source = source_moments(z, y, kind.array, kind.index)
    target = z[:batch_size] * 1.4 - 1.0
    got = propose(kind.array(target), source, SETTINGS)
    means, covariances, priors, m_s, C_s, pooled = reference.moments(z, y, 5)
    A, b = reference.transport(target, m_s, C_s, 0.7)
    g = reference.scores(target, means, covariances, priors, A, b, 0.3)
    ratio, confident, classes = reference.certificate(target, g, means, pooled, A, b, 0.9, 1e-12)
    assert kind.holds(got.evidence)
    r, n, c = np.asarray(got.evidence).tolist()
    assert (n, c) == (confident, classes)
    close(r, ratio, 20 * kind.tolerance)
    assert np.array_equal(np.asarray(got.assigned), g.argmax(axis=1))


def test_confidence_must_exceed_the_threshold_not_reach_it():
    twins = SourceMoments(np.eye(1), np.array([[-1.0], [1.0]]), np.ones((2, 1, 1)), np.ones(2))
    z = np.zeros((4, 1))  # halfway: both classes are exactly as likely
    for threshold, confident in ((0.5, 0), (0.49, 4)):
        evidence = propose(z, twins, replace(SETTINGS, confidence=threshold)).evidence
        assert evidence[1] == confident


def test_margin_is_the_smallest_pairwise_distance(kind):
    rng = np.random.default_rng(0)
    means, x = rng.standard_normal((6, 3)), rng.standard_normal((3, 9))
    pooled = x @ x.T / 9
    inverse = np.linalg.inv(pooled)
    pairs = [np.sqrt((a - b) @ inverse @ (a - b)) for a in means for b in means if a is not b]
    got = certificate.margin(kind.array(means), cholesky(kind.array(pooled)))
    close(got, min(d for d in pairs if d > 0), kind.tolerance)


def test_margin_does_not_cancel_between_close_classes():
    means = np.array([[1e6, 0.0], [1e6, 1e-6], [0.0, 0.0]])
    assert certificate.margin(means, np.eye(2)) == pytest.approx(1e-6, rel=1e-9)


def test_residuals_of_unoccupied_classes_are_zero(kind):
    pulled = kind.array([[1.0, 1.0], [3.0, 1.0], [9.0, 9.0]])
    residuals, counts = certificate.centroid_residuals(
        pulled,
        kind.index([2, 2, 0]),
        kind.xp.asarray([True, True, False]),
        kind.array([[5.0, 5.0], [7.0, 7.0], [1.0, 0.0]]),
    )
    assert np.asarray(counts).tolist() == [0, 0, 2]
    assert np.asarray(residuals).tolist() == [[0, 0], [0, 0], [1, 1]]


def test_a_mixed_metric_depends_on_the_scale_of_a_coordinate():
    """The paper's warning: a Euclidean residual over a Mahalanobis margin has units."""
    means, residuals = np.array([[0.0, 0.0], [4.0, 0.0]]), np.array([[0.0, 1.0], [0.0, 0.0]])
    seen = []
    for stretch in (np.eye(2), np.diag([1.0, 100.0])):
        metric = cholesky(stretch @ stretch.T)
        gamma = certificate.margin(means @ stretch.T, metric)
        ours = certificate.ratio(residuals @ stretch.T, metric, gamma, 0.0)
        seen.append((ours, np.linalg.norm(residuals @ stretch.T, axis=1).max() / gamma))
    (same, euclidean), (same_again, stretched) = seen
    assert same == pytest.approx(same_again)
    assert stretched == pytest.approx(100 * euclidean)


def test_coinciding_classes_give_a_large_ratio_not_a_division_by_zero():
    means = np.zeros((2, 1))
    gamma = certificate.margin(means, np.eye(1))
    assert gamma == 0
    assert certificate.ratio(np.ones((2, 1)), np.eye(1), gamma, 1e-12) == pytest.approx(1e12)
