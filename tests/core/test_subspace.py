import numpy as np
import pytest
import scipy.linalg
from sklearn.covariance import oas
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from caster.core import subspace
from caster.core.moments import ClassScatter
from caster.core.subspace import Basis, HeldOutBasis, WithinScatter
from tests.conftest import close, problem
from tests.support import reference


@pytest.fixture
def source():
    return problem()


def fitted(h, y, n_classes, k0):
    scatter = ClassScatter.of(h, y, n_classes)
    S_w = WithinScatter.of(scatter)
    return scatter, S_w, Basis.of(scatter, S_w, k0)


def matrix(S_w):
    """S_w itself, from its factor."""
    factor = np.asarray(S_w.factor)
    return factor @ factor.T


@pytest.mark.parametrize(
    ("k_max", "n_classes", "width", "expected"),
    [(128, 10, 512, 9), (128, 1000, 2048, 128), (128, 1000, 64, 64), (3, 10, 512, 3)],
)
def test_retained_rank(k_max, n_classes, width, expected):
    assert subspace.retained_rank(k_max, n_classes, width) == expected


@pytest.mark.parametrize(("batch_size", "expected"), [(1, 0), (2, 1), (9, 8), (10, 9), (64, 9)])
def test_active_rank(batch_size, expected):
    assert subspace.active_rank(9, batch_size) == expected


def test_scatter_matrices_are_the_reference(kind, source):
    h, y = source
    scatter, S_w, _ = fitted(kind.array(h), kind.index(y), 5, 4)
    exact, S_b = reference.scatter_matrices(h, y, 5)
    variances = np.diag(exact)
    shrunk = (1 - S_w.shrinkage) * exact + S_w.shrinkage * np.diag(variances)
    close(matrix(S_w), shrunk, 10 * kind.tolerance)
    F = np.asarray(subspace.between_factor(scatter))
    close(F.T @ F, S_b, kind.tolerance)


def test_shrinkage_is_scikit_learns():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((50, 8)) @ rng.standard_normal((8, 8))
    X /= np.sqrt((X**2).mean(axis=0))
    _, expected = oas(X, assume_centered=True)
    assert subspace.oas_shrinkage(X.T @ X / 50, 50) == pytest.approx(expected)


@pytest.mark.parametrize(("samples", "low", "high"), [(60, 0.2, 1.0), (50_000, 0.0, 1e-3)])
def test_shrinkage_fades_with_more_samples(samples, low, high):
    rng = np.random.default_rng(0)
    y = np.arange(samples) % 5
    h = rng.standard_normal((samples, 20)) @ rng.standard_normal((20, 20)) + np.eye(5, 20)[y]
    assert low < fitted(h, y, 5, 4)[1].shrinkage < high


def test_a_constant_feature_has_no_weight():
    h, y = problem()
    h[:, 3] = 7.0
    *_, basis = fitted(h, y, 5, 4)
    assert np.isfinite(basis.U).all()
    close(basis.U[3], np.zeros(4), 1e-12)


def test_basis_solves_the_generalised_eigenproblem(source):
    h, y = source
    _, S_w, basis = fitted(h, y, 5, 4)
    _, S_b = reference.scatter_matrices(h, y, 5)
    values = scipy.linalg.eigh(S_b, matrix(S_w), eigvals_only=True)[::-1][:4]
    close(basis.U.T @ matrix(S_w) @ basis.U, np.eye(4), 1e-9)
    close(basis.U.T @ S_b @ basis.U, np.diag(values), 1e-9)


def test_basis_is_made_of_class_means(source):
    h, y = source
    scatter, S_w, basis = fitted(h, y, 5, 4)
    close(np.linalg.solve(matrix(S_w), scatter.means.T @ basis.B), basis.U, 1e-9)


def test_basis_agrees_across_namespaces(kind, source):
    h, y = source
    U = fitted(kind.array(h), kind.index(y), 5, 4)[2].U
    close(U, fitted(h, y, 5, 4)[2].U, 10 * kind.tolerance)


def test_the_basis_spans_the_lda_subspace():
    h, y = problem(n=20_000)
    *_, basis = fitted(h, y, 5, 4)
    lda = LinearDiscriminantAnalysis(solver="eigen", n_components=4).fit(h, y)
    angles = scipy.linalg.subspace_angles(basis.U, lda.scalings_[:, :4])
    assert np.max(angles) < 1e-2  # shrinkage is small, not none


def test_directions_without_between_class_scatter_are_left_out():
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(4), 50)
    h = rng.standard_normal((200, 6))
    for c in range(4):  # means on one line: a single direction tells the classes apart
        h[y == c] -= h[y == c].mean(axis=0)
        h[y == c, 0] += 3.0 * c
    assert fitted(h, y, 4, 3)[2].U.shape == (6, 1)


def few(n=45, d=30, n_classes=4):
    """More features than degrees of freedom, correlated, with classes of two samples and up."""
    rng = np.random.default_rng(1)
    y = np.r_[np.repeat(np.arange(n_classes), 2), rng.integers(n_classes - 1, size=n)]
    mixing = rng.standard_normal((3, d))
    h = rng.standard_normal((len(y), 3)) @ mixing + 0.3 * rng.standard_normal((len(y), d))
    return h + 2 * np.eye(n_classes, d)[y], y


def test_held_out_projections_are_the_reference(kind):
    h, y = few()
    arrays = kind.array(h), kind.index(y)
    scatter, S_w, basis = fitted(*arrays, 4, 3)
    found = HeldOutBasis.of(scatter, S_w, basis, arrays[0].dtype).project(*arrays)

    scatter, S_w, basis = fitted(h, y, 4, 3)
    rho, whole, m = S_w.shrinkage, matrix(S_w), h.mean(axis=0)
    expected = np.empty_like(found, shape=(len(y), 3))
    for i in range(len(y)):
        rest = np.arange(len(y)) != i
        means = np.array([h[rest][y[rest] == c].mean(axis=0) for c in range(4)])
        within = sum(np.outer(r, r) for r in h[rest] - means[y[rest]])
        S_rest = whole - (1 - rho) * (scatter.within - within) / len(y)
        U_rest = np.linalg.solve(S_rest, means.T @ basis.B)
        expected[i] = U_rest.T @ (h[i] - m) + basis.U.T @ m
    close(found, expected, 100 * kind.tolerance)


def test_held_out_classes_lie_as_far_apart_as_new_samples():
    """In-sample projections overstate the margin; held-out ones do not."""
    rng = np.random.default_rng(0)
    centres = 0.2 * rng.standard_normal((5, 100))
    y, new_y = np.arange(200) % 5, np.arange(20_000) % 5
    h, new_h = (rng.standard_normal((len(c), 100)) + centres[c] for c in (y, new_y))
    scatter, S_w, basis = fitted(h, y, 5, 4)
    seen = h @ basis.U
    unseen = HeldOutBasis.of(scatter, S_w, basis, h.dtype).project(h, y)

    def spread(z, y):  # between-class variance over within-class variance
        within, between = reference.scatter_matrices(z, y, 5)
        return np.trace(between) / np.trace(within)

    truth = spread(new_h @ basis.U, new_y)
    assert spread(seen, y) > 2 * truth
    assert spread(unseen, y) == pytest.approx(truth, rel=0.25)
