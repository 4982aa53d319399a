"""Check the raw rows of all cells of one stream."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import hypergeom

from caster.errors import CasterError
from caster_bench.records.schema import Batches, Cell, Samples
from caster_bench.records.store import Location, Record, read
from caster_bench.studies.check_cells import Problem
from caster_bench.studies.check_gates import Rows, gate_faults, stream_faults
from caster_bench.sweeps import Spec
from caster_bench.sweeps.spec import CLASS_ORDERED

Reading = Callable[[Record], Any]  # module-level, for worker processes
NO_HEAD = -1  # frozen prediction without a head
AGREES = 1e-9  # tolerance for recomputed diversity
ROUNDED = 0.005  # tolerance for recomputed accuracy
LOW = 0.5  # share of the random expectation at which a stream counts as class-ordered


@dataclass
class Checked:
    """Result for one stream: problems, and what other streams must agree with."""

    problems: list[Problem] = field(default_factory=list)
    labels: NDArray[np.int16] | None = None  # (n,) of the target, -1 if not in the stream
    rows: str = ""  # digest of which image is in which batch
    batches: int = 0
    n: int = 0  # images
    read: dict[Spec, Any] = field(default_factory=dict)  # results of `reading` for valid cells


def check_stream(
    cells: list[tuple[Spec, Location]],
    constants: Mapping[str, Any],  # of caster, from the sweep
    reading: Reading | None = None,
) -> Checked:
    """Check all finished cells of one stream; the first one is the reference for its rows.

    `reading` is applied to each valid record, so that none has to be read twice.
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
        assert samples is not None  # the cell is finished
        assert batches is not None
        kinds = list(_shape_faults(record.cell, samples, batches, spec))
        if not kinds:  # else the arrays cannot index each other
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
    """Passes of a stream over the images: sequential legs, and conditions mixed within a leg.

    >>> legs_of(Spec("r", "d", "m", conditions=(("fog", 1), ("fog", 2)), schedule="gradual"))
    (3, 1)
    """
    conditions = max(1, len(spec.conditions))
    if spec.schedule == "mixed":
        return 1, conditions
    if spec.schedule == "gradual":  # up and down, the top once
        return 2 * conditions - len({name for name, _ in spec.conditions}), 1
    return conditions, 1


def _shape_faults(cell: Cell, samples: Samples, batches: Batches, spec: Spec) -> Iterator[str]:
    n, total, size = cell.identity["target"]["n"], len(samples.index), len(batches.batch)
    legs, _ = legs_of(spec)
    if not total:
        yield "no samples"
        return
    if cell.counts != {"samples": total, "batches": size}:
        yield "counts differ from the rows"
    if not np.array_equal(batches.batch, np.arange(size)) or not size or size % legs:
        yield "batches missing"
    elif not 0 <= samples.batch.min() <= samples.batch.max() < size:
        yield "samples of a missing batch"
    elif not np.array_equal(np.bincount(samples.batch, minlength=size), batches.size):
        yield "batch sizes differ from those stated"
    if not 0 <= samples.index.min() <= samples.index.max() < n:
        yield "samples that are not in the target data"
    classes = cell.identity["classes"]
    for name, least in (("label", 0), ("frozen", NO_HEAD), ("prediction", 0)):
        column = getattr(samples, name)
        if not least <= column.min() <= column.max() < classes:
            yield f"a {name} that is not a class"


def _row_faults(cell: Cell, samples: Samples, batches: Batches, spec: Spec) -> Iterator[str]:
    """Check that every image occurs once per condition, in full batches except the last."""
    n = cell.identity["target"]["n"]
    legs, times = legs_of(spec)
    sizes = batches.size.reshape(legs, -1)
    full, last = sizes[:, :-1], sizes[:, -1]
    smallest = 1 if spec.last == "keep" else spec.batch_size
    if np.any(full != spec.batch_size) or np.any((last < smallest) | (last > spec.batch_size)):
        yield "batches that are not full"
    leg = samples.batch // sizes.shape[1]
    counts = np.bincount(leg.astype(np.int64) * n + samples.index, minlength=legs * n)
    counts = counts.reshape(legs, n)
    if spec.order == "long-tailed":  # drops some images, the same in every leg
        counts = counts[:, counts.any(axis=0)]
        wanted = counts.size * times if spec.last == "keep" else 0  # how many it keeps is unknown
    else:
        wanted = legs * (n * times - (n * times % spec.batch_size if spec.last == "drop" else 0))
    if np.any(counts > times) or counts.sum() < wanted:
        yield "images missing or repeated"


def _answer_faults(cell: Cell, samples: Samples, batches: Batches, spec: Spec) -> Iterator[str]:
    """Check that the answer is the frozen prediction wherever the frozen model answers."""
    if not np.all((batches.seconds >= 0) & np.isfinite(batches.seconds)):
        yield "an invalid time"
    if np.any(samples.frozen == NO_HEAD):
        if np.any(samples.frozen != NO_HEAD) or cell.admission.get("threshold") is not None:
            yield "frozen prediction missing"
        return  # nothing to compare with
    kept = samples.prediction == samples.frozen
    if spec.method == "frozen" and not kept.all():
        yield "the frozen method differs from the frozen model"
    if cell.method.get("inert") and not kept.all():
        yield "an inert method differs from the frozen model"
    if not kept[~batches.accepted[samples.batch]].all():
        yield "a rejected batch was not answered by the frozen model"


def _first_faults(
    cell: Cell, samples: Samples, batches: Batches, spec: Spec, checked: Checked
) -> Iterator[str]:
    """Check what all cells of a stream share, once."""
    n = cell.identity["target"]["n"]
    checked.labels = np.full(n, -1, dtype=np.int16)
    checked.labels[samples.index] = samples.label
    if np.any(checked.labels[samples.index] != samples.label):
        yield "two labels for one image"
    rows = samples.index.tobytes() + samples.batch.tobytes()
    checked.rows = hashlib.sha256(rows).hexdigest()
    checked.batches, checked.n = len(batches.batch), n
    found = diversity_of(samples, batches, legs_of(spec)[0])
    if not np.array_equal(found.classes, batches.classes):
        yield "classes in the batches differ from those stated"
    stated = cell.stream.get("relative_diversity")
    if not isinstance(stated, float | int):
        yield "the stream's diversity is not stated"
    elif spec.last == "keep" and abs(stated - found.relative) > AGREES:
        yield "diversity differs from that stated"
    if found.is_low and spec.order not in CLASS_ORDERED:
        yield "class-ordered stream without a class-ordered spec"
    if not spec.conditions and spec.last == "keep" and spec.order != "long-tailed":
        yield from _accuracy_faults(cell, samples)


def _accuracy_faults(cell: Cell, samples: Samples) -> Iterator[str]:
    """Check that a clean stream of all images has the accuracy of the admission."""
    stated = cell.admission.get("accuracy")
    if stated is None or cell.admission.get("n") != len(samples.label):
        return
    found = float(np.mean(samples.frozen == samples.label))
    # other batches round differently, which may flip a near tie
    if abs(found - stated) > max(ROUNDED, 2 / len(samples.label)):
        yield "clean accuracy differs from the admission's"


def _reference_faults(first: Record, record: Record) -> Iterator[str]:
    """Check that two cells of one stream have the same images and frozen predictions."""
    for name, what in (
        ("index", "images"),
        ("batch", "order"),
        ("label", "labels"),
        ("frozen", "frozen predictions"),
    ):
        if not np.array_equal(getattr(first.samples, name), getattr(record.samples, name)):
            yield f"different {what} from the stream's other cells"
            return  # the rest would only repeat it
    assert first.batches is not None  # both are finished
    assert record.batches is not None
    if not np.array_equal(first.batches.classes, record.batches.classes):
        yield "classes in the batches differ from those stated"
    if first.cell.stream != record.cell.stream:
        yield "diversity differs from that stated"


@dataclass(frozen=True)
class Diversity:
    """Classes per batch, absolute and relative to random batches."""

    classes: NDArray[np.int64]  # (T,)
    relative: float  # classes beyond the first, relative to random batches
    relative_unlike: float  # pairs of different classes, likewise
    judged: bool  # whether there are several batches per leg and several classes

    @property
    def is_low(self) -> bool:
        """Whether the order makes batches hold few classes."""
        return self.judged and min(self.relative, self.relative_unlike) <= LOW


def diversity_of(samples: Samples, batches: Batches, legs: int) -> Diversity:
    """Compute the diversity of a stream from its raw rows.

    `caster_bench.data.streams` states it when a stream is made; a report must not rely on that.

    >>> from caster_bench.records.parquet import as_batches, as_samples
    >>> rows = as_samples(dict(index=[0, 1, 2, 3], label=[0, 0, 1, 1], frozen=[0] * 4,
    ...                        prediction=[0] * 4, batch=[0, 0, 1, 1]))
    >>> none = dict.fromkeys(["ratio", "confident", "confident_classes"], [None, None])
    >>> two = as_batches(dict(batch=[0, 1], size=[2, 2], classes=[1, 1], accepted=[True] * 2,
    ...                       reason=["x"] * 2, seconds=[0.0] * 2) | none)
    >>> diversity_of(rows, two, 1).is_low
    True
    """
    width = int(samples.label.max()) + 1
    where = samples.batch.astype(np.int64) * width + samples.label
    table = np.bincount(where, minlength=len(batches.size) * width).reshape(-1, width)  # (T, C)
    counts = table.sum(axis=0) // legs  # of the images a batch is drawn from
    classes = (table > 0).sum(axis=1)
    sizes = batches.size.astype(np.int64)
    mean_classes = float(np.average(classes, weights=sizes)) - 1
    expected = float(np.average(_expected(sizes, counts), weights=sizes)) - 1
    pairs = np.where(sizes > 1, sizes, 0)
    held, at_random = _unlike(table, sizes), float(_unlike(counts, counts.sum()))
    several = len(sizes) > legs and np.count_nonzero(counts) > 1 and pairs.any()
    return Diversity(
        classes=classes,
        relative=mean_classes / expected if expected > 1e-9 else 1.0,
        relative_unlike=float(np.average(held, weights=pairs)) / at_random if several else 1.0,
        judged=bool(several),
    )


def _unlike(table: NDArray[np.int64], n: NDArray[np.int64]) -> NDArray[np.float64]:
    """Share of pairs among n images that differ in class: table (..., C), n (...)."""
    alike = (table * (table - 1)).sum(axis=-1)
    return np.asarray(1 - alike / np.maximum(n * (n - 1), 1))


def _expected(sizes: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Expected classes in a random batch of each size: (T,), (C,) -> (T,)."""
    distinct, which = np.unique(sizes, return_inverse=True)
    present, alike = np.unique(counts[counts > 0], return_counts=True)  # most are of one size
    absent = hypergeom.pmf(0, counts.sum(), present, distinct[:, None])  # (sizes, present)
    return np.asarray((1 - absent) @ alike)[which]
