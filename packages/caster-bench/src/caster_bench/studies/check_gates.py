"""Check that verdicts follow from what their gates measured, and agree between cells of a stream.

Within a cell, reason, verdict, ratio, counts and threshold must be consistent. Within a stream, two
cells with the same transport must measure the same, and answer the same wherever both accept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.config import Settings
from caster.core.verdict import REASONS, decide
from caster_bench.records.reasons import (
    ACCEPTING,
    DECIDED,
    DISAGREEMENT,
    FROZEN,
    IMPLAUSIBLE,
    INERT,
    KNOWN,
    RESTING,
    UNGATED,
)
from caster_bench.records.schema import Batches, Cell, Samples
from caster_bench.studies.naming import (
    ALIGNING,
    ALWAYS,
    CERTIFICATE,
    GATED,
    LAYERS,
    MIXED,
    OWN,
    REFEREE,
    SOURCE_GDA,
)
from caster_bench.sweeps import Spec
from caster_bench.sweeps.spec import GATE, frozen_value, inner_and_gate

CONSTANTS = frozenset(constant.name for constant in fields(Settings))
GATE_ONLY = ("tau", "min_samples", "min_classes")  # settings that do not affect the transport
LAYERS_GATE = ("tau", "gated", "every", "window")  # likewise for layer and mixture transport
ACCEPTED, TOO_SMALL = "accepted", "batch_too_small"
NOT_TRIED = frozenset[str](REASONS.keys() - DECIDED)  # rejected before measuring anything
COUNTS = ("confident", "confident_classes")
OTHER_RATIO = 0.25  # relative tolerance for the ratio of another forward pass,
OTHER_SAMPLES = 0.05  # and share of samples that may differ; at least one sample
UNKNOWN = "an unknown reason"
NOT_ITS_REASON = "a reason the method cannot give"
VERDICT = "a verdict that contradicts its reason"
COUNT = "impossible counts of confident samples or classes"
THRESHOLD = "a verdict that contradicts its ratio, counts or threshold"
NO_THRESHOLD = "the threshold of the gate is not stated"
MEASURED = "a gate measured something different in another cell of the stream"
ANSWERED = "an accepted batch was answered differently in another cell of the stream"
Flags = NDArray[np.bool_]  # (T,), one per batch


def constants_of(spec: Spec, constants: Mapping[str, Any]) -> Settings:
    """Constants used by this cell's gate: the sweep's, unless the cell sets its own."""
    inner, gate = inner_and_gate(spec.method)
    given = spec.given.get(GATE, {}) if gate else spec.given if inner.startswith(OWN) else {}
    return Settings(**{**constants, **{name: given[name] for name in given.keys() & CONSTANTS}})


def gate_faults(
    cell: Cell,
    batches: Batches,
    spec: Spec,
    constants: Mapping[str, Any],  # from the sweep
) -> Iterator[str]:
    """Yield contradictions between the verdicts of a cell and what it measured."""
    reasons = frozenset(batches.reason.tolist())
    if not reasons <= KNOWN:
        yield UNKNOWN
        return
    for reason in reasons - {RESTING}:
        if np.any(batches.accepted[batches.reason == reason] != (reason in ACCEPTING)):
            yield VERDICT
            return
    if not reasons <= _possible(spec.method, cell):
        yield NOT_ITS_REASON
    if np.any(_impossible_counts(batches, cell.identity["classes"], spec.method)):
        yield COUNT
    yield from _threshold_faults(cell, batches, spec, constants)


def _possible(method: str, cell: Cell) -> frozenset[str]:
    """Reasons a method can give; all of them if it is not one of ours."""
    inner, gate = inner_and_gate(method)
    if gate:
        own = {CERTIFICATE: frozenset(REASONS), REFEREE: frozenset({ACCEPTED, DISAGREEMENT})}
        return own.get(gate, KNOWN) | (_possible(inner, cell) - {UNGATED})
    if inner == FROZEN:
        return frozenset({FROZEN})
    if cell.method.get("inert"):
        return frozenset({INERT})
    if inner in (GATED, MIXED):
        return frozenset(REASONS)
    if inner in ALIGNING and _settings(cell).get("gated", True):
        return NOT_TRIED | {ACCEPTED, "ratio", RESTING, IMPLAUSIBLE}
    if inner.startswith((OWN, *ALIGNING)):
        return NOT_TRIED | {UNGATED, IMPLAUSIBLE}
    return KNOWN - {FROZEN, INERT, RESTING}


def _settings(cell: Cell) -> dict[str, Any]:
    settings = cell.identity.get("settings")
    return settings if isinstance(settings, dict) else {}  # else reported separately


def _impossible_counts(batches: Batches, classes: int, method: str) -> Flags:
    confident, occupied = batches.confident, batches.confident_classes
    inner, gate = inner_and_gate(method)
    wrong = (confident < -1) | (confident > batches.size)
    wrong |= occupied > np.minimum(confident, classes)
    wrong |= ((confident > 0) != (occupied > 0)) | ((confident < 0) != (occupied < 0))
    if gate == CERTIFICATE or (not gate and inner in (GATED, ALWAYS, MIXED)):
        return np.asarray(wrong | (confident < 0))
    if gate == REFEREE or inner in (*ALIGNING, *ALIGNING.values()):
        return np.asarray(wrong | (confident >= 0))
    return np.asarray(wrong)


def _threshold_faults(
    cell: Cell, batches: Batches, spec: Spec, constants: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a fault if the cell's gate would have decided differently."""
    inner, gate = inner_and_gate(spec.method)
    inert = bool(cell.method.get("inert"))
    if gate == CERTIFICATE or (not gate and inner in (GATED, MIXED)):
        wrong = _against_certificate(cell, batches, spec, constants_of(spec, constants))
    elif gate == REFEREE:
        agreement = _settings(cell).get(GATE, {}).get("agreement")
        if not isinstance(agreement, float | int):
            yield NO_THRESHOLD
            return
        wrong = _against_referee(batches, agreement, _rejects_itself(inner, inert))
    elif not gate and inner in ALIGNING and not inert and _settings(cell).get("gated", True):
        tau, every = (_settings(cell).get(name) for name in ("tau", "every"))
        if not isinstance(tau, float | int) or not isinstance(every, int):
            yield NO_THRESHOLD
            return
        wrong = _against_layers(batches, tau, every)
    else:  # no known threshold, but a decision needs a ratio
        decided = np.isin(batches.reason, [*DECIDED, DISAGREEMENT])
        wrong = decided & np.isnan(batches.ratio)
    if np.any(wrong):
        yield THRESHOLD


def _rejects_itself(inner: str, inert: bool) -> bool:
    """Whether the gated method may reject what its gate accepts."""
    return inert or inner in (GATED, MIXED, *ALIGNING)


def _against_certificate(cell: Cell, batches: Batches, spec: Spec, settings: Settings) -> Flags:
    columns = batches.ratio, batches.confident, batches.confident_classes
    evidence = zip(*(column.tolist() for column in columns), strict=True)
    verdicts = [decide(each, cell.identity["classes"], settings).reason for each in evidence]
    expected = np.array(verdicts, dtype=object)
    reason, ratio = batches.reason, batches.ratio
    not_tried = np.isin(reason, list(NOT_TRIED))
    follows = (reason == expected) | (not_tried & ~np.isfinite(ratio))
    inner, gate = inner_and_gate(spec.method)
    if gate:  # the method itself may still reject
        own = _rejects_itself(inner, bool(cell.method.get("inert")))
        follows |= (expected == ACCEPTED) & (not_tried | own)
    else:
        follows &= (reason == TOO_SMALL) == (batches.size == 1)
    return np.asarray(~follows | (ratio < 0))


def _against_referee(batches: Batches, agreement: float, own: bool) -> Flags:
    share = np.rint((1 - batches.ratio) * batches.size) / batches.size
    expected = np.where(share >= agreement, ACCEPTED, DISAGREEMENT)
    follows = batches.reason == expected
    follows |= (expected == ACCEPTED) & (np.isin(batches.reason, list(NOT_TRIED)) | own)
    return np.asarray(~follows | ~(np.abs(batches.ratio - (1 - share)) < 1e-9))


def _against_layers(batches: Batches, tau: float, every: int) -> Flags:
    reason, ratio, accepted = batches.reason, batches.ratio, batches.accepted
    compared = (reason == ACCEPTED) | (reason == "ratio")
    wrong = compared & ((ratio <= tau) != accepted)
    rests = reason == RESTING
    last = np.maximum.accumulate(np.where(compared, np.arange(len(ratio)), -1))
    wrong |= rests & ((last < 0) | (accepted != accepted[last]) | ~np.isnan(ratio) | (every == 1))
    return np.asarray(wrong | (ratio < 0))


@dataclass(frozen=True, eq=False)
class Rows:
    """A finished cell with its tables."""

    spec: Spec
    cell: Cell
    samples: Samples
    batches: Batches


@dataclass(frozen=True)
class _Shared:
    """What a cell shares with the cells of its stream that have the same key."""

    key: Hashable
    measures: tuple[str, ...] = ()  # columns of batches
    answers: bool = False
    end: int | None = None  # number of leading batches it holds for; None: all


def stream_faults(records: Sequence[Rows]) -> Iterator[tuple[Spec, str]]:
    """Yield cells of one stream that contradict each other, with the fault.

    Cells that ran alone are skipped, since they had their own forward passes.
    """
    groups: dict[Hashable, list[tuple[Rows, _Shared]]] = defaultdict(list)
    for record in records:
        if not record.spec.alone:
            for shared in _shared(record):
                groups[shared.key].append((record, shared))
    for members in groups.values():
        reference = max(members, key=lambda member: int(member[0].batches.accepted.sum()))
        for member in members:
            if member is not reference:
                yield from ((member[0].spec, kind) for kind in _differences(reference, member))
    yield from _other_passes(records)


def _shared(record: Rows) -> Iterator[_Shared]:
    spec, settings = record.spec, _settings(record.cell)
    inner, gate = inner_and_gate(spec.method)
    if gate in (CERTIFICATE, REFEREE):  # one forward pass shared by all of them
        yield _Shared(gate, ("ratio", *COUNTS))
    elif inner in (GATED, ALWAYS, MIXED):
        transport = tuple(pair for pair in spec.settings if pair[0] not in GATE_ONLY)
        measures = COUNTS if inner == MIXED else ("ratio", *COUNTS)
        yield _Shared((OWN, transport), measures, answers=True)
    elif inner in ALIGNING and not record.cell.method.get("inert"):
        alignment = {name: own for name, own in settings.items() if name not in LAYERS_GATE}
        key, end = frozen_value(alignment), _compared(record, settings)
        yield _Shared((LAYERS, key), answers=True, end=end)
        yield _Shared((LAYERS, key, settings.get("window")), ("ratio",), end=end)
    elif inner in ALIGNING.values():
        yield _Shared((LAYERS, frozen_value(settings | {"last": "head"})), answers=True)


def _compared(record: Rows, settings: dict[str, Any]) -> int | None:
    """Number of leading batches that were all compared: skipping starts after a full window."""
    if settings.get("every") == 1 or not settings.get("gated", True):
        return None
    size = record.batches.size
    return int(np.count_nonzero(np.cumsum(size) - size < settings.get("window", 0)))


def _differences(one: tuple[Rows, _Shared], other: tuple[Rows, _Shared]) -> Iterator[str]:
    (first, ours), (second, theirs) = one, other
    ends = [end for end in (ours.end, theirs.end) if end is not None]
    end = min(ends, default=len(first.batches.batch))
    for name in ours.measures:
        if name in theirs.measures and not np.array_equal(
            getattr(first.batches, name)[:end], getattr(second.batches, name)[:end], equal_nan=True
        ):
            yield MEASURED
            break
    if ours.answers and theirs.answers:
        both = first.batches.accepted & second.batches.accepted
        both[end:] = False
        if np.any(
            (first.samples.prediction != second.samples.prediction)[both[first.samples.batch]]
        ):
            yield ANSWERED


def _other_passes(records: Sequence[Rows]) -> Iterator[tuple[Spec, str]]:
    """Compare gated cells with ungated ones, which had another forward pass.

    Rounding may flip near ties. A method that learns is identical until its gate first rejects.
    """
    by_name = {(record.spec.method, record.spec.settings): record for record in records}
    for record in records:
        inner, gate = inner_and_gate(record.spec.method)
        if not gate or record.spec.alone:
            continue
        own = tuple(pair for pair in record.spec.settings if pair[0] != GATE)
        always, source = by_name.get((ALWAYS, ())), by_name.get((SOURCE_GDA, ()))
        if (gate == CERTIFICATE and always is not None and _ratios_differ(record, always)) or (
            gate == REFEREE and source is not None and _referee_differs(record, source)
        ):
            yield record.spec, MEASURED
        if (bare := by_name.get((inner, own))) is not None and _answers_differ(record, bare):
            yield record.spec, ANSWERED


def _allowed_flips(size: Any) -> Any:
    """How many samples may differ."""
    return np.maximum(1, OTHER_SAMPLES * size)


def _ratios_differ(record: Rows, always: Rows) -> bool:
    ours, theirs = record.batches, always.batches
    apart = np.abs(ours.confident - theirs.confident)
    close = np.isclose(ours.ratio, theirs.ratio, rtol=OTHER_RATIO, atol=0, equal_nan=True)
    return bool(np.any(apart > _allowed_flips(ours.size)) or np.any(~close & (apart == 0)))


def _referee_differs(record: Rows, source: Rows) -> bool:
    """Whether the referee's disagreement differs from that of head and Source-GDA records."""
    size, samples = record.batches.size, record.samples
    if np.any(samples.frozen < 0):  # no head
        return False
    unlike = samples.frozen != source.samples.prediction
    found = np.bincount(samples.batch[unlike], minlength=len(size))
    return bool(np.any(np.abs(found - record.batches.ratio * size) > _allowed_flips(size)))


def _answers_differ(record: Rows, bare: Rows) -> bool:
    until = np.logical_and.accumulate(record.batches.accepted & bare.batches.accepted)
    rows = until[record.samples.batch]
    unlike = (record.samples.prediction != bare.samples.prediction)[rows]
    return bool(np.count_nonzero(unlike) > _allowed_flips(len(unlike)))
