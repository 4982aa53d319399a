"""Target features or pictures in, a table of adapted predictions out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.adaptation import Adaptation
from caster.adapter import Adapter
from caster.arrays import to_numpy
from caster.core.types import Reason, Verdict
from caster.data import Pictures
from caster.errors import CasterError
from caster.estimator import Caster, load
from caster.frozen.arrays import open_features
from caster.jobs.deployed import batches, check_batch_size, check_outputs, with_tau
from caster.jobs.extract import AT_ONCE, extract, forget
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

    rows: Sequence[int]
    out: Adaptation
    frozen: Labels | None  # (B,), what the frozen head says
    names: list[str] | None = None  # of the pictures


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
    clf = with_tau(load(state), tau)
    file = open_features(target, "features")
    names = ("features", "logits") if "logits" in file.names else ("features",)

    def answers() -> Iterator[_Answer]:
        row = 0
        for features, *logits in file.chunks(names, batch_size):
            head_logits = logits[0] if logits else None
            try:
                out = clf.adapt(features, head_logits)
            except CasterError as error:
                where = f"rows {row} to {row + len(features) - 1} of {target}"
                raise CasterError(f"{where}: {error}") from None
            yield _Answer(range(row, row + len(features)), out, _frozen(clf, head_logits))
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
        features = extract(
            adapter.model,
            pictures,
            store,
            batch_size=min(batch_size, AT_ONCE),
            skip_unreadable=skip_unreadable,
            check=partial(check_outputs, adapter),
            progress=progress,
        )

        def answers() -> Iterator[_Answer]:
            for batch in batches(features, batch_size, shuffle, progress, adapter):
                rows = features.places[batch.rows].tolist()
                out = clf.adapt(batch.features, batch.logits)
                names = [pictures.names[row] for row in rows]
                yield _Answer(rows, out, _frozen(clf, batch.logits), names)

        with open_table(output) as table:
            summary = _written(answers(), table, Summary(unreadable=features.unreadable), gate)
        if not features.known:
            forget(features, adapter.model, store)
    return summary


def _written(answers: Iterable[_Answer], table: Table, summary: Summary, gate: bool) -> Summary:
    for answer in answers:
        labels = to_numpy(answer.out.predictions if gate else answer.out.proposed)
        table.write(_columns(answer, labels, summary.batches))
        summary.rows += len(labels)
        summary.reasons[answer.out.verdict.reason] += 1
        summary.ratios.append(answer.out.verdict.ratio)
        if answer.frozen is not None:
            summary.changed = (summary.changed or 0) + int(np.sum(labels != answer.frozen))
    return summary


def _columns(answer: _Answer, labels: Labels, batch: int) -> Columns:
    verdict: Verdict = answer.out.verdict
    count = len(labels)
    return {
        "row": list(answer.rows),
        **({} if answer.names is None else {"picture": answer.names}),
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


def _frozen(clf: Caster, head_logits: Any) -> Labels | None:
    if head_logits is None:
        return None
    chosen: NDArray[Any] = np.argmax(to_numpy(head_logits), axis=1)
    return clf.classes_[chosen]  # type: ignore[no-any-return]
