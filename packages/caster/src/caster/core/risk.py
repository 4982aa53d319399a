"""Sequential test of a risk against a limit, after Schirmer et al. (2025).

Losses are 0 or 1. Let S_t = sum of (loss_i - E[loss_i | past]) and V_t = sum of (loss_i -
guess_i)^2, with guesses that are known before their losses. Then exp(l S_t - psi(l) V_t) is a
supermartingale for every stake l in (0, 1), where psi(l) = -log(1 - l) - l: the empirical Bernstein
bound of Howard et al. (2021). Losses need be neither independent nor identically distributed. The
mean over stakes gives

- a lower confidence sequence of the running risk, the mean of E[loss_i | past];
- with bets that restart at every batch (`betting.restarted`), an alarm. It has probability at most
  alpha in a stream whose risk never exceeds the limit. A long good past does not delay it, as it
  would delay a running mean.

>>> test = RiskTest(limit=0.1, alpha=0.05)
>>> for losses in (6, 5, 40, 40):
...     test = test.after(64, losses)
>>> test.alarm, round(test.lower, 2)
(True, 0.22)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv

from caster.core.betting import LAMBDAS, log_mean, restarted

PSI: NDArray[np.float64] = -np.log1p(-LAMBDAS) - LAMBDAS


@dataclass(frozen=True)
class RiskTest:
    """State of the test of one stream; `after` returns the state after one more batch."""

    limit: float  # largest risk without an alarm
    alpha: float  # probability of a false alarm over the whole stream
    batches: int = 0
    samples: int = 0
    losses: int = 0
    variance: float = 0.0  # V_t
    bets: tuple[float, ...] = field(default=(-math.inf,) * len(LAMBDAS), repr=False)  # (L,), log
    alarm: bool = False  # never reset

    def after(self, samples: int, losses: int) -> Self:
        """State after a batch with so many losses of 1; an empty batch changes nothing."""
        if samples == 0:
            return self
        guess = (self.losses + 0.5) / (self.samples + 1)
        V = losses * (1 - guess) ** 2 + (samples - losses) * guess**2
        excess = losses - samples * self.limit
        bets = restarted(np.array(self.bets), LAMBDAS * excess - PSI * V, self.batches + 1)
        return replace(
            self,
            batches=self.batches + 1,
            samples=self.samples + samples,
            losses=self.losses + losses,
            variance=self.variance + V,
            bets=tuple(bets.tolist()),
            alarm=self.alarm or bool(log_mean(bets) >= -math.log(self.alpha)),
        )

    @property
    def mean(self) -> float:
        """Mean loss so far."""
        return self.losses / self.samples if self.samples else 0.0

    @property
    def lower(self) -> float:
        """Lower confidence sequence of the running risk, at level 1 - alpha at all times."""
        if not self.samples:
            return 0.0
        # The mean over stakes is at least 1 / L of any single stake's wealth.
        S = ((math.log(len(LAMBDAS) / self.alpha) + PSI * self.variance) / LAMBDAS).min()
        return max(0.0, self.mean - float(S) / self.samples)


def upper_bound(losses: int, samples: int, alpha: float) -> float:
    """Clopper-Pearson upper confidence bound of a probability, at level 1 - alpha.

    >>> round(upper_bound(0, 100, 0.05), 4), upper_bound(3, 3, 0.05)
    (0.0295, 1.0)
    """
    if losses >= samples:
        return 1.0
    return float(betaincinv(losses + 1, samples - losses, 1 - alpha))
