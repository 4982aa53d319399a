import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import multivariate_normal
from sklearn.discriminant_analysis import QuadraticDiscriminantAnalysis

from caster.core import discriminant
from caster.core.transport import estimate, pull
from tests.conftest import close, problem
from tests.support import reference
from tests.support.moments import source_moments


@pytest.mark.parametrize(("d", "batch_size"), [(4, 6), (4, 64), (30, 64)])
def test_transported_scores_are_the_reference(kind, d, batch_size):
    z, y = problem(d=d)
    source = source_moments(z, y, kind.array, kind.index)
    target = z[:batch_size] * 1.4 - 1.0
    fitted = estimate(kind.array(target), source, lam=0.7)
    pulled = pull(fitted, kind.array(target))
    got = discriminant.transported_scores(pulled, fitted, source, beta=0.3)
    means, covariances, priors, m_s, C_s, _ = reference.moments(z, y, 5)
    A, b = reference.transport(target, m_s, C_s, 0.7)
    assert kind.holds(got)
    close(got, reference.scores(target, means, covariances, priors, A, b, 0.3), 5 * kind.tolerance)


@pytest.mark.parametrize("batch_size", [6, 64])
def test_pulled_features_score_as_transported_classes_do(batch_size):
    z, y = problem(d=4)
    source = source_moments(z, y)
    target = z[:batch_size] * 0.2 + 5.0
    fitted = estimate(target, source, lam=0.7)
    moments = source.means, source.covariances, source.priors
    direct = reference.scores(target, *moments, fitted.A, fitted.b, 0.3)
    close(discriminant.transported_scores(pull(fitted, target), fitted, source, 0.3), direct, 1e-9)


def test_scores_without_ridge_are_scikit_learns_qda(kind):
    z, y = problem(d=4)
    source = source_moments(z, y, kind.array, kind.index)
    qda = QuadraticDiscriminantAnalysis(store_covariance=True).fit(z, y)
    close(
        source.covariances, qda.covariance_, kind.tolerance
    )  # both divide by n since scikit-learn 1.8
    got = discriminant.ridged_scores(kind.array(z), source, kind.array(np.zeros((4, 4))))
    close(got, qda.decision_function(z), 20 * kind.tolerance)


@pytest.mark.parametrize("d", [4, 30])  # NumPy's own factors, and LAPACK's
def test_source_scores_are_those_of_scipys_densities(kind, d):
    z, y = problem(d=d, n=600)
    source = source_moments(z, y, kind.array, kind.index)
    means, covariances, priors, *_ = reference.moments(z, y, 5)
    for beta in (0.3, 2.0, 0.3):  # the factors of another beta are not reused
        got = discriminant.source_scores(kind.array(z[:20]), source, beta)
        densities = [
            multivariate_normal(mean, covariance + beta * np.eye(d)).logpdf(z[:20])
            for mean, covariance in zip(means, covariances, strict=True)
        ]
        expected = np.stack(densities, axis=1) + np.log(priors) + d / 2 * np.log(2 * np.pi)
        assert kind.holds(got)
        close(got, expected, 20 * kind.tolerance)


@pytest.mark.parametrize("d", [4, 30])
def test_blocks_of_classes_make_no_difference(monkeypatch, d):
    z, y = problem(d=d, n_classes=40, n=800)
    source = source_moments(z, y)
    whole = discriminant.ridged_scores(z[:8], source, np.eye(d))
    monkeypatch.setattr(
        discriminant,
        "_class_blocks",
        lambda z, n: [slice(i, min(i + 7, n)) for i in range(0, n, 7)],
    )
    assert np.array_equal(discriminant.ridged_scores(z[:8], source, np.eye(d)), whole)


def test_many_classes_are_scored_in_several_blocks():
    z = np.zeros((64, 63))
    blocks = discriminant._class_blocks(z, 1000)
    assert len(blocks) > 1
    assert np.array_equal(np.concatenate([np.arange(1000)[b] for b in blocks]), np.arange(1000))


def test_confidence_is_the_largest_softmax_probability(kind):
    g = np.random.default_rng(0).standard_normal((9, 5)) * 30
    got = discriminant.confidence(kind.array(g))
    close(got, softmax(g, axis=1).max(axis=1), kind.tolerance)


def test_confidence_survives_huge_scores():
    assert discriminant.confidence(np.array([[-1e6, 1e6], [1e6, 1e6]])).tolist() == [1.0, 0.5]
