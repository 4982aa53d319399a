"""Every metric against arithmetic that shares nothing with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax
from sklearn.metrics import accuracy_score, log_loss

from caster import CasterError
from caster.report import metrics
from caster.report.intervals import Interval, bootstrap
from tests.support import reference

flags = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)


def scored(n=500, n_classes=7, seed=0):
    """Scores, true classes, and log-probabilities that SciPy made of the scores."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(n_classes, size=n)
    scores = 4 * rng.standard_normal((n, n_classes)) + 3 * np.eye(n_classes)[truth]
    return scores, truth, log_softmax(scores, axis=1)


def test_log_probabilities_are_those_of_scipy():
    scores, _, expected = scored()
    np.testing.assert_allclose(metrics.log_softmax(scores), expected, rtol=1e-12)
    np.testing.assert_allclose(metrics.log_softmax(scores + 1e6), expected, atol=1e-9)
    single = metrics.log_softmax(scores.astype(np.float32))
    assert single.dtype == np.float64
    np.testing.assert_allclose(single, expected, atol=1e-5)


@pytest.mark.parametrize("row", [[np.inf, 0.0], [-np.inf, -np.inf]])
def test_a_row_without_probabilities_is_rejected(row):
    with pytest.raises(CasterError, match="no probabilities"):
        metrics.log_softmax(np.array([[0.0, 1.0], row]))


def test_accuracy_and_likelihood_are_those_of_scikit_learn():
    scores, truth, log_probabilities = scored()
    right = scores.argmax(axis=1) == truth
    assert metrics.accuracy(right) == accuracy_score(truth, scores.argmax(axis=1))
    found = metrics.nll(metrics.log_softmax(scores)[np.arange(len(truth)), truth])
    assert found == pytest.approx(log_loss(truth, np.exp(log_probabilities)), rel=1e-12)


def test_a_likelihood_too_small_for_a_probability_is_not_lost():
    scores = np.array([[0.0, 2000.0]])  # exp(-2000) is 0 in float64
    assert metrics.nll(metrics.log_softmax(scores)[:, 0]) == 2000.0
    assert metrics.nll(np.array([-math.inf, -1.0])) == math.inf
    assert str(metrics.nll(np.array([0.0]))) == "0.0"


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=80))
def test_calibration_error_is_that_of_a_loop(pairs):
    confidence, right = (np.array(column) for column in zip(*pairs, strict=True))
    found = metrics.calibration_error(confidence, right)
    assert found == pytest.approx(reference.calibration_error(confidence, right), abs=1e-12)
    assert 0 <= found <= 1


def test_calibration_error_of_many_samples_is_that_of_a_loop():
    scores, truth, log_probabilities = scored(n=3000)
    confidence = np.exp(log_probabilities).max(axis=1)
    right = scores.argmax(axis=1) == truth
    found = metrics.calibration_error(confidence, right)
    assert found == pytest.approx(reference.calibration_error(confidence, right), abs=1e-12)


def test_a_perfectly_calibrated_classifier_has_no_error():
    confidence = np.repeat([0.25, 0.5, 0.75], 4)
    right = np.array([1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0], dtype=bool)
    assert metrics.calibration_error(confidence, right) == 0


def test_bins_include_their_upper_ends():
    ends = np.arange(16) / 15
    bins = metrics.reliability(ends, np.ones(16, dtype=bool))
    assert [b.count for b in bins] == [2] + 14 * [1]
    beyond = metrics.reliability(np.array([np.nextafter(1.0, 2.0)]), np.array([True]))
    assert len(beyond) == 1


@given(flags)
def test_help_less_harm_is_the_gain(pairs):
    frozen, right = (np.array(column) for column in zip(*pairs, strict=True))
    gain = metrics.accuracy(right) - metrics.accuracy(frozen)
    harm, helped = metrics.harm(frozen, right), metrics.help(frozen, right)
    assert helped - harm == pytest.approx(gain, abs=1e-12)
    assert metrics.harm(right, frozen) == helped
    assert harm == sum(f and not r for f, r in pairs) / len(pairs)
    assert metrics.harm(frozen, frozen) == metrics.help(frozen, frozen) == 0


@pytest.mark.parametrize(("counts", "size"), [([5, 5], 2), ([90, 9, 1], 20), ([1] * 40, 16)])
def test_expected_classes_are_those_of_a_simulation(counts, size):
    rng = np.random.default_rng(0)
    shares = np.array(counts) / sum(counts)
    drawn = [len(set(rng.choice(len(counts), size, p=shares))) for _ in range(4000)]
    found = metrics.expected_classes(np.array(counts), size)
    assert found == pytest.approx(np.mean(drawn), abs=4 * np.std(drawn) / np.sqrt(4000))


def test_an_interval_has_the_width_theory_gives_it():
    rng = np.random.default_rng(1)
    sizes = np.full(400, 50)
    counts = rng.binomial(50, 0.8, size=(400, 1))
    (found,) = bootstrap(counts, sizes)
    middle, error = counts.sum() / 20_000, (counts / 50).std() / np.sqrt(400)
    assert found.low == pytest.approx(middle - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(middle + 1.96 * error, abs=0.15 * error)
    assert bootstrap(counts, sizes) == [found]


def test_an_interval_weighs_batches_by_size_and_needs_two():
    (found,) = bootstrap(np.array([[90], [0]]), np.array([90, 10]))
    assert found == Interval(0.0, 1.0)
    assert bootstrap(np.array([[3, 4]]), np.array([5])) == [None, None]


def test_a_constant_gain_has_an_interval_of_no_width():
    """Both accuracies vary from batch to batch, and their difference does not."""
    frozen = np.arange(20)
    pair, gain = bootstrap(np.column_stack([frozen, np.full(20, 5)]), np.full(20, 25))
    assert pair.high - pair.low > 0.1
    assert gain == Interval(0.2, 0.2)
