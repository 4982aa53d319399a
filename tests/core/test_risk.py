"""The risk test against a loop over samples, and its error rate on simulated streams."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest

from caster.core.betting import LAMBDAS, share
from caster.core.estimated_accuracy import Calibration, estimate
from caster.core.risk import RiskTest, upper_bound
from caster.monitor.stream_monitor import limits
from tests.conftest import close

ALPHA = 0.05
batches = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=12)


def run(test: RiskTest, counts, samples: int) -> RiskTest:
    for losses in counts:
        test = test.after(samples, int(losses))
    return test


@given(batches, st.floats(0.02, 0.9))
def test_wealth_is_a_sum_of_bets_that_start_at_every_batch(losses, limit):
    test = RiskTest(limit, ALPHA)
    wealth = np.zeros(len(LAMBDAS))
    seen: list[int] = []
    for t, batch in enumerate(losses, start=1):
        guess = (sum(seen) + 0.5) / (len(seen) + 1)
        wealth += share(t)
        for loss in batch:
            psi = -np.log(1 - LAMBDAS) - LAMBDAS
            wealth *= np.exp(LAMBDAS * (loss - limit) - psi * (loss - guess) ** 2)
        seen += batch
        test = test.after(len(batch), sum(batch))
        close(np.exp(test.bets), wealth, 1e-9)
    assert test.mean == sum(seen) / len(seen)
    assert 0 <= test.lower <= test.mean


def test_an_empty_batch_changes_nothing_and_an_alarm_stays():
    test = RiskTest(0.1, ALPHA)
    assert test.after(0, 0) == test
    assert test.lower == test.mean == 0.0
    rung = run(test, [30] * 4, 32)
    assert rung.alarm
    assert run(rung, [0] * 200, 32).alarm


def false_alarms(streams: int, p: float, test: RiskTest) -> int:
    rng = np.random.default_rng(0)
    return sum(run(test, rng.binomial(32, p, 60), 32).alarm for _ in range(streams))


@pytest.mark.parametrize("p", [0.05, 0.3])
def test_false_alarms_are_at_most_alpha(p):
    """At the limit itself, and above it the alarm is certain."""
    assert false_alarms(200, p, RiskTest(p, ALPHA)) <= binom.ppf(0.999, 200, ALPHA)
    assert false_alarms(20, p + 0.2, RiskTest(p, ALPHA)) == 20


@pytest.mark.whole
@pytest.mark.parametrize("p", [0.02, 0.1, 0.5])
def test_false_alarms_in_2000_streams(p):
    assert false_alarms(2_000, p, RiskTest(p, ALPHA)) <= 2_000 * ALPHA


def test_the_confidence_sequence_holds_at_all_times_for_a_changing_risk():
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(100):
        test, total = RiskTest(0.5, ALPHA), 0.0
        missed = False
        for i in range(60):
            p = 0.05 if i < 30 else 0.4
            total += 32 * p
            test = test.after(32, int(rng.binomial(32, p)))
            missed |= test.lower > total / test.samples
        wrong += missed
    assert wrong <= binom.ppf(0.999, 100, ALPHA)


def test_a_long_good_past_does_not_delay_the_alarm():
    good = run(RiskTest(0.1, ALPHA), [1] * 400, 32)
    assert not good.alarm
    late = run(good, [16] * 6, 32)
    assert late.alarm
    assert late.lower < 0.1  # of the running mean, which still looks good


@pytest.mark.parametrize(("losses", "samples"), [(0, 50), (3, 100), (40, 50)])
def test_the_upper_bound_is_clopper_and_pearsons(losses, samples):
    expected = binomtest(losses, samples).proportion_ci(0.9, "exact").high
    close(upper_bound(losses, samples, 0.05), expected, 1e-9)


def test_limits_bound_the_source_and_add_the_tolerance():
    good = Calibration(0.1, samples=400, errors=20, correct_above=8, confidence=0.9)
    worse = Calibration(0.1, samples=400, errors=60, correct_above=30, confidence=0.9)
    unlabelled, labelled = limits({"frozen": good, "adapted": worse}, 0.05, 0.06)
    close(labelled, upper_bound(20, 400, 0.03) + 0.05, 1e-12)
    close(unlabelled, upper_bound(20, 400, 0.01) + upper_bound(30, 400, 0.01) + 0.05, 1e-12)


# Estimated accuracy


def test_the_source_gets_its_own_accuracy():
    rng = np.random.default_rng(0)
    u, wrong = rng.random(200), (rng.random(200) < 0.3).astype(np.uint8)
    calibration = Calibration.of(u, wrong)
    assert int((u > calibration.threshold).sum()) == wrong.sum()
    found = estimate(calibration, 200, int(wrong.sum()), float(1 - u.mean()))
    close([found.atc, found.doc], [1 - wrong.mean()] * 2, 1e-12)
    assert found.low < found.value < found.high


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_source_that_is_always_right_or_always_wrong(wrong):
    calibration = Calibration.of(np.array([0.1, 0.2]), np.full(2, wrong))
    found = estimate(calibration, 10, 10 * wrong, 0.5)
    assert found.atc == 1 - wrong
    assert math.isfinite(found.low + found.high)


def test_intervals_cover_where_confidence_is_calibrated():
    """On samples of the source, in 19 of 20 cases or more."""
    rng = np.random.default_rng(2)

    def sample(n):
        u = rng.beta(1, 4, n)
        return u, rng.random(n) < u

    inside = 0
    for _ in range(200):
        u, wrong = sample(300)
        calibration = Calibration.of(u, wrong)
        target, missed = sample(300)
        above = int((target > calibration.threshold).sum())
        found = estimate(calibration, 300, above, float(1 - target.mean()))
        inside += found.low <= 1 - missed.mean() <= found.high
    assert inside >= 0.95 * 200 - 8
