"""The betting test against exact arithmetic, and its error rate against simulated labels."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest

from caster.core.betting import LAMBDAS, BettingTest, log_restarts, log_wealth, share
from caster.errors import CasterError
from tests.conftest import close
from tests.support.sampling import first_fast

ALPHA = 0.05
STREAMS, LABELS = 1000, 500
NO_BETS = (-math.inf,) * len(LAMBDAS)
outcomes = st.lists(st.sampled_from([1, -1, 0]), max_size=40)


def run(test, Ws):
    for W in Ws:
        test = test.after(W)
    return test


# Formulas


@given(outcomes)
def test_wealth_is_a_mean_of_products(Ws):
    stakes = [Fraction(stake) for stake in LAMBDAS.tolist()]
    products = [math.prod(1 + stake * W for W in Ws) for stake in stakes]
    expected = float(sum(products) / len(products))
    close(np.exp(log_wealth(Ws.count(1), Ws.count(-1))), expected, 1e-12)


@given(st.lists(st.sampled_from([1, -1]), min_size=1, max_size=25))
def test_restarts_are_bets_that_start_at_every_label(Ws):
    log_M = np.full(len(LAMBDAS), -np.inf)
    for t, W in enumerate(Ws, start=1):
        log_M = log_restarts(log_M, W, t)
    for found, stake in zip(np.exp(log_M), LAMBDAS.tolist(), strict=True):
        parts = [share(j + 1) * math.prod(1 - stake * W for W in Ws[j:]) for j in range(len(Ws))]
        close(found, sum(parts), 1e-12)


def test_no_stake_can_lose_everything_or_be_negative():
    assert np.all((LAMBDAS > 0) & (LAMBDAS < 1))


def test_wealth_does_not_overflow():
    assert np.isfinite(log_wealth(10**9, 0))
    assert log_wealth(10**9, 0) > 1e8
    assert log_wealth(0, 10**9) < -1e7
    log_M = np.full(len(LAMBDAS), 1e6)
    assert np.isfinite(log_restarts(log_M, -1, 10**9)).all()


# Laws of the state machine


@given(outcomes, st.integers(0, 40))
def test_chunks_of_labels_are_one_sequence(Ws, cut):
    assert run(run(BettingTest(), Ws[:cut]), Ws[cut:]) == run(BettingTest(), Ws)


@given(outcomes)
def test_two_wrong_answers_change_nothing(Ws):
    assert run(BettingTest(), Ws) == run(BettingTest(), [W for W in Ws if W])


@given(st.lists(st.tuples(st.sampled_from([1, -1]), st.integers(1, 16)), max_size=6))
def test_it_decides_as_a_loop_over_products_does(runs):
    """In float64, with every product from the start of its phase."""
    Ws = [W for W, length in runs for _ in range(length)]
    position, phase, begin = "open", 1, 0
    for end in range(1, len(Ws) + 1):
        part, enough = Ws[begin:end], phase * (phase + 1) / ALPHA
        gain = np.mean([math.prod(1 + stake * W for W in part) for stake in LAMBDAS])
        harm = np.mean([math.prod(1 - stake * W for W in part) for stake in LAMBDAS])
        late = np.mean([
            sum(share(j + 1) * math.prod(1 - stake * W for W in part[j:]) for j in range(len(part)))
            for stake in LAMBDAS
        ])  # fmt: skip
        before = position
        if position == "accepted":
            position = "revoked" if late >= enough else position
        elif gain >= enough:
            position = "accepted"
        elif position == "open" and harm >= enough:
            position = "revoked"
        if position != before:
            phase, begin = phase + 1, end
    found = run(BettingTest(ALPHA), Ws)
    assert (found.position, found.phase) == (position, phase)
    assert found.wins + found.losses == len(Ws) - begin


def test_before_a_decision_benefit_and_harm_mirror_each_other():
    for Ws in ([1] * 8, [1, -1, *[1] * 11]):
        one, other = run(BettingTest(), Ws), run(BettingTest(), [-W for W in Ws])
        assert (one.position, other.position) == ("accepted", "revoked")
        assert one.phase == other.phase == 2


def test_alpha_is_spent_and_never_exceeded():
    total = sum(Fraction(1, k * (k + 1)) for k in range(1, 2000))
    assert total < 1
    close(float(total), sum(share(k) for k in range(1, 2000)), 1e-12)


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, math.nan])
def test_an_alpha_that_is_no_error_rate_is_rejected(alpha):
    with pytest.raises(CasterError, match="alpha is an error rate"):
        BettingTest(alpha)


# Error rates


def fair(rng, shape):
    return rng.choice([1, -1], size=shape)


def against(rng, shape):
    return rng.choice([1, -1], p=[0.45, 0.55], size=shape)


def mostly_both_wrong(rng, shape):
    return rng.choice([1, 0, -1], p=[0.05, 0.9, 0.05], size=shape)


def alternating(rng, shape):
    """Predictable: never a win that a loss has not paid for."""
    return np.broadcast_to(np.where(np.arange(shape[-1]) % 2, 1, -1), shape)


def fair_while_it_loses(rng, shape):
    """The past decides: a fair coin until a stream is ahead, then always a loss."""
    W = fair(rng, shape)
    for t in range(1, shape[-1]):
        ahead = W[..., :t].sum(axis=-1) >= 12
        W[..., t] = np.where(ahead, -1, W[..., t])
    return W


def near_copies(rng, shape):
    """One fair coin for every three labels: E[W | past] is 0 at the first of the three only."""
    return np.repeat(fair(rng, (*shape[:-1], shape[-1] // 3 + 1)), 3, axis=-1)[..., : shape[-1]]


NULLS = [fair, against, mostly_both_wrong, alternating, fair_while_it_loses]


def ever_accepts(W, alpha=ALPHA):  # (S, T) -> (S,)
    wins, losses = (W == 1).cumsum(axis=1), (W == -1).cumsum(axis=1)
    return (log_wealth(wins, losses) >= -math.log(alpha)).any(axis=1)


def too_many(errors, alpha=ALPHA):
    """Whether more streams err than alpha explains, at one in a thousand."""
    return int(errors.sum()) > binom.isf(1e-3, len(errors), alpha)


def simulated(kind, seed=0, shape=(STREAMS, LABELS)):
    return kind(np.random.default_rng(seed), shape)


@pytest.mark.parametrize("kind", first_fast(NULLS))
@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_no_benefit_is_seldom_ever_accepted(kind, alpha):
    assert not too_many(ever_accepts(simulated(kind), alpha), alpha)


@pytest.mark.slow
def test_the_bound_is_nearly_reached_so_the_check_has_teeth():
    share_of_errors = ever_accepts(simulated(fair, shape=(1000, 1000))).mean()
    assert 0.4 * ALPHA < share_of_errors <= 1.3 * ALPHA


def large_stakes(W):
    """Lambda above 1: a loss turns wealth negative, and two losses make a gain."""
    wealth = np.cumprod(1 + 1.5 * W, axis=1)
    return (wealth >= 1 / ALPHA).any(axis=1)


def forgotten_losses(W):
    return ever_accepts(np.where(W == -1, 0, W))


def a_p_value_at_every_label(W):
    """An exact sign test, looked at after every label."""
    wins, n = (W == 1).cumsum(axis=1), (W != 0).cumsum(axis=1)
    return (binom.sf(wins - 1, n, 0.5) <= ALPHA).any(axis=1)


def best_stake_in_hindsight(W):
    """The maximum over lambda in place of the mean."""
    wins, losses = (W == 1).cumsum(axis=1), (W == -1).cumsum(axis=1)
    each = [wins * np.log1p(stake) + losses * np.log1p(-stake) for stake in LAMBDAS]
    return (np.max(each, axis=0) >= -math.log(ALPHA)).any(axis=1)


@pytest.mark.parametrize(
    "mutant", [large_stakes, forgotten_losses, a_p_value_at_every_label, best_stake_in_hindsight]
)
def test_mutants_err_more_often_than_alpha(mutant):
    assert too_many(mutant(simulated(fair)))


def test_labels_of_near_copies_are_outside_the_guarantee():
    assert too_many(ever_accepts(simulated(near_copies)))


def switches(W, alpha=ALPHA, start="open"):  # (S, T) -> acceptances, revocations: (S,) each
    found = np.zeros((2, len(W)), bool)
    for i, row in enumerate(W):
        test = accepted(alpha) if start == "accepted" else BettingTest(alpha)
        for value in row.tolist():
            following = test.after(value)
            if following.phase != test.phase:
                found[int(following.position == "revoked"), i] = True
            test = following
    return found


def accepted(alpha=ALPHA):
    """A test that has just accepted, as if in its first phase."""
    return replace(run(BettingTest(alpha), [1] * 20), phase=1, wins=0, restarts=NO_BETS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [fair, pytest.param(against, marks=pytest.mark.whole)])
def test_over_all_phases_no_benefit_is_seldom_ever_accepted(kind):
    """Where harm is shown first, the next acceptance tests have only what is left of alpha."""
    acceptances, _ = switches(simulated(kind, seed=1, shape=(300, 300)), alpha=0.2)
    assert not too_many(acceptances, 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [fair, pytest.param(against, marks=pytest.mark.whole)])
def test_no_harm_is_seldom_ever_revoked_after_an_acceptance(kind):
    _, revocations = switches(-simulated(kind, seed=2, shape=(300, 400)), 0.2, "accepted")
    assert not too_many(revocations, 0.2)


def revoked_at(W, start, alpha=ALPHA):  # (S, T) -> (S,), labels until the alarm; T + 1 if never
    """Restarting bets with another weight of the start at label t."""
    S, T = W.shape
    M, found = np.zeros((S, len(LAMBDAS))), np.full(S, T + 1)
    for t in range(1, T + 1):
        M = np.minimum((M + start(t)) * (1 - LAMBDAS * W[:, t - 1, None]), 1e9)
        found[(M.mean(axis=1) >= 1 / alpha) & (found > T)] = t
    return found


def test_revocation_has_a_bounded_error_where_an_e_detector_has_a_run_length():
    """An e-detector at 1 / alpha revokes any but the largest benefit within a hundred labels."""
    benefit = np.random.default_rng(3).choice([1, -1], p=[0.6, 0.4], size=(STREAMS, 400))
    detector, ours = revoked_at(benefit, lambda t: 1.0), revoked_at(benefit, share)
    assert detector.mean() >= 1 / ALPHA  # what it guarantees
    assert np.median(detector) < 60
    assert (detector <= 400).mean() > 0.99
    assert not too_many(ours <= 400)
    none = revoked_at(simulated(fair, seed=4), share)
    assert not too_many(none <= LABELS)
    assert too_many(revoked_at(simulated(fair, seed=4), lambda t: 1.0) <= LABELS)


def test_the_state_machine_revokes_where_the_formula_does():
    harm = np.random.default_rng(5).choice([1, -1], p=[0.3, 0.7], size=(20, 200))
    expected = revoked_at(harm, share, ALPHA * share(1))
    for row, label in zip(harm, expected.tolist(), strict=True):
        test = accepted()
        assert run(test, row[: label - 1].tolist()).position == "accepted"
        assert run(test, row[:label].tolist()).position == "revoked"


# Power


@pytest.mark.parametrize(("p", "at_most"), [(0.95, 10), (0.8, 25), (0.6, 260)])
def test_a_benefit_is_found_with_few_labels(p, at_most):
    """In the median; `p` is the share of labels that the adapted answer wins."""
    rng = np.random.default_rng(6)
    wins = (rng.random((500, 4 * at_most)) < p).cumsum(axis=1)
    losses = np.arange(1, 4 * at_most + 1) - wins
    crossed = log_wealth(wins, losses) >= -math.log(ALPHA * share(1))
    assert crossed.any(axis=1).mean() > 0.95
    assert np.median(crossed.argmax(axis=1) + 1) <= at_most


@pytest.mark.parametrize(("benefit", "labels"), [(0, 14), (100, 28), (10_000, 44)])
def test_harm_is_found_after_a_long_benefit(benefit, labels):
    test = run(BettingTest(), [1] * (8 + benefit))
    assert test.position == "accepted"
    assert run(test, [-1] * labels).position == "revoked"


def test_revoked_streams_can_be_accepted_again_with_more_evidence():
    test = run(BettingTest(), [-1] * 8)
    assert (test.position, test.phase) == ("revoked", 2)
    assert run(test, [1] * 8).position == "revoked"
    assert run(test, [1] * 12).position == "accepted"


def test_the_tolerance_of_the_simulations_is_binomial():
    most = int(binom.isf(1e-3, STREAMS, ALPHA))
    assert binomtest(most + 1, STREAMS, ALPHA, alternative="greater").pvalue < 1e-3
    assert not too_many(np.arange(STREAMS) < most)
