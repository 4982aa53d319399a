"""The certificate of layer transport: whether the network is as sure behind it as without."""

from __future__ import annotations

import math

import torch

from caster.core.confidence import ConfidenceStats, expected_error_ratio, has_fallen
from caster.core.linalg import Array

ERRORS = 3.0  # standard errors of a batch's confidence that are taken for chance


class LayerCertificate:
    """The doubt a network has behind the update, over the doubt it has without, on one stream.

    It rests on the last `window` samples that were compared: the newest batch, and what that lacks
    of those before it.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.reset()

    def reset(self) -> None:
        """Nothing seen."""
        self._seen: tuple[ConfidenceStats, ConfidenceStats] | None = (
            None  # after the update, and before
        )
        self._settled: tuple[ConfidenceStats, ConfidenceStats] | None = None

    def show(self, after: Array, before: Array) -> float:  # (n, C), (n, C) -> ratio
        """Take in a batch's scores behind the update and the frozen ones; what is said of them."""
        with torch.inference_mode():
            new = ConfidenceStats.of(after), ConfidenceStats.of(before)
        missing = self.window - new[0].count
        if self._seen is not None and missing > 0:
            old = self._seen
            new = old[0].at_most(missing) + new[0], old[1].at_most(missing) + new[1]
        ratio = expected_error_ratio(*new)
        self._seen = None if math.isnan(ratio) else new  # or it would never be a number again
        return ratio

    def settle(self) -> None:
        """Keep what was seen to hold later batches against, and compare those anew."""
        self._seen, self._settled = None, self._seen

    def is_less_sure(self, scores: Array, updated: bool) -> bool:  # (n, C)
        """Whether a batch, answered without comparison, is no longer what was compared."""
        if self._settled is None:
            return True
        then = self._settled[0 if updated else 1]
        with torch.inference_mode():
            return has_fallen(ConfidenceStats.of(scores), then, ERRORS)
