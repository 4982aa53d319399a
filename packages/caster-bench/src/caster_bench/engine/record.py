"""What came of a cell, as its record."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caster.adapt.protocol import Method
from caster_bench.data.streams import Stream
from caster_bench.engine.answers import Answers
from caster_bench.engine.describe import (
    admission_words,
    hardware,
    identity_of,
    method_words,
    software,
)
from caster_bench.engine.run_context import RunContext
from caster_bench.engine.worker_cache import Subject
from caster_bench.records.layout import cells_of
from caster_bench.records.schema import DONE, REFUSED, Admission, Cell
from caster_bench.records.tables import as_batches, as_samples
from caster_bench.records.writer import write
from caster_bench.sweeps import Spec


@dataclass(frozen=True, eq=False)
class Said:
    """A method's answers beside the frozen model's, and that this did not change."""

    method: Method
    answers: Answers
    frozen: NDArray[np.int64]  # (N,) -1 without a head
    before: str | None  # digests of the frozen model
    after: str | None
    memory: float | None  # peak MiB of a cell that was alone on a GPU


def ticks(seconds: NDArray[np.float64]) -> NDArray[np.float64]:  # (T,) -> (T,)
    """Times to a 2⁻²⁰ of a second, about a microsecond: what is below is noise that takes room.

    >>> ticks(np.array([0.0123456789]))
    array([0.01234531])
    """
    return np.asarray(np.rint(seconds * 2**20) / 2**20)


def write_done(
    context: RunContext, spec: Spec, subject: Subject, stream: Stream, said: Said
) -> None:
    """Keep a cell that is complete."""
    plan, found = list(stream), said.answers
    rows = np.concatenate([batch.rows for batch in plan])
    sizes = np.array([len(batch.rows) for batch in plan])
    samples = {
        "index": rows,
        "label": subject.codes[rows],
        "frozen": said.frozen,
        "prediction": found.classes,
        "batch": np.repeat(np.arange(len(plan)), sizes),
    }
    batches = {
        "batch": np.arange(len(plan)),
        "size": sizes,
        "classes": stream.diversity.classes,
        "accepted": found.accepted,
        "reason": found.reason,
        "ratio": found.ratio,
        "confident": found.confident,
        "confident_classes": found.confident_classes,
        "seconds": ticks(found.seconds),
    }
    cell = Cell(
        identity=identity_of(spec, subject.admission),
        status=DONE,
        reason=None,
        admission=admission_words(subject.admission),
        method=method_words(spec, said.method),
        frozen={"before": said.before, "after": said.after},
        stream={
            "relative_diversity": stream.diversity.relative,
            "class_ordered": stream.is_class_ordered,
        },
        memory={"peak": said.memory},
        software=software(),
        hardware=hardware(context),
    )
    write(cells_of(context.out), cell, as_samples(samples), as_batches(batches))


def write_refused(context: RunContext, spec: Spec, admission: Admission) -> None:
    """Keep that a cell was refused, and why."""
    cell = Cell(
        identity=identity_of(spec, admission),
        status=REFUSED,
        reason=admission.reason,
        admission=admission_words(admission),
        method={},
        frozen={},
        stream={},
        memory={},
        software=software(),
        hardware=hardware(context),
    )
    write(cells_of(context.out), cell)
