import numpy as np
import pytest
import scipy.linalg
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from caster.core import subspace
from caster.core.moments import ClassScatter
from tests import reference
from tests.conftest import close, problem


@pytest.fixture
def source():
    return problem()


def basis(h, y, n_classes, k0, rho):
    scatter = ClassScatter.of(h, y, n_classes)
    S_w = subspace.within_scatter(scatter, rho)
    return subspace.discriminative_basis(S_w, subspace.between_factor(scatter), k0), S_w


@pytest.mark.parametrize(
    ("k_max", "n_classes", "width", "expected"),
    [(128, 10, 512, 9), (128, 1000, 2048, 128), (128, 1000, 64, 64), (3, 10, 512, 3)],
)
def test_retained_rank(k_max, n_classes, width, expected):
    assert subspace.retained_rank(k_max, n_classes, width) == expected


@pytest.mark.parametrize(("batch_size", "expected"), [(1, 0), (2, 1), (9, 8), (10, 9), (64, 9)])
def test_active_rank(batch_size, expected):
    assert subspace.active_rank(9, batch_size) == expected


def test_scatter_matrices_are_the_sums_they_stand_for(kind, source):
    h, y = source
    scatter = ClassScatter.of(kind.array(h), kind.index(y), 5)
    S_w, S_b = reference.scatter_matrices(h, y, 5)
    close(subspace.within_scatter(scatter, 0.0), S_w, kind.tolerance)
    F = np.asarray(subspace.between_factor(scatter))
    close(F.T @ F, S_b, kind.tolerance)
    assert subspace.scatter_ridge(scatter, 0.01) == pytest.approx(0.01 * np.trace(S_w) / 12)


def test_basis_solves_the_generalised_eigenproblem(source):
    h, y = source
    rho = 0.01
    U, S_w = basis(h, y, 5, 4, rho)
    _, S_b = reference.scatter_matrices(h, y, 5)
    values = scipy.linalg.eigh(S_b, S_w, eigvals_only=True)[::-1][:4]
    close(U.T @ S_w @ U, np.eye(4), 1e-9)
    close(U.T @ S_b @ U, np.diag(values), 1e-9)


def test_basis_agrees_across_namespaces(kind, source):
    h, y = source
    U, _ = basis(kind.array(h), kind.index(y), 5, 4, 0.01)
    expected, _ = basis(h, y, 5, 4, 0.01)
    close(U, expected, 10 * kind.tolerance)


def test_basis_spans_what_lda_spans(source):
    h, y = source
    U, _ = basis(h, y, 5, 4, 0.0)
    lda = LinearDiscriminantAnalysis(solver="eigen", n_components=4).fit(h, y)
    angles = scipy.linalg.subspace_angles(U, lda.scalings_[:, :4])
    assert np.max(angles) < 1e-6


def test_directions_without_between_class_scatter_are_left_out():
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(4), 50)
    h = rng.standard_normal((200, 6))
    for c in range(4):  # means on one line: a single direction tells the classes apart
        h[y == c] -= h[y == c].mean(axis=0)
        h[y == c, 0] += 3.0 * c
    assert basis(h, y, 4, 3, 0.01)[0].shape == (6, 1)
