"""A batch's answer in labels and probabilities, with the gate and without, and who gave it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from caster.adapt.estimator import Caster
from caster.core.arrays import as_real_array, to_numpy
from caster.core.types import Judgement
from caster.io.labels import Labels
from caster.io.prediction_table import Columns
from caster.report.evaluation import Tried

DIGITS = 6  # of probabilities in a table


@dataclass(frozen=True, eq=False)
class Answer:
    """One batch, answered: the scores of every classifier that may be asked."""

    classes: Labels  # (C,)
    proposed: NDArray[Any] | None  # (B, C), adapted; None: there is no adapted answer
    frozen: NDArray[Any] | None  # (B, C), the frozen head's logits; None: the fallback is another
    fallback: NDArray[Any] | None  # (B, C), the head's or Source-GDA's; None: it is not needed
    verdict: Judgement

    @classmethod
    def of(cls, clf: Caster, features: Any, head_logits: Any) -> Self:
        """The answer to a batch by transport of its features."""
        out = clf.adapt(features, head_logits)
        proposed = to_numpy(out.transported) if out.verdict.has_proposal else None
        frozen = fallback = None if head_logits is None else _scores(head_logits)
        if fallback is None and not out.verdict.accepted:
            fallback = _scores(clf.source_scores(features))
        return cls(clf.classes_, proposed, frozen, fallback, out.verdict)

    @classmethod
    def tried(cls, clf: Caster, tried: Tried, head_logits: Any) -> Self:
        """The answer to a batch that was adapted to already."""
        frozen = _scores(head_logits)
        return cls(clf.classes_, _scores(tried.scores), frozen, frozen, tried.verdict)

    def given(self, mechanism: str, gate: bool) -> tuple[NDArray[Any], str]:
        """Scores (B, C), with the gate or without it, and the method that gave them."""
        if self.proposed is not None and (self.verdict.accepted or not gate):
            return self.proposed, mechanism
        assert self.fallback is not None
        return self.fallback, "source-gda" if self.frozen is None else "frozen"

    def changed(self, scores: NDArray[Any]) -> int | None:
        """How many rows these scores answer otherwise than the frozen head, if there is one."""
        if self.frozen is None:
            return None
        return int(np.sum(scores.argmax(axis=1) != self.frozen.argmax(axis=1)))

    def columns(
        self,
        rows: Sequence[int],
        names: list[str] | None,  # of images
        scores: NDArray[Any],  # (B, C), by `giver`, as `given` says
        giver: str,
        batch: int,
        every_class: bool,  # whether each class gets a column of probabilities
    ) -> Columns:
        """What a table has of it, in the order of docs/command-line.md."""
        count, chosen = len(scores), scores.argmax(axis=1)
        probabilities = _softmax(scores).round(DIGITS)
        each = zip(_column_names(self.classes), probabilities.T.tolist(), strict=True)
        return {
            "row": list(rows),
            **({} if names is None else {"image": names}),
            "batch": [batch] * count,
            "prediction": _values(self.classes[chosen]),
            "confidence": probabilities[np.arange(count), chosen].tolist(),
            **({} if self.frozen is None else {"frozen": self._frozen_labels(self.frozen)}),
            "verdict": ["accepted" if self.verdict.accepted else "rejected"] * count,
            "ratio": [self.verdict.ratio] * count,
            "reason": [self.verdict.reason] * count,
            "method": [giver] * count,
            **(dict(each) if every_class else {}),
        }

    def _frozen_labels(self, logits: NDArray[Any]) -> list[Any]:
        return _values(self.classes[logits.argmax(axis=1)])


def _values(labels: Labels) -> list[Any]:
    """Labels for a column; those of no common kind have no common column type either."""
    values = labels.tolist()
    return [str(value) for value in values] if labels.dtype.kind == "O" else values


def _column_names(classes: Labels) -> list[str]:
    """`p:` and the label; labels that print alike, such as 1 and "1", as Python writes them."""
    labels = classes.tolist()
    names = [f"p:{label}" for label in labels]
    return names if len(set(names)) == len(names) else [f"p:{label!r}" for label in labels]


def _scores(values: Any) -> NDArray[Any]:
    return to_numpy(as_real_array(values))


def _softmax(scores: NDArray[Any]) -> NDArray[np.float64]:  # (B, C) -> (B, C)
    """Probabilities; NaN for a row whose largest score is infinite."""
    scores = scores.astype(np.float64)
    with np.errstate(invalid="ignore"):
        likelihoods = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray(likelihoods / likelihoods.sum(axis=1, keepdims=True))
