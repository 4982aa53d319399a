import numpy as np
import pytest
import scipy.linalg

from caster.core import linalg
from tests.conftest import close


@pytest.fixture
def matrices():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((7, 4, 9))
    return x @ x.transpose(0, 2, 1) / 9 + 0.1 * np.eye(4)


def test_roots_are_scipys(kind, matrices):
    root, inverse = linalg.symmetric_roots(kind.array(matrices[0]), 0.5)
    expected = scipy.linalg.sqrtm(matrices[0] + 0.5 * np.eye(4)).real
    assert kind.holds(root)
    close(root, expected, kind.tolerance)
    close(inverse, np.linalg.inv(expected), kind.tolerance)


def test_roots_of_a_singular_matrix_are_finite():
    flat = np.ones((3, 3))
    root, _ = linalg.symmetric_roots(flat, 1e-12)
    assert np.isfinite(root).all()
    close(root @ root, flat, 1e-9)


def test_cholesky_is_numpys(kind, matrices):
    factors = linalg.cholesky(kind.array(matrices))
    assert kind.holds(factors)
    close(factors, np.linalg.cholesky(matrices), kind.tolerance)


def test_cholesky_leaves_its_input_alone(matrices):
    before = matrices.copy()
    matrices.flags.writeable = False
    linalg.cholesky(matrices)
    assert np.array_equal(matrices, before)


@pytest.mark.parametrize("order", [2, linalg.SMALL_ORDER])
def test_matrices_that_cannot_be_factored_give_nan(kind, order):
    """No namespace raises: the host of a GPU could not either."""
    indefinite = kind.array(np.diag(np.linspace(1.0, -1.0, order))[None])
    rows, singular = kind.array(np.ones((1, 3, order))), kind.array(np.zeros((1, order, order)))
    assert np.isnan(np.asarray(linalg.whiten(rows, linalg.cholesky(indefinite)))).all()
    assert not np.isfinite(np.asarray(linalg.whiten(rows, singular))).any()
    for root in linalg.symmetric_roots(kind.array(np.full((order, order), np.nan)), 1.0):
        assert np.isnan(np.asarray(root)).all()


@pytest.mark.parametrize("width", [4, linalg.MIN_PANEL, linalg.MIN_PANEL + 1])
def test_triangular_squares_are_those_of_whitened_rows(kind, width):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, width))
    factors = np.tril(rng.standard_normal((2, width, width))) / width + np.eye(width)
    found = linalg.triangular_squares(kind.array(x), linalg.whiteners(kind.array(factors)))
    assert kind.holds(found)
    for rows, factor, squares in zip(x, factors, np.asarray(found), strict=True):
        expected = scipy.linalg.solve_triangular(factor, rows.T, lower=True)
        close(squares, np.sum(expected**2, axis=0), 10 * kind.tolerance)


@pytest.mark.parametrize("order", [1, linalg.LEAF, linalg.LEAF + 1, 63])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_systems_are_factored_and_solved_as_scipy_does(order, dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, order, 2 * order + 1))
    matrices, columns = x @ x.mT / order, rng.standard_normal((3, order, 5))
    systems = np.concatenate([matrices, columns], axis=2).astype(dtype)
    linalg.factor_and_whiten(systems)
    tolerance = 200 * np.finfo(dtype).eps
    for system, matrix, column in zip(systems, matrices, columns, strict=True):
        factor = scipy.linalg.cholesky(matrix)
        close(np.triu(system[:, :order]), factor, tolerance)
        whitened = scipy.linalg.solve_triangular(factor, column, trans="T")
        close(system[:, order:], whitened, tolerance)


def test_one_indefinite_system_spoils_no_other():
    fine, indefinite = np.eye(20), np.diag(np.linspace(1.0, -1.0, 20))
    systems = np.concatenate([np.stack([fine, indefinite]), np.ones((2, 20, 1))], axis=2)
    with np.errstate(invalid="ignore"):
        linalg.factor_and_whiten(systems)
    assert np.array_equal(systems[0], np.column_stack([fine, np.ones(20)]))
    assert np.isnan(systems[1, -1]).any()


@pytest.mark.parametrize("rows", [1, 5])
def test_whiten_solves_for_every_row(kind, matrices, rows):
    x = np.random.default_rng(2).standard_normal((7, rows, 4))
    factors = np.linalg.cholesky(matrices)
    whitened = linalg.whiten(kind.array(x), kind.array(factors))
    assert kind.holds(whitened)
    for got, row, factor in zip(np.asarray(whitened), x, factors, strict=True):
        close(got, scipy.linalg.solve_triangular(factor, row.T, lower=True).T, kind.tolerance)


def test_whiten_leaves_views_unchanged(matrices):
    x = np.random.default_rng(3).standard_normal((4, 14, 7)).T  # Fortran order
    before = x.copy()
    whitened = linalg.whiten(x[:, ::2], np.linalg.cholesky(matrices))
    assert np.array_equal(x, before)
    expected = np.linalg.solve(np.linalg.cholesky(matrices), x[:, ::2].transpose(0, 2, 1))
    close(whitened, expected.transpose(0, 2, 1), 1e-9)


@pytest.mark.parametrize("order", ["C", "F"])
def test_whiten_can_reuse_the_memory_of_the_rows(kind, matrices, order):
    x = np.asarray(np.random.default_rng(2).standard_normal((7, 5, 4)), order=order)
    expected = linalg.whiten(x, np.linalg.cholesky(matrices))
    factors = kind.array(np.linalg.cholesky(matrices))
    close(linalg.whiten(kind.array(x), factors, overwrite=True), expected, kind.tolerance)


def test_squares(kind):
    x = np.random.default_rng(5).standard_normal((3, 6, 4))
    close(linalg.squares(kind.array(x)), (x**2).sum(axis=-1), kind.tolerance)


def test_mahalanobis_is_the_quadratic_form(kind, matrices):
    x = np.random.default_rng(4).standard_normal((6, 4))
    got = linalg.mahalanobis(kind.array(x), linalg.cholesky(kind.array(matrices[0])))
    close(got, [np.sqrt(r @ np.linalg.inv(matrices[0]) @ r) for r in x], kind.tolerance)


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e7, 1e8])
def test_newton_schulz_gives_the_same_roots(kind, condition):
    rng = np.random.default_rng(0)
    basis, _ = np.linalg.qr(rng.standard_normal((6, 6)))
    matrix = (basis * np.geomspace(1.0, condition, 6)) @ basis.T
    root, inverse = linalg.newton_schulz_roots(kind.array(matrix))
    assert kind.holds(root)
    expected = (basis * np.geomspace(1.0, condition, 6) ** 0.5) @ basis.T
    # What float32 itself loses of the smallest eigenvalue grows with the condition.
    tolerance = kind.tolerance if kind.dtype == "float64" else 1e-7 * condition**0.5 + 1e-6
    close(root, expected, tolerance)
    if kind.dtype == "float64":
        close(inverse, np.linalg.inv(expected), 1e-8 * condition**0.25)


def test_newton_schulz_returns_nan_beyond_its_reach():
    root, inverse = linalg.newton_schulz_roots(np.diag([1.0, 1e14]))
    assert np.isnan(root).all()
    assert np.isnan(inverse).all()
