"""A file of target features in, a table of adapted predictions out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.core.types import Reason, Verdict
from caster.errors import CasterError
from caster.estimator import Caster, load
from caster.frozen.arrays import open_features
from caster.jobs.progress import Progress, silent
from caster.jobs.table import check_table, open_table
from caster.labels import Labels


@dataclass(frozen=True)
class Summary:
    """What a prediction run did."""

    rows: int
    batches: int
    reasons: Counter[Reason]  # batches by verdict
    median_ratio: float
    changed: int | None  # predictions that differ from the frozen head's, where it was given


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
    """Adapt a file batch by batch, in its own order, and write one row a sample.

    Without the gate the transported classifier answers every batch that has one; a batch of a
    single row has none and gets the fallback.
    """
    if batch_size < 1:
        raise CasterError(f"the batch size must be at least 1, not {batch_size}")
    check_table(output, state, target)
    clf = load(state)
    if tau is not None:
        clf.set_params(tau=tau)
    _ = clf.settings  # refuses a bad tau before any row is blamed for it
    file = open_features(target, "features")
    names = ("features", "logits") if "logits" in file.names else ("features",)
    verdicts: list[Verdict] = []
    changed, row = 0, 0
    with open_table(output) as table:
        for features, *logits in file.chunks(names, batch_size):
            head_logits = logits[0] if logits else None
            try:
                out = clf.adapt(features, head_logits)
            except CasterError as error:
                where = f"rows {row} to {row + len(features) - 1} of {target}"
                raise CasterError(f"{where}: {error}") from None
            labels = out.predictions if gate else out.proposed
            table.write(_columns(labels, row, len(verdicts), out.verdict))
            changed += _changed(clf, labels, head_logits)
            verdicts.append(out.verdict)
            row += len(features)
            progress("adapting", row, file.rows)
    return Summary(
        rows=row,
        batches=len(verdicts),
        reasons=Counter(verdict.reason for verdict in verdicts),
        median_ratio=float(np.median([verdict.ratio for verdict in verdicts])),
        changed=changed if "logits" in names else None,
    )


def _columns(labels: Labels, first_row: int, batch: int, verdict: Verdict) -> dict[str, list[Any]]:
    count = len(labels)
    values = labels.tolist()
    return {
        "row": list(range(first_row, first_row + count)),
        "batch": [batch] * count,
        # Labels of no common kind have no common column type either.
        "prediction": [str(v) for v in values] if labels.dtype.kind == "O" else values,
        "verdict": ["accepted" if verdict.accepted else "rejected"] * count,
        "ratio": [verdict.ratio] * count,
        "reason": [verdict.reason] * count,
    }


def _changed(clf: Caster, labels: Labels, head_logits: NDArray[Any] | None) -> int:
    if head_logits is None:
        return 0
    return int(np.sum(labels != clf.classes_[np.argmax(head_logits, axis=1)]))
