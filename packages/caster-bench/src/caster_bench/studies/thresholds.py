"""What a gate would have given at every threshold, from cells that always transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caster_bench.studies.score import Score

WITHIN = 0.003  # of accuracy: how far below the best still counts as the plateau


@dataclass(frozen=True, eq=False)
class Curve:
    """Mean gain over the frozen model by threshold: constant between two steps, and exact."""

    steps: NDArray[np.float64]  # (n,), from 0, where nothing is accepted
    gains: NDArray[np.float64]  # (n,), from each step on

    @classmethod
    def of(cls, scores: Sequence[Score]) -> Curve:
        """Cells count the same; a batch counts from the least threshold that accepts it."""
        opens = np.concatenate([score.batches.opens for score in scores])
        added = np.concatenate(
            [(s.batches.right - s.batches.frozen) / s.n / len(scores) for s in scores]
        )
        possible = np.isfinite(opens)
        steps, place = np.unique(opens[possible], return_inverse=True)
        gains = np.cumsum(np.bincount(place, added[possible], minlength=len(steps)))
        return cls(np.concatenate([[0.0], steps]), np.concatenate([[0.0], gains]))

    def at(self, tau: float) -> float:
        """Mean gain of a gate at `tau`."""
        return float(self.gains[np.searchsorted(self.steps, tau, side="right") - 1])

    @property
    def best(self) -> float:
        """The largest mean gain of any threshold."""
        return float(self.gains.max())

    def plateau(self, within: float = WITHIN) -> tuple[float, float]:
        """The range of thresholds around the best that gives nearly as much.

        From a threshold on and up to, not including, another: infinite where none is too high.
        """
        near = self.gains >= self.best - within - 1e-12
        first = last = int(self.gains.argmax())
        while first > 0 and near[first - 1]:
            first -= 1
        while last + 1 < len(near) and near[last + 1]:
            last += 1
        end = self.steps[last + 1] if last + 1 < len(self.steps) else np.inf
        return float(self.steps[first]), float(end)


def gated_gain(score: Score, tau: float) -> float:
    """What a gate at `tau` would have made of one cell."""
    held = score.batches
    taken = held.opens <= tau
    return float((held.right - held.frozen)[taken].sum() / score.n)
