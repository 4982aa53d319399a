import numpy as np
import pytest

from caster.core.moments import batch_moments
from caster.core.transport import estimate, pull
from tests.conftest import close, problem
from tests.support import reference
from tests.support.moments import source_moments


@pytest.mark.parametrize("batch_size", [5, 7, 8, 64])
def test_estimate_is_the_reference(kind, batch_size):
    z, y = problem(d=4)
    source = source_moments(z, y, kind.array, kind.index)
    target = (1.7 * problem(d=4, seed=5)[0] + 2.0)[:batch_size]
    fitted = estimate(kind.array(target), source, lam=0.7)
    *_, m_s, C_s, _ = reference.moments(z, y, 5)
    A, b = reference.transport(target, m_s, C_s, 0.7)
    assert fitted.diagonal == (batch_size < 8)
    assert kind.holds(fitted.A)
    close(fitted.A, A, kind.tolerance)
    close(fitted.b, b, kind.tolerance)
    close(fitted.inverse, np.linalg.inv(A), kind.tolerance)


def test_the_map_matches_global_moments_exactly_without_shrinkage():
    z, y = problem(d=4)
    source = source_moments(z, y)
    target = problem(d=4, seed=9)[0]
    fitted = estimate(target, source, lam=1e-12)
    mean, covariance = batch_moments(z @ fitted.A.T + fitted.b)
    close(mean, target.mean(axis=0), 1e-9)
    close(covariance, np.cov(target.T, bias=True), 1e-6)


@pytest.mark.slow
def test_full_map_is_skadas_coral():
    from skada._mapping import CORALAdapter

    z, y = problem(d=4)
    target = problem(d=4, seed=9)[0] * 1.5
    fitted = estimate(target, source_moments(z, y), lam=0.0)
    both = np.concatenate([z, target])
    domain = np.concatenate([np.ones(len(z), int), -2 * np.ones(len(target), int)])
    coral = CORALAdapter(reg=0.0).fit(both, sample_domain=domain)
    expected = coral.cov_source_inv_sqrt_ @ coral.cov_target_sqrt_  # skada multiplies rows
    close(fitted.A.T, expected, 1e-8)


def test_diagonal_map_is_optimal_transport_between_gaussians():
    import ot

    z, y = problem(d=4)
    source = source_moments(z, y)
    target = problem(d=4, seed=9)[0][:7] * 1.5
    fitted = estimate(target, source, lam=0.2)
    shrunk = [np.diag(np.diag(C) + 0.2) for C in (source.covariance, batch_moments(target)[1])]
    A, b = ot.gaussian.bures_wasserstein_mapping(source.mean, target.mean(axis=0), *shrunk)
    assert fitted.diagonal
    close(fitted.A, A, 1e-8)
    close(fitted.b, np.ravel(b), 1e-8)


def test_pull_is_the_inverse_map(kind):
    z, y = problem(d=4)
    source = source_moments(z, y, kind.array, kind.index)
    fitted = estimate(kind.array(z[:64] * 3.0), source, lam=1.0)
    A, b = np.asarray(fitted.A, dtype=float), np.asarray(fitted.b, dtype=float)
    pulled = pull(fitted, kind.array(z[:9]))
    close(pulled, np.linalg.solve(A, (z[:9] - b).T).T, kind.tolerance)
