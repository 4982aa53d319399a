"""Target features or pictures in, a table of adapted predictions out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np

from caster import state as states
from caster.adapter import Adapter
from caster.arrays import to_numpy
from caster.core.types import Reason, Verdict
from caster.data import Pictures
from caster.errors import CasterError
from caster.estimator import Caster
from caster.frozen.arrays import open_features
from caster.frozen.heads import of_classes
from caster.frozen.protocol import Outputs
from caster.jobs.deployed import batches, check_batch_size, extract_for, with_tau
from caster.jobs.extract import forget
from caster.jobs.progress import Progress, silent
from caster.jobs.table import Columns, Table, check_table, open_table
from caster.labels import Labels


@dataclass
class Summary:
    """What a prediction run did."""

    rows: int = 0
    reasons: Counter[Reason] = field(default_factory=Counter)  # batches by verdict
    ratios: list[float] = field(default_factory=list)  # one a batch
    changed: int | None = None  # predictions that differ from the frozen head's, where it answers
    unreadable: list[str] = field(default_factory=list)  # pictures skipped, and why

    @property
    def batches(self) -> int:
        """Batches in all."""
        return len(self.ratios)

    @property
    def median_ratio(self) -> float:
        """Median certificate; infinite where most batches have no confident sample."""
        return float(np.median(self.ratios))


@dataclass(frozen=True, eq=False)
class _Answer:
    """One batch, answered."""

    predictions: Labels  # (B,)
    proposed: Labels  # (B,)
    frozen: Labels | None  # (B,), what the frozen head says
    verdict: Verdict

    @classmethod
    def of(cls, clf: Caster, features: Any, head_logits: Any) -> Self:
        """The answer to a batch."""
        out = clf.adapt(features, head_logits)
        frozen = None
        if head_logits is not None:
            frozen = clf.classes_[np.argmax(to_numpy(head_logits), axis=1)]
        return cls(to_numpy(out.predictions), to_numpy(out.proposed), frozen, out.verdict)


_Row = tuple[Sequence[int], list[str] | None, _Answer]  # rows, names of pictures, the answer


def predict_file(
    state: Path,
    target: Path,
    output: Path,
    *,
    batch_size: int,
    tau: float | None = None,
    gate: bool = True,
    progress: Progress = silent,
) -> Summary:
    """Adapt a feature file batch by batch, in its own order, and write one row a sample.

    Without the gate the transported classifier answers every batch that has one; a batch of a
    single row has none and gets the fallback.
    """
    check_batch_size(batch_size)
    check_table(output, state, target)
    held = states.load(state)
    clf = with_tau(Caster.from_state(held), tau)
    file = open_features(target, "features")
    names = ("features", "logits") if "logits" in file.names else ("features",)

    def answers() -> Iterator[_Row]:
        row = 0
        for features, *logits in file.chunks(names, batch_size):
            try:
                head_logits = of_classes(logits[0], held.head) if logits else None
                answer = _Answer.of(clf, features, head_logits)
            except CasterError as error:
                where = f"rows {row} to {row + len(features) - 1} of {target}"
                raise CasterError(f"{where}: {error}") from None
            yield range(row, row + len(features)), None, answer
            row += len(features)
            progress("adapting", row, file.rows)

    with open_table(output) as table:
        return _written(answers(), table, Summary(), gate)


def predict_pictures(
    adapter: Adapter,
    pictures: Pictures,
    output: Path,
    *,
    batch_size: int,
    tau: float | None = None,
    gate: bool = True,
    shuffle: int | None = None,
    skip_unreadable: bool = False,
    store: Path | None = None,
    progress: Progress = silent,
) -> Summary:
    """Adapt to pictures batch by batch, and write one row a picture.

    They come in their own order, or shuffled by a seed: a batch's answer depends on what is in
    it, and pictures sorted by class make batches of few classes. Features are in the store while
    it works, for an interrupted run to go on from, and stay there only if they were kept before.
    """
    check_batch_size(batch_size)
    check_table(output, Path(adapter.model.name), Path(pictures.name))
    clf = with_tau(adapter.clf, tau)
    with ExitStack() as stack:
        if store is None:
            temporary = TemporaryDirectory(prefix="caster-", ignore_cleanup_errors=True)
            store = Path(stack.enter_context(temporary))
        features = extract_for(
            adapter,
            pictures,
            store,
            batch_size=batch_size,
            skip_unreadable=skip_unreadable,
            progress=progress,
        )

        def answers() -> Iterator[_Row]:
            for batch in batches(features, batch_size, shuffle, progress):
                rows = features.places[batch.rows].tolist()
                names = [pictures.names[row] for row in rows]
                logits = adapter.head_logits(Outputs(batch.features, batch.logits))
                yield rows, names, _Answer.of(clf, batch.features, logits)

        with open_table(output) as table:
            summary = _written(answers(), table, Summary(unreadable=features.unreadable), gate)
        if not features.known:
            forget(features, adapter.model, store)
    return summary


def _written(answers: Iterable[_Row], table: Table, summary: Summary, gate: bool) -> Summary:
    for rows, names, answer in answers:
        labels = answer.predictions if gate else answer.proposed
        table.write(_columns(rows, names, answer, labels, summary.batches))
        summary.rows += len(labels)
        summary.reasons[answer.verdict.reason] += 1
        summary.ratios.append(answer.verdict.ratio)
        if answer.frozen is not None:
            summary.changed = (summary.changed or 0) + int(np.sum(labels != answer.frozen))
    return summary


def _columns(
    rows: Sequence[int], names: list[str] | None, answer: _Answer, labels: Labels, batch: int
) -> Columns:
    verdict, count = answer.verdict, len(labels)
    return {
        "row": list(rows),
        **({} if names is None else {"picture": names}),
        "batch": [batch] * count,
        "prediction": _values(labels),
        **({} if answer.frozen is None else {"frozen": _values(answer.frozen)}),
        "verdict": ["accepted" if verdict.accepted else "rejected"] * count,
        "ratio": [verdict.ratio] * count,
        "reason": [verdict.reason] * count,
    }


def _values(labels: Labels) -> list[Any]:
    """Labels for a column; those of no common kind have no common column type either."""
    values = labels.tolist()
    return [str(value) for value in values] if labels.dtype.kind == "O" else values
