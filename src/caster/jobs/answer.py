"""A batch's answer in labels, with the gate and without, and who gave it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from caster.arrays import to_numpy
from caster.core.types import Judgement
from caster.estimator import Caster
from caster.evaluation.run import Tried
from caster.jobs.table import Columns
from caster.labels import Labels


@dataclass(frozen=True, eq=False)
class Answer:
    """One batch, answered."""

    predictions: Labels  # (B,), by the gate: the proposed ones if accepted, else the fallback's
    proposed: Labels | None  # (B,), whatever the verdict; None: there is no adapted answer
    frozen: Labels | None  # (B,), what the frozen head says; None: the fallback is Source-GDA
    verdict: Judgement

    @classmethod
    def of(cls, clf: Caster, features: Any, head_logits: Any) -> Self:
        """The answer to a batch by transport of its features."""
        out = clf.adapt(features, head_logits)
        frozen = None if head_logits is None else _chosen(clf, head_logits)
        proposed = to_numpy(out.proposed) if out.verdict.has_proposal else None
        return cls(to_numpy(out.predictions), proposed, frozen, out.verdict)

    @classmethod
    def tried(cls, clf: Caster, tried: Tried, head_logits: Any) -> Self:
        """The answer to a batch that was adapted to already."""
        proposed, frozen = _chosen(clf, tried.scores), _chosen(clf, head_logits)
        return cls(proposed if tried.verdict.accepted else frozen, proposed, frozen, tried.verdict)

    def given(self, mechanism: str, gate: bool) -> tuple[Labels, str]:
        """Labels, with the gate or without it, and the name of the method that gave them."""
        if self.proposed is not None and (self.verdict.accepted or not gate):
            return self.proposed, mechanism
        return self.predictions, "source-gda" if self.frozen is None else "frozen"

    def columns(
        self, rows: Sequence[int], names: list[str] | None, labels: Labels, giver: str, batch: int
    ) -> Columns:
        """What a table has of it: `labels` by `giver`, as `given` says, for these rows."""
        count = len(labels)
        return {
            "row": list(rows),
            **({} if names is None else {"picture": names}),
            "batch": [batch] * count,
            "prediction": _values(labels),
            **({} if self.frozen is None else {"frozen": _values(self.frozen)}),
            "verdict": ["accepted" if self.verdict.accepted else "rejected"] * count,
            "ratio": [self.verdict.ratio] * count,
            "reason": [self.verdict.reason] * count,
            "method": [giver] * count,
        }


def _values(labels: Labels) -> list[Any]:
    """Labels for a column; those of no common kind have no common column type either."""
    values = labels.tolist()
    return [str(value) for value in values] if labels.dtype.kind == "O" else values


def _chosen(clf: Caster, scores: Any) -> Labels:  # (B, C) -> (B,)
    labels: Labels = clf.classes_[np.argmax(to_numpy(scores), axis=1)]
    return labels
