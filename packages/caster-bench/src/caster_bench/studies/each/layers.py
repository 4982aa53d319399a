"""Layer transport: beside other methods, on streams of every kind, its certificate, settings."""

from __future__ import annotations

from collections.abc import Iterator

from caster_bench.studies.each import certificate, corruption_figures, gate
from caster_bench.studies.each import layers_ablation as ablation
from caster_bench.studies.each import layers_accuracy as accuracy
from caster_bench.studies.each import layers_gate as gating
from caster_bench.studies.each import layers_streams as streams
from caster_bench.studies.each import layers_tables as tables
from caster_bench.studies.results import Results
from caster_bench.studies.section import Picture, Section
from caster_bench.studies.tables import Table, cells

TITLE = "Layer transport"
HOW = (
    "Accuracy: corrupted streams that another method met too; seeds are averaged, then conditions, "
    "and methods are compared only where they met the same cells. Streams: layer transport as it "
    "is registered beside the same update always taken, which is the cell without a gate where "
    "there is one, else the ungated method. Accepted: share of batches. "
    "Streams of spare corruptions alone, on which constants are chosen, have rows of their own and "
    "count nowhere else. Kept: sum of the "
    "gated gains over the sum of the ungated, on shuffled corrupted streams of one condition. "
    "Certificate: the median ratio of the batches of a cell without a gate; gain: of the same "
    "cell. Thresholds are applied batch by batch to those cells, in which every batch is compared "
    "with the frozen model, so that no ratio depends on what became of the batches before; gated "
    "cells that compare every batch too are checked to agree, prediction by prediction. The "
    "registered method compares ever fewer batches while its verdict stays the same, and its own "
    "figures are those of the streams. Intervals from cells drawn anew."
)


def section(results: Results) -> Section | None:
    """The study's part of the report."""
    parts = list(_parts(results))
    if not parts:
        return None
    return Section(
        "layers",
        TITLE,
        tuple(sentence for told, _, _ in parts for sentence in told),
        HOW,
        tuple(table for _, made, _ in parts for table in made),
        tuple(picture for _, _, drawn in parts for picture in drawn),
    )


Part = tuple[tuple[str, ...], tuple[Table, ...], tuple[Picture, ...]]


def _parts(results: Results) -> Iterator[Part]:
    """Words, tables and pictures of all that the sweep has cells for."""
    compared = accuracy.measure(results)
    if compared is not None:
        yield _of_accuracy(compared)
    met = streams.measure(results)
    if met is not None:
        yield _of_streams(met)
    gated = gating.measure(results)
    if gated is not None:
        found = gated.certificate
        pictures = certificate.pictures(found, "layers-", "")
        yield certificate.in_words(found), tables.of_gate(gated), pictures
    other = ablation.measure(results)
    if other:
        yield (), (tables.of_ablation(other),), ()


def _of_accuracy(found: accuracy.Accuracy) -> Part:
    told = tuple(
        f"{lead.place}, {lead.convention}: layer transport is {100 * lead.gated.value:+.2f} points "
        f"from the best method that learns, {lead.best}."
        for lead in found.leads
        if lead.gated is not None
    )
    drawn = found.conventions[0].comparable()
    picture = Picture(
        "layers-accuracy",
        "Mean over corrupted cells, by backbone and data.",
        "Accuracy by method. " + " ".join(told),
        1.2 + 0.3 * len({method for _, method, _ in drawn.entries}),
        lambda figure, ink: corruption_figures.draw(figure, drawn, ink),
    )
    return told, tables.of_accuracy(found), (picture,) if drawn.entries else ()


def _of_streams(found: streams.OnStreams) -> Part:
    told = tuple(
        f"{whole.place}, {cells(whole.streams)}: the certificate "
        + ("" if whole.kept is None else f"keeps {100 * whole.kept:.0f} % of the gain on shuffled ")
        + ("" if whole.kept is None else "streams, and ")
        + f"loses at most {max(0.0, -100 * whole.worst):.2f} points on any."
        for whole in found.wholes
    )
    rows = [*found.kinds.rows, *found.kinds.pooled]
    picture = Picture(
        "layers-streams",
        "Mean accuracy by kind of stream over all backbones and data, with 95 % intervals from "
        "cells drawn anew.",
        "Accuracy of the frozen model, layer transport and gated layer transport by kind of "
        f"stream. {' '.join(told)}",
        0.85 + 0.35 * len(rows),
        lambda figure, ink: gate.draw(figure, found.kinds, ink),
    )
    return told, tables.of_streams(found), (picture,)
