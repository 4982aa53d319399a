"""Moments of channels, and the map that carries a target's to the source's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from caster.core.channels import (
    ChannelMoments,
    Site,
    divergence,
    measured_grid,
    optimal_map,
    shrunk,
    to_source,
    to_source_full,
)
from tests.conftest import close


def values(n, c=3, seed=0, positions=4):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, c, positions)) * [[[1.0], [5.0], [0.1]][:c]] + 7


@pytest.mark.parametrize("axis", [1, -2])
def test_moments_are_the_mean_and_variance_of_each_channel(kind, axis):
    x = values(6)
    found = ChannelMoments.of(kind.array(x), axis)
    assert kind.holds(found.mean)
    assert kind.holds(found.variance)
    assert found.count == 6
    for c in range(3):
        channel = x[:, c].ravel()
        assert float(found.mean[c]) == pytest.approx(sum(channel) / 24, rel=kind.tolerance)
        spread = sum((v - channel.mean()) ** 2 for v in channel) / 24
        assert float(found.variance[c]) == pytest.approx(spread, rel=10 * kind.tolerance)


def test_channels_last_are_the_same_channels():
    x = values(5)
    first, last = ChannelMoments.of(x, 1), ChannelMoments.of(x.transpose(0, 2, 1), -1)
    close(last.mean, first.mean, 1e-12)
    close(last.variance, first.variance, 1e-12)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.integers(0, 99))
def test_merging_gives_the_moments_of_all_samples(sizes, seed):
    x = values(sum(sizes), seed=seed)
    parts = np.split(x, np.cumsum(sizes)[:-1])
    merged = ChannelMoments.of(parts[0], 1)
    for part in parts[1:]:
        merged = merged + ChannelMoments.of(part, 1)
    assert merged.count == sum(sizes)
    close(merged.mean, x.mean(axis=(0, 2)), 1e-12)
    close(merged.variance, x.var(axis=(0, 2)), 1e-12)


def test_a_discounted_past_has_at_most_the_given_weight():
    past, batch = ChannelMoments.of(values(50, seed=1), 1), ChannelMoments.of(values(8), 1)
    both = past.at_most(24) + batch
    assert both.count == 32
    close(both.mean, 0.75 * past.mean + 0.25 * batch.mean, 1e-12)
    assert past.at_most(99).count == 50


def test_shrunk_blends_by_samples():
    source, batch = ChannelMoments.of(values(500, seed=1), 1), ChannelMoments.of(values(8), 1)
    found = shrunk(batch, source, prior=24)
    close(found.mean, 0.75 * source.mean + 0.25 * batch.mean, 1e-12)
    close(found.variance, 0.75 * source.variance + 0.25 * batch.variance, 1e-12)
    close(shrunk(batch, source, prior=0).mean, batch.mean, 0)


@given(st.integers(0, 99))
def test_the_map_sends_target_moments_to_source_moments(seed):
    x = values(9, seed=seed)
    source = ChannelMoments(99.0, np.array([1.0, -2.0, 3.0]), np.array([4.0, 0.5, 9.0]))
    scale, shift = to_source(ChannelMoments.of(x, 1), source, eps=0.0)
    moved = ChannelMoments.of(x * scale[:, None] + shift[:, None], 1)
    close(moved.mean, source.mean, 1e-9)
    close(moved.variance, source.variance, 1e-9)


def test_the_map_of_the_source_onto_itself_is_the_identity():
    source = ChannelMoments.of(values(9), 1)
    scale, shift = to_source(source, source, eps=1e-5)
    np.testing.assert_array_equal(scale, 1.0)
    np.testing.assert_array_equal(shift, 0.0)


def test_a_dead_channel_stays_finite():
    dead = ChannelMoments(9.0, np.array([0.0]), np.array([0.0]))
    scale, shift = to_source(dead, dead, eps=1e-5)
    assert (scale.item(), shift.item()) == (1.0, 0.0)


def test_sites_are_equal_only_if_all_fields_are():
    sites = {Site("a", "in", 1), Site("a", "in", -1), Site("a", "out", 1), Site("a", "in", 1)}
    assert len(sites) == 3


# --- the grid of positions that are measured -----------------------------------------------------

PER_AXIS = {1: 196, 2: 14, 3: 6}  # positions that a grid has at least, by spatial axes: 196^(1/k)


def grid_of(x, axis):
    """Every s-th position of each spatial axis, one by one; s = size // (positions an axis)."""
    spatial = [a for a in range(1, x.ndim) if a != axis % x.ndim]
    for a in spatial:
        step = max(1, x.shape[a] // PER_AXIS[len(spatial)])
        x = np.stack([x.take(i, axis=a) for i in range(0, x.shape[a], step)], axis=a)
    return x


SPATIAL = [
    (),
    (195,),
    (392,),
    (1001,),
    (14, 14),
    (28, 27),
    (29, 55),
    (56, 15),
    (63, 1),
    (5, 12, 11),
    (12, 13, 25),
]


@pytest.mark.parametrize("sizes", SPATIAL, ids=str)
@pytest.mark.parametrize("axis", [1, -1])
def test_the_grid_is_every_so_manyth_position(kind, axis, sizes):
    shape = (2, 3, *sizes) if axis == 1 else (2, *sizes, 3)
    x = np.arange(np.prod(shape), dtype=float).reshape(shape)
    found = Site("a", "in", axis).on_grid(kind.array(x))
    assert kind.holds(found)
    np.testing.assert_array_equal(np.asarray(found), grid_of(x, axis))


@given(st.integers(1, 300), st.integers(1, 300))
def test_a_grid_has_between_one_and_two_times_its_positions(height, width):
    """In each direction: all of an axis, or from 14 to 28 of its positions."""
    for size, found in zip((height, width), measured_grid((height, width)), strict=True):
        count = len(range(size)[found])
        assert count == size if size < 28 else 14 <= count < 28


@given(st.integers(1, 27), st.integers(1, 27), st.sampled_from([1, -1]))
def test_small_maps_are_measured_whole(height, width, axis):
    x = np.zeros((2, 3, height, width) if axis == 1 else (2, height, width, 3))
    assert Site("a", "out", axis).on_grid(x) is x


@pytest.mark.parametrize("axis", [1, -1])
def test_moments_on_a_grid_are_about_those_of_all_positions(axis):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 3, 64, 64))
    # Neighbours are alike, as in images: a mean over 5 x 5 positions.
    for a in (2, 3):
        x = sum(np.roll(x, step, axis=a) for step in range(-2, 3)) / 5
    x = x * np.array([1.0, 5.0, 0.1])[:, None, None] + np.array([1.0, -3.0, 0.0])[:, None, None]
    x = x if axis == 1 else np.moveaxis(x, 1, -1)
    whole = ChannelMoments.of(x, axis, full=True)
    found = ChannelMoments.of(Site("a", "in", axis).on_grid(x), axis, full=True)
    assert found.count == whole.count
    spread = np.sqrt(whole.variance)
    # Standard errors of 32 x 256 independent values are 0.011 and 0.016 of a deviation.
    assert (np.abs(found.mean - whole.mean) < 0.04 * spread).all()
    np.testing.assert_allclose(found.variance, whole.variance, rtol=0.06)
    error = np.abs(found.covariance - whole.covariance) / np.outer(spread, spread)
    assert error.max() < 0.06


def mixed(n, seed=0, c=3):
    """Values whose channels depend on one another."""
    rng = np.random.default_rng(seed)
    return np.einsum("dc,ncp->ndp", rng.normal(size=(c, c)), rng.normal(size=(n, c, 5))) + 3


def covariance(x):
    rows = np.moveaxis(x, 1, -1).reshape(-1, x.shape[1])
    return np.cov(rows, rowvar=False, bias=True)


@pytest.mark.parametrize("axis", [1, -2])
def test_covariances_are_measured_on_request(kind, axis):
    x = mixed(6)
    assert ChannelMoments.of(kind.array(x), axis).covariance is None
    found = ChannelMoments.of(kind.array(x), axis, full=True)
    assert kind.holds(found.covariance)
    close(found.covariance, covariance(x), 10 * kind.tolerance)
    close(np.diag(np.asarray(found.covariance)), np.asarray(found.variance), 10 * kind.tolerance)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.integers(0, 99))
def test_covariances_merge_too(sizes, seed):
    x = mixed(sum(sizes), seed)
    parts = [ChannelMoments.of(p, 1, full=True) for p in np.split(x, np.cumsum(sizes)[:-1])]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged + part
    close(merged.covariance, covariance(x), 1e-10)
    assert (merged + ChannelMoments.of(x, 1)).covariance is None
    assert merged.at_most(1).covariance is merged.covariance


def test_covariances_are_shrunk_too():
    source, batch = (ChannelMoments.of(mixed(n, n), 1, full=True) for n in (50, 8))
    found = shrunk(batch, source, prior=24)
    close(found.covariance, 0.75 * source.covariance + 0.25 * batch.covariance, 1e-12)
    assert shrunk(ChannelMoments.of(mixed(8), 1), source, prior=24).covariance is None


@given(st.integers(0, 99))
def test_the_full_map_sends_target_mean_and_covariance_to_the_source(seed):
    target, goal = mixed(40, seed), mixed(40, seed + 1000)
    moments = [ChannelMoments.of(x, 1, full=True) for x in (target, goal)]
    A, b = to_source_full(*moments, eps=0.0)
    moved = np.einsum("dc,ncp->ndp", A, target) + b[:, None]
    close(covariance(moved), covariance(goal), 1e-6)
    close(moved.mean(axis=(0, 2)), goal.mean(axis=(0, 2)), 1e-6)
    close(A, A.T, 1e-6)
    assert np.linalg.eigvalsh((A + A.T) / 2).min() > 0  # the one such map, so optimal


def test_the_full_map_of_the_source_onto_itself_is_the_identity():
    source = ChannelMoments.of(mixed(40), 1, full=True)
    A, b = to_source_full(source, source, eps=0.01)
    close(A, np.eye(3), 1e-10)
    close(b, np.zeros(3), 1e-9)


def test_the_full_map_of_uncorrelated_channels_is_diagonal():
    variances = np.array([4.0, 1.0, 9.0]), np.array([1.0, 2.0, 0.25])
    means = np.array([1.0, 0.0, 2.0]), np.array([0.0, 3.0, 1.0])
    moments = [ChannelMoments(9.0, m, v, np.diag(v)) for m, v in zip(means, variances, strict=True)]
    A, b = to_source_full(*moments, eps=0.01)
    scale, shift = to_source(*moments, eps=0.01)
    close(A, np.diag(scale), 1e-12)
    close(b, shift, 1e-12)


def test_the_optimal_map_moves_less_than_the_papers():
    """Both match the covariance; they differ in the mean squared displacement."""
    C_t, C_s = covariance(mixed(40)), covariance(mixed(40, 1))

    def root(C):
        values, V = np.linalg.eigh(C)
        return (V * np.sqrt(values)) @ V.T

    theirs = root(C_s) @ np.linalg.inv(root(C_t))
    ours = optimal_map(C_t, root(C_s))
    close(theirs @ C_t @ theirs.T, ours @ C_t @ ours.T, 1e-9)
    moved = [np.trace((A - np.eye(3)) @ C_t @ (A - np.eye(3)).T) for A in (ours, theirs)]
    assert moved[0] < moved[1]


def gaussians(seed, c=3):
    rng = np.random.default_rng(seed)
    return [ChannelMoments(9.0, rng.normal(size=c), rng.uniform(0.2, 4, size=c)) for _ in range(2)]


@given(st.integers(0, 99))
def test_divergence_is_that_of_gaussians(seed):
    """By numerical integration of p log(p / q)."""
    recent, past = gaussians(seed)
    found = divergence(recent, past)
    p, q = (stats.norm(one.mean, np.sqrt(one.variance)) for one in (recent, past))
    x = np.linspace(p.mean() - 12 * p.std(), p.mean() + 12 * p.std(), 2001)
    exact = integrate.simpson(p.pdf(x) * (p.logpdf(x) - q.logpdf(x)), x=x, axis=0)
    close(found, exact, 1e-8)


def test_divergence_in_any_array_namespace(kind):
    parts = [(kind.array(one.mean), kind.array(one.variance)) for one in gaussians(1)]
    found = divergence(*(ChannelMoments(9.0, *own) for own in parts))
    assert kind.holds(found)
    close(found, divergence(*gaussians(1)), 10 * kind.tolerance)


@given(st.integers(0, 99), st.floats(0.1, 10), st.floats(-9, 9))
def test_divergence_has_no_unit_and_no_origin(seed, scale, shift):
    both = gaussians(seed)
    mapped = [ChannelMoments(9.0, scale * m.mean + shift, scale**2 * m.variance) for m in both]
    close(divergence(*mapped), divergence(*both), 1e-8)
    assert (divergence(*both) >= 0).all()
    close(divergence(both[0], both[0]), np.zeros(3), 1e-12)


def test_channels_that_do_not_vary_diverge_from_nothing():
    dead, live = (ChannelMoments(9.0, np.ones(1), np.full(1, v)) for v in (0.0, 2.0))
    moved = ChannelMoments(9.0, np.full(1, 5.0), np.zeros(1))
    for pair in ((dead, live), (live, dead), (dead, moved)):
        np.testing.assert_array_equal(divergence(*pair), 0.0)


def test_a_channel_that_varies_by_rounding_alone_has_not_changed():
    """Its variance depends on how the samples were batched."""
    mean, count = np.array([3.0, 3.0]), 64.0
    past = ChannelMoments(4 * count, mean, np.array([1e-12, 1.0]))
    recent = ChannelMoments(count, mean, np.array([3e-7, 4.0]))
    found = divergence(recent, past)
    assert found[0] == 0
    assert found[1] > 0.5
