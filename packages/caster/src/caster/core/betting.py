"""A sequential test by betting: is the adapted answer right more often than the frozen one?

On a sample where the two answers differ, W = 1 if only the adapted one is right, -1 if only the
frozen one is, and 0 if both are wrong. The test bets on W; its wealth is the evidence.

Guarantees hold without independence and at any stopping time. The probability of ever accepting in
a phase without benefit (E[W | past] <= 0 at each of its labels) is at most alpha, and so is the
probability of ever revoking in a phase without harm (E[W | past] >= 0). A phase lasts from one
decision to the next. In each phase, Ville's inequality bounds the probability by that phase's share
of alpha, and the shares add up to alpha. The past is everything known before the label, including
the sample. So samples may be chosen for labelling at random, or by anything known before the label;
the test is then about the samples so chosen. Labels may arrive late, in any order that does not
depend on their values.

There is no guarantee if samples are chosen by whether an answer was right, as complaints are, or if
near-duplicates are labelled, whose W the past reveals. Nor is it guaranteed that a benefit lasts,
or that harm is detected within some number of labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError

LAMBDAS: NDArray[np.float64] = np.linspace(0.02, 0.9, 16)  # stakes, as fractions of the wealth
ALPHA = 0.05

Position = Literal["open", "accepted", "revoked"]


def share(k: int) -> float:
    """Share k = 1, 2, ... of a budget of 1, which the shares 1 / (k (k + 1)) add up to.

    >>> [round(share(k), 3) for k in (1, 2, 3)], round(sum(share(k) for k in range(1, 1000)), 3)
    ([0.5, 0.167, 0.083], 0.999)
    """
    return 1.0 / (k * (k + 1))


def log_wealth(
    wins: Any,  # (...), labels with W = 1
    losses: Any,  # (...), labels with W = -1
) -> NDArray[np.float64]:  # (...)
    """Logarithm of the wealth K = mean over lambda of prod(1 + lambda W).

    If E[W | past] <= 0 at every label, K is a supermartingale that starts at 1.

    >>> np.exp(log_wealth([0, 8, 8], [0, 0, 8])).round(2)
    array([ 1.  , 43.62,  0.33])
    """
    wins, losses = (np.asarray(n, np.float64)[..., None] for n in (wins, losses))
    return log_mean(wins * np.log1p(LAMBDAS) + losses * np.log1p(-LAMBDAS))


def log_restarts(
    log_M: NDArray[np.float64],  # (..., L), M_{t-1}
    W: Any,  # (...), 1 or -1
    t: int,
) -> NDArray[np.float64]:  # (..., L)
    """Logarithm of M_t = (M_{t-1} + share(t)) (1 - lambda W_t), with M_0 = 0: bets against W.

    M_t is the sum over j <= t of share(j) prod_{i=j..t} (1 - lambda W_i), bets that start at every
    label, so harm after a long benefit is detected as soon as harm from the start. Shin, Ramdas and
    Rinaldo's e-detector has 1 in place of share(j), which only bounds the mean number of labels
    between false alarms, by 1 / alpha from below: 20 labels. Because the shares add up to 1, M_t is
    at most a supermartingale that starts at 1 if E[W | past] >= 0, and Ville's inequality bounds
    the probability that it ever reaches 1 / alpha.

    >>> np.exp(log_restarts(np.full(len(LAMBDAS), -np.inf), -1, 1))[[0, -1]]  # from M_0 = 0
    array([0.51, 0.95])
    """
    W = np.asarray(W, np.float64)[..., None]
    return restarted(log_M, np.log1p(-LAMBDAS * W), t)


def restarted(
    log_M: NDArray[np.float64],  # (..., L), M_{t-1}
    log_factor: NDArray[np.float64],  # (..., L), of the wealth at t
    t: int,
) -> NDArray[np.float64]:  # (..., L)
    """Logarithm of M_t = (M_{t-1} + share(t)) factor_t, with M_0 = 0: bets that restart at every t.

    >>> np.exp(restarted(np.array([-np.inf]), np.array([0.0]), 1))
    array([0.5])
    """
    return np.asarray(np.logaddexp(log_M, math.log(share(t))) + log_factor)


def log_mean(logs: NDArray[np.float64]) -> NDArray[np.float64]:  # (..., L) -> (...)
    """Logarithm of the mean over stakes of exponentials.

    >>> np.exp(log_mean(np.log([1.0, 3.0])))
    np.float64(2.0)
    """
    largest = logs.max(axis=-1, keepdims=True)
    return np.asarray(np.log(np.exp(logs - largest).mean(axis=-1)) + largest[..., 0])


@dataclass(frozen=True)
class BettingTest:
    """State of the test of one stream; `after` returns the state after one more label.

    In position "open" the labels have shown nothing yet, in "accepted" a benefit, and in "revoked"
    harm, after an acceptance or from the start. Phase k decides at wealth 1 / (alpha share(k)): if
    open, by bets on W and bets against W; if accepted, by bets against W that restart at every
    label; if revoked, by bets on W that start with wealth 1 again.

    >>> test = BettingTest()
    >>> for W in [1] * 8 + [-1] * 12:
    ...     test = test.after(W)
    ...     if test.wins + test.losses == 0:
    ...         print(test.position, "in phase", test.phase)
    accepted in phase 2
    revoked in phase 3
    """

    alpha: float = ALPHA
    position: Position = "open"
    phase: int = 1
    wins: int = 0  # labels with W = 1 in this phase
    losses: int = 0  # labels with W = -1 in this phase
    restarts: tuple[float, ...] = field(default=(), repr=False)  # (L,), log M_t, if accepted

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise CasterError(f"alpha is an error rate between 0 and 1, not {self.alpha!r}")

    def after(self, W: int) -> Self:
        """State after a label; W = 0 changes nothing."""
        if W == 0:
            return self
        wins, losses = self.wins + (W == 1), self.losses + (W == -1)
        enough = -math.log(self.alpha * share(self.phase))
        if self.position == "accepted":
            log_M = log_restarts(np.array(self.restarts), W, wins + losses)
            if log_mean(log_M) >= enough:
                return self._decided("revoked")
            return replace(self, wins=wins, losses=losses, restarts=tuple(log_M.tolist()))
        if log_wealth(wins, losses) >= enough:
            return self._decided("accepted")
        if self.position == "open" and log_wealth(losses, wins) >= enough:
            return self._decided("revoked")
        return replace(self, wins=wins, losses=losses)

    def _decided(self, position: Position) -> Self:
        none = (-math.inf,) * len(LAMBDAS)  # M_0 = 0
        restarts = none if position == "accepted" else ()
        return type(self)(self.alpha, position, self.phase + 1, restarts=restarts)
