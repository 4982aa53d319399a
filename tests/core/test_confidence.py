"""Confidence statistics against loops, and the false alarm rate of a fall."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax

from caster.core.confidence import (
    ConfidenceStats,
    expected_error_ratio,
    has_fallen,
    nuclear_norm,
)
from tests.conftest import close

seeds = st.integers(0, 99)
SURE = ConfidenceStats(4.0, 4.0, 4.0)  # no doubt at all
NO_NUMBER = ConfidenceStats(4.0, math.nan, math.nan)


def scores(n=12, seed=0):
    return 2 * np.random.default_rng(seed).normal(size=(n, 5)) + 30


def by_loops(g):
    """Confidences, row by row."""
    return np.array([max(softmax(row)) for row in g])


def sums(stats):
    return np.array([stats.count, stats.total, stats.squares])


def test_sums_of_the_largest_probabilities(kind):
    g = scores()
    confidences = by_loops(g)
    found = ConfidenceStats.of(kind.array(g))
    assert all(isinstance(part, float) for part in (found.count, found.total, found.squares))
    close(sums(found), [12, sum(confidences), sum(p * p for p in confidences)], kind.tolerance)
    close(found.mean, confidences.mean(), kind.tolerance)
    close(found.deviation, confidences.std(), kind.tolerance)


@given(seeds, st.integers(1, 11))
def test_sums_merge(seed, cut):
    g = scores(seed=seed)
    close(
        sums(ConfidenceStats.of(g[:cut]) + ConfidenceStats.of(g[cut:])),
        sums(ConfidenceStats.of(g)),
        1e-12,
    )


@given(seeds, st.permutations(range(12)))
def test_order_does_not_matter(seed, order):
    g = scores(seed=seed)
    close(sums(ConfidenceStats.of(g[order])), sums(ConfidenceStats.of(g)), 1e-12)


@given(seeds, st.floats(0.01, 40.0))
def test_at_most(seed, kept):
    stats = ConfidenceStats.of(scores(seed=seed))
    less = stats.at_most(kept)
    assert less.count == pytest.approx(min(12.0, kept))
    close([less.mean, less.deviation], [stats.mean, stats.deviation], 1e-7)
    if kept >= 12:
        assert less == stats


@given(seeds, st.lists(st.tuples(st.integers(1, 5), st.floats(0.5, 20.0)), min_size=2, max_size=5))
def test_repeated_discounting_is_a_weighted_sum(seed, parts):
    seen, weights, p = None, np.zeros(0), np.zeros(0)
    for i, (n, kept) in enumerate(parts):
        batch = scores(n, seed=(seed, i))
        new = ConfidenceStats.of(batch)
        if seen is not None:
            weights = weights * min(1.0, kept / weights.sum())
            new = seen.at_most(kept) + new
        seen = new
        weights, p = (
            np.concatenate([weights, np.ones(n)]),
            np.append(p, by_loops(batch)),
        )
    close(sums(seen), [weights.sum(), weights @ p, weights @ p**2], 1e-9)
    variance = np.average((p - np.average(p, weights=weights)) ** 2, weights=weights)
    close(seen.deviation**2, variance, 1e-9)


def test_equal_samples_have_no_deviation():
    assert ConfidenceStats.of(np.tile(scores(1), (9, 1))).deviation < 1e-7
    assert (
        ConfidenceStats(3.0, 0.3, 0.03 - 1e-17).deviation == 0
    )  # and no root of less than nothing


@given(seeds, seeds)
def test_the_ratio_is_of_expected_errors(seed, other):
    after, before = scores(12, seed), scores(12, other)
    found = expected_error_ratio(ConfidenceStats.of(after), ConfidenceStats.of(before))
    assert found == pytest.approx(np.sum(1 - by_loops(after)) / np.sum(1 - by_loops(before)))


@pytest.mark.parametrize(
    ("after", "before", "expected"),
    [
        (SURE, ConfidenceStats(4.0, 2.0, 1.0), 0.0),
        (SURE, SURE, math.inf),  # there is nothing to go by
        (ConfidenceStats(4.0, 3.9, 3.9), SURE, math.inf),
        (NO_NUMBER, ConfidenceStats(4.0, 2.0, 1.0), math.nan),
        (SURE, NO_NUMBER, math.nan),
        (NO_NUMBER, NO_NUMBER, math.nan),
        (NO_NUMBER, SURE, math.inf),
    ],
)
def test_the_ratio_without_doubt_or_with_nan(after, before, expected):
    found = expected_error_ratio(after, before)
    assert found == pytest.approx(expected, nan_ok=True)
    assert (found <= 1.0) == (expected == 0.0)  # NaN is never accepted


@pytest.mark.parametrize(("errors", "tail"), [(1.0, 0.1587), (2.0, 0.0228), (3.0, 0.00135)])
def test_the_false_alarm_rate_is_the_normal_tail(errors, tail):
    """Confidences from one distribution, as those of a small network: crowded below one."""
    rng = np.random.default_rng(0)
    confidences = by_loops(rng.normal(size=(2000, 4)) * 4)
    drawn = confidences[rng.integers(len(confidences), size=(20_000, 320))]
    alarms = 0
    for row in drawn:
        then, now = (ConfidenceStats(len(p), p.sum(), p @ p) for p in (row[:256], row[256:]))
        alarms += has_fallen(now, then, errors)
    assert 0.7 * tail < alarms / len(drawn) < 1.9 * tail + 0.001  # the longer tail is below


def test_a_fall_is_detected_and_a_rise_is_not():
    rng = np.random.default_rng(0)
    then = ConfidenceStats.of(rng.normal(size=(256, 4)) * 4)
    for flatter, fallen in ((0.5, True), (1.0, False), (2.0, False)):
        now = ConfidenceStats.of(rng.normal(size=(64, 4)) * 4 * flatter)
        assert has_fallen(now, then, 3.0) is fallen


def test_the_standard_error_accounts_for_both_samples():
    then = ConfidenceStats(100.0, 80.0, 68.0)  # a deviation of 0.2
    error = math.sqrt(0.2**2 / 25 + 0.2**2 / 100)
    for errors in (1.0, 3.0):
        for step, fallen in ((0.999, False), (1.001, True)):
            now = ConfidenceStats(25.0, 25 * (0.8 - step * errors * error), 0.0)
            assert has_fallen(now, then, errors) is fallen


shapes = st.tuples(st.integers(1, 12), st.integers(1, 12))


@given(seeds, shapes, st.sampled_from([3.0, 30.0, 300.0]))
def test_the_nuclear_norm_is_the_sum_of_singular_values(seed, shape, scale):
    p = softmax(scale * np.random.default_rng(seed).normal(size=shape), axis=1)
    singular = np.linalg.svd(p, compute_uv=False)
    assert nuclear_norm(p) == pytest.approx(singular.sum(), rel=1e-6)
    assert nuclear_norm(p.astype(np.float32)) == pytest.approx(singular.sum(), rel=1e-5)


@given(seeds, shapes)
def test_the_nuclear_norm_is_largest_if_rows_are_sure_and_diverse(seed, shape):
    n, C = shape
    p = softmax(3 * np.random.default_rng(seed).normal(size=shape), axis=1)
    assert nuclear_norm(p) <= math.sqrt(n * min(n, C)) * (1 + 1e-9)
    each = np.tile(np.eye(C), (3, 1))  # all classes equally often
    assert nuclear_norm(each) == pytest.approx(math.sqrt(len(each) * C))
    collapsed = np.eye(C)[np.zeros(3 * C, int)]
    assert nuclear_norm(collapsed) == pytest.approx(math.sqrt(3 * C))


@given(seeds, st.permutations(range(12)), st.permutations(range(5)))
def test_the_nuclear_norm_has_no_order(seed, rows, columns):
    p = softmax(scores(seed=seed), axis=1)
    assert nuclear_norm(p[rows][:, columns]) == pytest.approx(nuclear_norm(p))


def test_equal_rows_have_the_norm_of_one():
    """Of rank one: rounding must not add the roots of small negative numbers."""
    row = softmax(scores(1), axis=1)
    assert nuclear_norm(np.tile(row, (9, 1))) == pytest.approx(3 * np.linalg.norm(row), rel=1e-6)
