"""Feedback on one stream: match labels with recent disagreements, and run the betting test."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from caster.core.adaptation import Adaptation
from caster.core.arrays import to_numpy
from caster.core.betting import LAMBDAS, BettingTest, Position
from caster.errors import CasterError
from caster.io.labels import as_labels, encode

MEMORY = 65_536  # most recent samples that can still be labelled
POSITIONS: tuple[Position, ...] = get_args(Position)


class Feedback:
    """Disagreements of adapted and frozen answers that have no label yet, and the test so far."""

    def __init__(self, alpha: float) -> None:
        self.test = BettingTest(alpha)
        # Adapted and frozen class, by id. Finding the first key of a plain dict takes the longer,
        # the more have been deleted before it.
        self._disputed: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def remember(self, out: Adaptation, first: int) -> None:
        """Store the disagreements of a batch whose first sample has this id."""
        if out.adapted is not None and out.frozen is not None:
            adapted, frozen = out.class_indices()
            found = np.flatnonzero(adapted != frozen)
            answers = zip(adapted[found].tolist(), frozen[found].tolist(), strict=True)
            self._disputed.update(zip((first + found).tolist(), answers, strict=True))
        horizon = first + len(out.labels) - MEMORY
        while self._disputed and (oldest := next(iter(self._disputed))) < horizon:
            del self._disputed[oldest]

    def learn(self, ids: Any, labels: Any, classes: NDArray[Any], samples: int) -> int:
        """Update the test with labels; return how many counted. On an error, none counts."""
        ids = _checked(ids, samples)
        truth = encode(as_labels(labels), classes).tolist()
        if len(truth) != len(ids):
            raise CasterError(f"{len(ids)} ids need as many labels, not {len(truth)}")
        informative = 0
        for i, label in zip(ids, truth, strict=True):
            adapted, frozen = self._disputed.pop(i, (label, label))
            W = (adapted == label) - (frozen == label)
            informative += abs(W)
            self.test = self.test.after(W)
        return informative

    def state(self) -> dict[str, NDArray[Any]]:
        """The memory as named arrays."""
        test = self.test
        numbers = POSITIONS.index(test.position), test.phase, test.wins, test.losses
        disputed = [(i, *answers) for i, answers in self._disputed.items()]
        return {
            "feedback": np.array(numbers, np.int64),
            "feedback.alpha": np.array(test.alpha),
            "feedback.restarts": np.array(test.restarts, np.float64),
            "feedback.disputed": np.array(disputed, np.int64).reshape(-1, 3),
        }

    def resume(self, state: Mapping[str, NDArray[Any]], samples: int, n_classes: int) -> None:
        """Continue from a `state` after so many samples; raise ValueError if it is invalid."""
        position, phase, wins, losses = map(int, state["feedback"])
        restarts = tuple(map(float, state["feedback.restarts"]))
        held = LAMBDAS.size if position == POSITIONS.index("accepted") else 0
        if not (0 <= position < len(POSITIONS) and phase >= 1 and min(wins, losses) >= 0):
            raise ValueError("impossible counts")
        if len(restarts) != held or np.isnan(restarts).any():
            raise ValueError("impossible bets")
        alpha = float(state["feedback.alpha"])
        self.test = BettingTest(alpha, POSITIONS[position], phase, wins, losses, restarts)
        rows = np.asarray(state["feedback.disputed"])
        if rows.ndim != 2 or rows.shape[1] != 3 or rows.dtype.kind not in "iu":
            raise ValueError("impossible disputes")
        ids, answers = rows[:, 0], rows[:, 1:]
        known = (ids >= max(0, samples - MEMORY)) & (ids < samples)
        if not known.all() or (np.diff(ids) <= 0).any():
            raise ValueError("impossible ids")
        if (answers < 0).any() or (answers >= n_classes).any():
            raise ValueError("impossible classes")
        self._disputed = OrderedDict((i, (adapted, frozen)) for i, adapted, frozen in rows.tolist())


def _checked(ids: Any, samples: int) -> list[int]:
    """Convert ids to a list; raise for ids that are unknown or too old."""
    array = to_numpy(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise CasterError("ids are a sequence of integers, as in out.ids")
    found: list[int] = array.tolist()
    for i in found:
        if not 0 <= i < samples:
            raise CasterError(f"no sample has id {i}: the stream has answered {samples:,}")
        if i < samples - MEMORY:
            raise CasterError(f"sample {i} is too old: only the last {MEMORY:,} can be labelled")
    return found
