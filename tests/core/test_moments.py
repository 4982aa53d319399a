import numpy as np
import pytest

from caster.core.moments import ClassMoments, ClassScatter, batch_moments
from tests.conftest import close, problem
from tests.support import reference


def test_class_moments_are_the_reference(kind):
    z, y = problem(d=4)
    means, covariances, *_ = reference.moments(z, y, 5)
    moments = ClassMoments.of(kind.array(z), kind.index(y), 5)
    close(moments.means, means, kind.tolerance)
    close(moments.covariances, covariances, kind.tolerance)
    assert np.array_equal(np.asarray(moments.counts), np.bincount(y))


def test_batch_moments_are_numpys(kind):
    z, _ = problem(d=4)
    mean, covariance = batch_moments(kind.array(z))
    assert kind.holds(mean)
    assert kind.holds(covariance)
    close(mean, z.mean(axis=0), kind.tolerance)
    close(covariance, np.cov(z.T, bias=True), kind.tolerance)


@pytest.mark.parametrize("kind_of_sum", [ClassScatter, ClassMoments])
def test_a_class_absent_from_a_chunk_changes_nothing(kind_of_sum):
    z, y = problem(d=3)
    whole = kind_of_sum.of(z, y, 5)
    by_class = [kind_of_sum.of(z[y == c], y[y == c], 5) for c in range(5)]
    total = by_class[3] + by_class[0] + by_class[4] + by_class[1] + by_class[2]
    for name in ("counts", "means", "within" if kind_of_sum is ClassScatter else "scatters"):
        close(getattr(total, name), getattr(whole, name), 1e-12)


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1.0, 1e10, 1e30])
def test_float32_scatter_survives_scale(scale):
    h, y = problem(dtype=np.float32)
    expected, _ = reference.scatter_matrices(h.astype(float), y, 5)
    scatter = ClassScatter.of(h * np.float32(scale), y, 5)
    close(scatter.within / scatter.total / scale**2, expected, 1e-5)


@pytest.mark.parametrize(("dtype", "offset"), [(np.float64, 1e6), (np.float32, 1e3)])
def test_a_large_offset_costs_no_precision(dtype, offset):
    h, y = problem(n=20_000)
    far = (h + offset).astype(dtype)
    h = far.astype(float) - offset  # what rounding to the dtype has left
    expected, _ = reference.scatter_matrices(h, y, 5)
    scatter = ClassScatter.of(far[:99], y[:99], 5) + ClassScatter.of(far[99:], y[99:], 5)
    close(scatter.within / scatter.total, expected, 1e-6)
    close(scatter.means - offset, [h[y == c].mean(axis=0) for c in range(5)], 1e-6)


def test_removed_samples_leave_the_moments_of_the_others(kind):
    z, y = problem(d=4)
    rest = np.arange(len(y)) % 3 > 0
    whole = ClassMoments.of(kind.array(z + 100.0), kind.index(y), 5)
    removed = ClassMoments.of(kind.array(z[~rest] + 100.0), kind.index(y[~rest]), 5)
    left = whole - removed
    for c in range(5):
        rows = z[rest & (y == c)]
        assert float(left.counts[c]) == len(rows)
        close(left.means[c, :] - 100.0, rows.mean(axis=0), 100 * kind.tolerance)
        close(left.covariances[c, :, :], np.cov(rows.T, bias=True), 100 * kind.tolerance)
