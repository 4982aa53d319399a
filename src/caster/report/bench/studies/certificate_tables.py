"""Tables of the certificate study."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from caster.report.bench.paper import printed
from caster.report.bench.tables import INTERVAL, Column, Table, Value, around, points

if TYPE_CHECKING:
    from caster.report.bench.studies.certificate import Bands, Certificate

TAUS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 3.9, 5.0, 10.0)
ENDLESS = "no upper end"


def all_of(found: Certificate, ending: str) -> tuple[Table, ...]:
    """Everything the study has in numbers; `ending` tells transports of other settings apart."""
    tables = _summary(found), _by_place(found), _thresholds(found)
    of = f"{found.method}. " if ending else ""
    return tuple(
        replace(table, name=f"{table.name}{ending}", caption=f"{of}{table.caption}")
        for table in tables
    )


def _summary(found: Certificate) -> Table:
    """Ours, its interval, the same of the mixed metric, and the paper's."""
    ours, wrong = _told(found.pooled), [_told(bands) for bands in found.mixed.values()]
    nothing = [None] * len(wrong)
    paper = printed("certificate")
    rows: list[tuple[Value, ...]] = [
        (name, value, ends, *(told[name][0] for told in wrong), paper.get(key))
        for (name, (value, ends)), key in zip(ours.items(), _KEYS, strict=True)
    ]
    low, high = found.plateau
    endless = math.isinf(high)
    width = "from zero" if low == 0 else high / low
    begins, stops = paper["plateau"]
    rows += [
        ("mean gain, best threshold", points(found.curve.best), None, *nothing, paper["best"]),
        ("plateau from", low, None, *nothing, begins),
        ("plateau to", ENDLESS if endless else high, None, *nothing, stops),
        (
            *("plateau, highest over lowest", ENDLESS if endless else width, None),
            *(*nothing, stops / begins),
        ),
    ]
    titles = list(found.mixed) if len(found.mixed) > 1 else ["mixed metric"] * len(found.mixed)
    mixed = (
        " Mixed metric: the same of a Euclidean residual over a Mahalanobis margin, on the cells "
        "that have it."
        if titles
        else ""
    )
    return Table(
        "certificate-summary",
        f"What the certificate tells apart, the gate at {found.tau:g}; gains in points."
        f"{mixed} Plateau: within 0.3 points of the best threshold. Paper: {paper['where']}.",
        (
            *(Column("figure"), Column("ours", ".4g"), Column(INTERVAL, "+.2f")),
            *(*(Column(title, ".4g") for title in titles), Column("paper", ".4g")),
        ),
        tuple(rows),
    )


_KEYS = (  # of the paper's figures
    *("cells", "lowest_losing", "highest_harmless", "harmless_without"),
    *("ungated", "gated", "regime", "correlation"),
)


def _told(bands: Bands) -> dict[str, tuple[Value, Value]]:
    """Figures of some cells, each with its interval, in the order of `_KEYS`."""
    return {
        "cells": (bands.cells, None),
        "lowest certificate of a cell losing more than 10 points": (bands.lowest_losing, None),
        "highest finite certificate of a harmless cell": (bands.highest_harmless, None),
        "harmless cells with an infinite one": (bands.harmless_without, None),
        "mean gain, always": (points(bands.ungated.value), around(bands.ungated.interval)),
        "mean gain, gated": (points(bands.gated.value), around(bands.gated.interval)),
        "cells in the non-degenerate regime": (bands.regime, None),
        "rank correlation with gain there": (bands.correlation, None),
    }


def _by_place(found: Certificate) -> Table:
    rows: list[tuple[Value, ...]] = [
        (
            *(place, b.cells, points(b.ungated.value), around(b.ungated.interval)),
            *(points(b.gated.value), around(b.gated.interval)),
            *(b.lowest_losing, b.highest_harmless, b.regime, b.correlation),
        )
        for place, b in found.by_place.items()
    ]
    return Table(
        "certificate-data",
        f"The same by data; gains in points, the gate at {found.tau:g}.",
        (
            *(Column("data"), Column("cells", "d"), Column("always", "+.2f")),
            *(Column(f"always, {INTERVAL}", "+.2f"), Column("gated", "+.2f")),
            *(Column(f"gated, {INTERVAL}", "+.2f"), Column("lowest losing", ".3g")),
            *(Column("highest harmless", ".3g"), Column("regime", "d")),
            Column("rank correlation", "+.2f"),
        ),
        tuple(rows),
    )


def _thresholds(found: Certificate) -> Table:
    taus = sorted({*TAUS, found.tau, *found.taus})
    rows: list[tuple[Value, ...]] = [(tau, points(found.curve.at(tau))) for tau in taus]
    rows.append(("always", points(found.pooled.ungated.value)))
    return Table(
        "certificate-thresholds",
        "Mean gain over the frozen head in points, by the threshold of the gate; coverage is asked "
        "of all but the last.",
        (Column("τ", "g"), Column("gain", "+.2f")),
        tuple(rows),
    )
