"""Moments of channels per class, and of mixtures of the classes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caster.core.arrays import like, to_numpy
from caster.core.channels import ChannelMoments
from caster.core.class_moments import ClassChannelMoments
from tests.conftest import close

C, WIDTH, POSITIONS = 4, 3, 5
PARTS = "counts", "means", "variances"

seeds = st.integers(0, 2**31 - 1)


def problem(seed, n=40, present=C):
    """Values (n, c, positions) whose means and spreads depend on the class, and the classes."""
    rng = np.random.default_rng(seed)
    y = rng.integers(present, size=n)
    centres, spreads = rng.normal(size=(C, WIDTH, 1)) * 3, rng.uniform(0.1, 2, size=(C, WIDTH, 1))
    return centres[y] + spreads[y] * rng.normal(size=(n, WIDTH, POSITIONS)), y


def measured(x, y):
    return ClassChannelMoments.of(x, 1, y, C)


def same(one, other, tolerance=1e-10):
    for name in PARTS:
        close(getattr(one, name), getattr(other, name), tolerance)


def same_channels(one: ChannelMoments, other: ChannelMoments, tolerance=1e-10):
    close(one.mean, other.mean, tolerance)
    close(one.variance, other.variance, tolerance)


@pytest.mark.parametrize("axis", [1, -2])
def test_moments_are_those_of_the_samples_of_each_class(kind, axis):
    x, y = problem(0, present=3)  # the last class does not occur
    values = kind.array(x)
    found = ClassChannelMoments.of(values, axis, like(y, values), C)
    for c in range(3):
        for j in range(WIDTH):
            own = [float(v) for i in range(len(x)) if y[i] == c for v in x[i, j]]
            mean = sum(own) / len(own)
            variance = sum((v - mean) ** 2 for v in own) / len(own)
            assert float(found.counts[c]) == len(own) / POSITIONS
            assert float(found.means[c, j]) == pytest.approx(mean, rel=10 * kind.tolerance)
            assert float(found.variances[c, j]) == pytest.approx(variance, rel=30 * kind.tolerance)
    assert float(found.counts[3]) == 0
    assert not to_numpy(found.means)[3].any()
    assert not to_numpy(found.variances)[3].any()


def test_values_without_positions():
    x, y = problem(1)
    found = ClassChannelMoments.of(x[:, :, 0], -1, y, C)
    for c in range(C):
        close(found.means[c], x[y == c, :, 0].mean(axis=0), 1e-12)
        close(found.variances[c], x[y == c, :, 0].var(axis=0), 1e-12)


def test_a_large_common_offset_costs_no_digits():
    x, y = problem(2)
    x = x / x.std(axis=(0, 2), keepdims=True)
    close(measured(x + 2.0**26, y).variances, measured(x, y).variances, 1e-7)


@given(seeds, st.lists(st.integers(0, 40), max_size=5), st.randoms())
def test_merging_chunks_in_any_order_gives_the_whole(seed, cuts, order):
    x, y = problem(seed)
    parts = [part for part in np.split(np.arange(len(x)), sorted(cuts)) if len(part)]
    order.shuffle(parts)
    merged = measured(x[parts[0]], y[parts[0]])
    for part in parts[1:]:
        merged = merged + measured(x[part], y[part])
    same(merged, measured(x, y))


def test_a_class_that_one_side_has_not_seen_is_the_other_sides():
    x, y = problem(3)
    one, other = measured(x[y < 2], y[y < 2]), measured(x[y >= 2], y[y >= 2])
    for merged in (one + other, other + one):
        for name in PARTS:
            np.testing.assert_array_equal(getattr(merged, name)[:2], getattr(one, name)[:2])
            np.testing.assert_array_equal(getattr(merged, name)[2:], getattr(other, name)[2:])


def test_classes_may_be_appended_as_they_come():
    x, y = problem(4)
    few = ClassChannelMoments.of(x[y < 2], 1, y[y < 2], 2)
    late = measured(x[y >= 2], y[y >= 2])
    same(few + late, measured(x, y))
    same(late + few, measured(x, y))


@given(seeds)
def test_pooled_moments_are_those_of_all_samples(seed):
    x, y = problem(seed)
    found = measured(x, y).pooled()
    assert found.count == len(x)
    same_channels(found, ChannelMoments.of(x, 1))


@given(seeds, st.permutations(range(C)))
def test_the_names_of_the_classes_do_not_matter(seed, order):
    x, y = problem(seed)
    order = np.array(order)
    found, renamed = measured(x, y), measured(x, np.argsort(order)[y])
    same(renamed, ClassChannelMoments(*(getattr(found, name)[order] for name in PARTS)))
    pi = np.random.default_rng(seed).dirichlet(np.ones(C))
    same_channels(renamed.mixture(pi[order]), found.mixture(pi))
    same(
        renamed.shrunk(7.0),
        ClassChannelMoments(*(getattr(found.shrunk(7.0), p)[order] for p in PARTS)),
    )


@given(seeds, st.lists(st.integers(0, 5), min_size=C, max_size=C).filter(any))
def test_a_mixture_has_the_moments_of_a_batch_resampled_to_it(seed, copies):
    """Each class repeated as a whole, so that the batch has exactly its moments."""
    x, y = problem(seed)
    found = measured(x, y)
    rows = np.concatenate([np.tile(np.flatnonzero(y == c), copies[c]) for c in range(C)])
    if len(rows):
        pi = np.bincount(y[rows], minlength=C) / len(rows)
        same_channels(found.mixture(pi), ChannelMoments.of(x[rows], 1))


def mapped(found, a, b):
    return ClassChannelMoments(found.counts, a * found.means + b, a**2 * found.variances)


@given(seeds, st.sampled_from([0.0, 3.0, 1e4]))
def test_affine_maps_of_a_channel_map_all_moments(seed, samples):
    x, y = problem(seed)
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=WIDTH), 5 * rng.normal(size=WIDTH)
    found, moved = measured(x, y), measured(a[:, None] * x + b[:, None], y)
    same(moved, mapped(found, a, b))
    same(moved.shrunk(samples), mapped(found.shrunk(samples), a, b))
    pi = rng.dirichlet(np.ones(C))
    expected = found.mixture(pi)
    close(moved.mixture(pi).mean, a * expected.mean + b, 1e-9)
    close(moved.mixture(pi).variance, a**2 * expected.variance, 1e-9)


@given(seeds, st.sampled_from([0.0, 1e-9, 1.0, 16.0, 1e9]), st.integers(1, C))
def test_shrunk_classes_in_the_sources_proportions_are_the_source(seed, samples, present):
    x, y = problem(seed, present=present)
    found = measured(x, y)
    few = found.shrunk(samples)
    np.testing.assert_array_equal(few.counts, found.counts)
    assert (few.variances >= 0).all()
    same_channels(few.mixture(found.counts / found.counts.sum()), found.pooled())


@given(seeds)
def test_shrinkage_runs_from_the_classes_to_the_pooled_source(seed):
    x, y = problem(seed, n=60)
    found = measured(x, y)
    if not found.counts.all():
        return
    same(found.shrunk(0.0), found)
    pooled = found.pooled()
    for c in range(C):
        close(found.shrunk(1e12).means[c], pooled.mean, 1e-9)
        close(found.shrunk(1e12).variances[c], pooled.variance, 1e-9)


def test_equal_classes_are_shrunk_towards_the_pooled_source():
    x, _ = problem(5)
    found = measured(x, np.arange(40) % C)
    w, pooled = 10 / (10 + 6), found.pooled()
    few = found.shrunk(6.0)
    close(few.means, w * found.means + (1 - w) * pooled.mean, 1e-12)
    between = w * (1 - w) * (found.means - pooled.mean) ** 2
    close(few.variances, w * found.variances + (1 - w) * pooled.variance + between, 1e-12)


@pytest.mark.parametrize("samples", [0.0, 8.0])
def test_a_class_without_samples_is_shrunk_to_the_pooled_source(samples):
    found = measured(*problem(6, present=3))
    few = found.shrunk(samples)
    close(few.means[3], found.pooled().mean, 1e-12)
    close(few.variances[3], found.pooled().variance, 1e-12)


@given(seeds, seeds)
def test_centred_classes_have_the_given_pooled_moments(seed, other):
    found = measured(*problem(seed))
    wanted = ChannelMoments.of(problem(other)[0], 1)
    centred = found.centred_on(wanted)
    same_channels(centred.pooled(), wanted)
    same(found.centred_on(found.pooled()), found)


def test_a_constant_channel_stays_constant():
    x, y = problem(7)
    x[:, 1] = 3.0
    found = measured(x, y)
    for moments in (found, found.shrunk(5.0), found.centred_on(found.pooled())):
        close(moments.means[:, 1], np.full(C, 3.0), 1e-12)
        close(moments.variances[:, 1], np.zeros(C), 1e-12)


def with_classes(x, y):
    return replace(ChannelMoments.of(x, 1), classes=measured(x, y))


def test_a_sites_classes_are_merged_with_its_moments():
    x, y = problem(8)
    one, other = with_classes(x[:15], y[:15]), with_classes(x[15:], y[15:])
    same((one + other).classes, measured(x, y))
    assert (one + ChannelMoments.of(x[15:], 1)).classes is None
    assert one.at_most(8).classes is None  # they would rest on more samples than the whole
