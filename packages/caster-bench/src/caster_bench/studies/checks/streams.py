"""Whether the raw rows of the cells of one stream can be what they say they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError
from caster_bench.records import Batches, Cell, Record, Samples, Where, read
from caster_bench.studies.checks.diversity import diversity_of
from caster_bench.studies.checks.gates import Rows, gate_faults, stream_faults
from caster_bench.studies.checks.problem import Problem
from caster_bench.sweeps import Spec
from caster_bench.sweeps.names import CLASS_ORDERED

Reading = Callable[[Record], Any]  # of a module, for other processes to know it
NO_HEAD = -1  # in the place of a frozen prediction
AGREES = 1e-9  # of a diversity computed twice
ROUNDED = 0.005  # of an accuracy measured twice


@dataclass
class Checked:
    """The cells of one stream: what is wrong with them, and what other streams must agree with."""

    problems: list[Problem] = field(default_factory=list)
    labels: NDArray[np.int16] | None = None  # (n,) of the target, -1 where it was not met
    rows: str = ""  # digest of which picture came in which batch
    batches: int = 0
    n: int = 0  # pictures
    read: dict[Spec, Any] = field(default_factory=dict)  # what was made of sound cells


def check_stream(
    cells: list[tuple[Spec, Where]],
    constants: Mapping[str, Any],  # of caster, as the sweep gives them
    reading: Reading | None = None,
) -> Checked:
    """All cells that are done of one stream; the first of them speaks for its rows.

    What `reading` makes of a record is kept, so that none has to be read twice.
    """
    checked = Checked()
    first: Record | None = None
    sound: list[Rows] = []
    for spec, where in cells:
        try:
            record = read(where)
        except CasterError as error:
            checked.problems.append(Problem("changed or damaged", str(error)))
            continue
        samples, batches = record.samples, record.batches
        assert samples is not None  # it is done
        assert batches is not None
        kinds = list(_shape_faults(record.cell, samples, batches, spec))
        if not kinds:  # or the arrays cannot be indexed by one another
            kinds += _row_faults(record.cell, samples, batches, spec)
            kinds += _answer_faults(record.cell, samples, batches, spec)
            kinds += gate_faults(record.cell, batches, spec, constants)
            if first is None:
                first = record
                kinds += _first_faults(record.cell, samples, batches, spec, checked)
            else:
                kinds += _reference_faults(first, record)
        checked.problems += [Problem(kind, spec.full) for kind in kinds]
        if not kinds:
            sound.append(Rows(spec, record.cell, samples, batches))
            if reading is not None:
                checked.read[spec] = reading(record)
    checked.problems += [Problem(kind, spec.full) for spec, kind in stream_faults(sound)]
    return checked


def legs_of(spec: Spec) -> tuple[int, int]:
    """How many times a stream goes through the pictures one after the other, and all at once.

    >>> legs_of(Spec("r", "d", "m", conditions=(("fog", 1), ("fog", 2)), schedule="gradual"))
    (3, 1)
    """
    conditions = max(1, len(spec.conditions))
    if spec.schedule == "mixed":
        return 1, conditions
    if spec.schedule == "gradual":  # up and down again, the top once
        return 2 * conditions - len({name for name, _ in spec.conditions}), 1
    return conditions, 1


def _shape_faults(cell: Cell, samples: Samples, batches: Batches, spec: Spec) -> Iterator[str]:
    n, total, size = cell.identity["target"]["n"], len(samples.index), len(batches.batch)
    legs, _ = legs_of(spec)
    if not total:
        yield "no samples"
        return
    if cell.counts != {"samples": total, "batches": size}:
        yield "other counts than rows"
    if not np.array_equal(batches.batch, np.arange(size)) or not size or size % legs:
        yield "batches missing"
    elif not 0 <= samples.batch.min() <= samples.batch.max() < size:
        yield "samples of a batch that there is not"
    elif not np.array_equal(np.bincount(samples.batch, minlength=size), batches.size):
        yield "batches of other sizes than stated"
    if not 0 <= samples.index.min() <= samples.index.max() < n:
        yield "samples that are not in the target data"
    classes = cell.identity["classes"]
    for name, least in (("label", 0), ("frozen", NO_HEAD), ("prediction", 0)):
        column = getattr(samples, name)
        if not least <= column.min() <= column.max() < classes:
            yield f"a {name} that is no class"


def _row_faults(cell: Cell, samples: Samples, batches: Batches, spec: Spec) -> Iterator[str]:
    """Every picture once a condition, in full batches but the last."""
    n = cell.identity["target"]["n"]
    legs, times = legs_of(spec)
    sizes = batches.size.reshape(legs, -1)
    full, last = sizes[:, :-1], sizes[:, -1]
    smallest = 1 if spec.last == "keep" else spec.batch_size
    if np.any(full != spec.batch_size) or np.any((last < smallest) | (last > spec.batch_size)):
        yield "batches that are not full"
    leg = samples.batch // sizes.shape[1]
    met = np.bincount(leg.astype(np.int64) * n + samples.index, minlength=legs * n)
    met = met.reshape(legs, n)
    if spec.order == "long-tailed":  # leaves out some, the same in every leg
        met = met[:, met.any(axis=0)]
        wanted = met.size * times if spec.last == "keep" else 0  # how many it keeps is not known
    else:
        wanted = legs * (n * times - (n * times % spec.batch_size if spec.last == "drop" else 0))
    if np.any(met > times) or met.sum() < wanted:
        yield "pictures missing or met twice"


def _answer_faults(cell: Cell, samples: Samples, batches: Batches, spec: Spec) -> Iterator[str]:
    """Where the frozen model answers, its prediction is the answer."""
    if not np.all((batches.seconds >= 0) & np.isfinite(batches.seconds)):
        yield "a time that is none"
    if np.any(samples.frozen == NO_HEAD):
        if np.any(samples.frozen != NO_HEAD) or cell.admission.get("threshold") is not None:
            yield "a frozen prediction missing"
        return  # there is nothing to hold the answers against
    kept = samples.prediction == samples.frozen
    if spec.method == "frozen" and not kept.all():
        yield "the frozen method differs from the frozen model"
    if cell.method.get("inert") and not kept.all():
        yield "an inert method differs from the frozen model"
    if not kept[~batches.accepted[samples.batch]].all():
        yield "a refused batch was not answered by the frozen model"


def _first_faults(
    cell: Cell, samples: Samples, batches: Batches, spec: Spec, checked: Checked
) -> Iterator[str]:
    """What is the same for all cells of a stream, and so is looked at once."""
    n = cell.identity["target"]["n"]
    checked.labels = np.full(n, -1, dtype=np.int16)
    checked.labels[samples.index] = samples.label
    if np.any(checked.labels[samples.index] != samples.label):
        yield "two labels for one picture"
    rows = samples.index.tobytes() + samples.batch.tobytes()
    checked.rows = hashlib.sha256(rows).hexdigest()
    checked.batches, checked.n = len(batches.batch), n
    found = diversity_of(samples, batches, legs_of(spec)[0])
    if not np.array_equal(found.classes, batches.classes):
        yield "other classes in the batches than stated"
    stated = cell.stream.get("relative_diversity")
    if not isinstance(stated, float | int):
        yield "the stream's diversity is not stated"
    elif spec.last == "keep" and abs(stated - found.relative) > AGREES:
        yield "another diversity than stated"
    if found.is_low and spec.order not in CLASS_ORDERED:
        yield "a class-ordered stream that nobody asked for"
    if not spec.conditions and spec.last == "keep" and spec.order != "long-tailed":
        yield from _accuracy_faults(cell, samples)


def _accuracy_faults(cell: Cell, samples: Samples) -> Iterator[str]:
    """A clean stream of all pictures shows what the checkpoint was admitted with."""
    stated = cell.admission.get("accuracy")
    if stated is None or cell.admission.get("n") != len(samples.label):
        return
    found = float(np.mean(samples.frozen == samples.label))
    # other batches round differently, which may turn a near tie
    if abs(found - stated) > max(ROUNDED, 2 / len(samples.label)):
        yield "another clean accuracy than admitted with"


def _reference_faults(first: Record, record: Record) -> Iterator[str]:
    """Two cells of one stream meet the same pictures, and the same frozen model."""
    for name, what in (
        ("index", "pictures"),
        ("batch", "order"),
        ("label", "labels"),
        ("frozen", "frozen predictions"),
    ):
        if not np.array_equal(getattr(first.samples, name), getattr(record.samples, name)):
            yield f"{what} unlike the stream's other cells"
            return  # what follows would only repeat it
    assert first.batches is not None  # they are done
    assert record.batches is not None
    if not np.array_equal(first.batches.classes, record.batches.classes):
        yield "other classes in the batches than stated"
    if first.cell.stream != record.cell.stream:
        yield "another diversity than stated"
