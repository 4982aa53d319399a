"""Tables of the study of layer transport."""

from __future__ import annotations

from collections.abc import Sequence

from caster_bench.studies.each import certificate_tables, corruption_tables
from caster_bench.studies.each.corruption import Entry
from caster_bench.studies.each.layers_ablation import Row as Ablation
from caster_bench.studies.each.layers_accuracy import Accuracy
from caster_bench.studies.each.layers_gate import KEEP, LOSE, Gating
from caster_bench.studies.each.layers_streams import OnStreams
from caster_bench.studies.results import Mean
from caster_bench.studies.tables import INTERVAL, Column, Table, Value, around, points


def of_accuracy(found: Accuracy) -> tuple[Table, ...]:
    """Every method on every backbone and data, and the lead over those that learn."""
    columns = [Column("backbone"), Column("method")]
    for convention in found.conventions:
        columns += [Column(convention.name, ".2f"), Column(f"{convention.name}, {INTERVAL}", ".2f")]
        columns += [Column(f"{convention.name}, cells", "d")]
    first = found.conventions[0].entries
    inert = [f"{method} on {place}" for (place, method, _), entry in first.items() if entry.inert]
    rows = [
        (
            *(place, method),
            *(
                value
                for convention in found.conventions
                for value in _entry(convention.entries.get((place, method, family)))
            ),
        )
        for place, method, family in sorted(first, key=lambda key: key[0])
    ]
    means = "; ".join(
        f"{convention.name}: {corruption_tables.averaged(convention)}"
        for convention in found.conventions
    )
    leads: list[tuple[Value, ...]] = [
        (
            *(lead.place, lead.convention, lead.best or "none", points(lead.score)),
            *(*_mean(lead.gated), *_mean(lead.always)),
            None if lead.gated is None else lead.gated.cells,
        )
        for lead in found.leads
    ]
    return (
        Table(
            "layers-accuracy",
            f"Top-1 accuracy in percent. {means}."
            + (f" Inert, and so the frozen model: {', '.join(inert)}." if inert else ""),
            tuple(columns),
            tuple(rows),
        ),
        Table(
            "layers-lead",
            "Accuracy of layer transport less that of the best method that learns, in points, over "
            "streams that all met.",
            (
                *(Column("backbone"), Column("mean"), Column("best that learns")),
                *(Column("its top-1", ".2f"), Column("gated less it", "+.2f")),
                *(Column(f"gated, {INTERVAL}", "+.2f"), Column("ungated less it", "+.2f")),
                *(Column(f"ungated, {INTERVAL}", "+.2f"), Column("cells", "d")),
            ),
            tuple(leads),
        ),
    )


def _entry(entry: Entry | None) -> tuple[Value, ...]:
    if entry is None:
        return (None, None, None)
    return points(entry.mean.value), around(entry.mean.interval), entry.mean.cells


def _mean(mean: Mean | None) -> tuple[Value, Value]:
    return (None, None) if mean is None else (points(mean.value), around(mean.interval))


def of_streams(found: OnStreams) -> tuple[Table, ...]:
    """By kind of stream, and what is kept and lost altogether."""
    rows: list[tuple[Value, ...]] = [
        (
            *(row.policies.backbone, row.policies.place, row.size),
            *(row.policies.gated.cells, points(row.policies.never.value)),
            *(points(row.policies.always.value), points(row.policies.gated.value)),
            *(around(row.policies.gated.interval), points(row.policies.accept)),
            *(points(_loss(row.worst)), points(row.kept)),
        )
        for row in found.rows
    ]
    wholes: list[tuple[Value, ...]] = [
        (
            *(whole.place, whole.streams, *_mean(whole.always), *_mean(whole.gated)),
            *(points(whole.kept), points(_loss(whole.worst_always))),
            *(points(_loss(whole.worst)), whole.where if whole.worst < 0 else None),
        )
        for whole in found.wholes
    ]
    return (
        Table(
            "layers-streams",
            "Top-1 accuracy in percent: the frozen model, layer transport always, and behind its "
            "certificate. Worst loss: of any stream to the frozen model, in points. Kept: of the "
            "ungated gain.",
            (
                *(Column("backbone"), Column("stream"), Column("B", "d"), Column("streams", "d")),
                *(Column("frozen", ".2f"), Column("ungated", ".2f"), Column("gated", ".2f")),
                *(Column(f"gated, {INTERVAL}", ".2f"), Column("accepted, %", ".1f")),
                *(Column("worst loss", ".2f"), Column("kept, %", ".0f")),
            ),
            tuple(rows),
        ),
        Table(
            "layers-kept",
            "Gains over the frozen model in points on all streams, what the certificate keeps of "
            "the gain on shuffled corrupted ones, and the most that any stream loses.",
            (
                *(Column("backbone"), Column("streams", "d"), Column("ungated", "+.2f")),
                *(Column(f"ungated, {INTERVAL}", "+.2f"), Column("gated", "+.2f")),
                *(Column(f"gated, {INTERVAL}", "+.2f"), Column("kept, %", ".0f")),
                *(Column("worst loss, ungated", ".2f"), Column("worst loss, gated", ".2f")),
                Column("where"),
            ),
            tuple(wholes),
        ),
    )


def _loss(gain: float) -> float:
    """How much is lost; nothing where something is gained."""
    return max(0.0, -gain)


def of_gate(found: Gating) -> tuple[Table, ...]:
    """What the certificate tells apart, by kind of stream, and every threshold."""
    rows: list[tuple[Value, ...]] = [
        (
            *(at.place, at.tau, points(at.accuracy), points(at.gain), points(at.accept)),
            *(points(at.kept), points(_loss(at.worst)), at.good, at.registered),
        )
        for at in found.thresholds
    ]
    return (
        certificate_tables.summary(found.certificate, "layers-certificate"),
        certificate_tables.by_place(found.certificate, "layers-certificate-streams", "stream"),
        Table(
            "layers-thresholds",
            "The gate by its threshold: accuracy in percent and mean gain in points over all "
            "streams, what is kept of the ungated gain on shuffled corrupted ones, the most that "
            f"any stream loses. Good: {100 * KEEP:g} % kept or more, {100 * LOSE:g} point lost or "
            "less.",
            (
                *(Column("backbone"), Column("τ", "g"), Column("gated", ".2f")),
                *(Column("gain", "+.2f"), Column("accepted, %", ".1f"), Column("kept, %", ".0f")),
                *(Column("worst loss", ".2f"), Column("good"), Column("registered")),
            ),
            tuple(rows),
        ),
    )


def of_ablation(found: Sequence[Ablation]) -> Table:
    """Settings beside the registered ones."""
    rows: list[tuple[Value, ...]] = [
        (
            *(row.method, row.place, row.kind, row.accuracy.cells, points(row.accuracy.value)),
            *(points(row.registered), *_mean(row.over), points(row.accept)),
            points(_loss(row.worst)),
        )
        for row in found
    ]
    return Table(
        "layers-ablation",
        "Other settings beside the registered ones on the same streams: top-1 accuracy in percent, "
        "and what they add in points.",
        (
            *(Column("method"), Column("backbone"), Column("stream"), Column("streams", "d")),
            *(Column("top-1", ".2f"), Column("registered", ".2f"), Column("added", "+.2f")),
            *(Column(f"added, {INTERVAL}", "+.2f"), Column("accepted, %", ".1f")),
            Column("worst loss", ".2f"),
        ),
        tuple(rows),
    )
