"""Tables of the certificate study."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from caster_bench.studies.paper import printed
from caster_bench.studies.tables import INTERVAL, Column, Table, Value, around, points

if TYPE_CHECKING:
    from caster_bench.studies.each.certificate import Bands, Certificate

TAUS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 3.9, 5.0, 10.0)
ENDLESS = "no upper end"


def all_of(found: Certificate, ending: str) -> tuple[Table, ...]:
    """Everything the study has in numbers; `ending` tells transports of other settings apart."""
    paper = printed("certificate")
    tables = summary(found, "certificate-summary", paper), by_place(found), _thresholds(found)
    of = f"{found.method}. " if ending else ""
    return tuple(
        replace(table, name=f"{table.name}{ending}", caption=f"{of}{table.caption}")
        for table in tables
    )


def summary(found: Certificate, name: str, paper: Mapping[str, Any] | None = None) -> Table:
    """Ours, its interval, the same of the mixed metric, and the paper's where it has them."""
    ours, wrong = _told(found.pooled), [_told(bands) for bands in found.mixed.values()]
    ours["rank correlation with gain there"] = (
        found.pooled.correlation,
        found.correlation_interval,
    )
    rows: list[tuple[Value, ...]] = [
        (title, value, ends, *(told[title][0] for told in wrong))
        for title, (value, ends) in ours.items()
    ]
    low, high = found.plateau
    endless = math.isinf(high)
    width = "from zero" if low == 0 else high / low
    plateau: dict[str, Value] = {
        "mean gain, best threshold": points(found.curve.best),
        "plateau from": low,
        "plateau to": ENDLESS if endless else high,
        "plateau, highest over lowest": ENDLESS if endless else width,
    }
    rows += [(title, value, None, *([None] * len(wrong))) for title, value in plateau.items()]
    if paper:
        beside = (*(paper.get(key) for key in _KEYS), paper["best"], *_plateau(paper["plateau"]))
        rows = [(*row, value) for row, value in zip(rows, beside, strict=True)]
    titles = list(found.mixed) if len(found.mixed) > 1 else ["mixed metric"] * len(found.mixed)
    mixed = (
        " Mixed metric: the same of a Euclidean residual over a Mahalanobis margin, on the cells "
        "that have it."
        if titles
        else ""
    )
    columns = (
        *(Column("figure"), Column("ours", ".4g"), Column(INTERVAL, "+.2f")),
        *(*(Column(title, ".4g") for title in titles), Column("paper", ".4g")),
    )
    where = f" Paper: {paper['where']}." if paper else ""
    return Table(
        name,
        f"What the certificate tells apart, the gate at {found.tau:g}; gains in points."
        f"{mixed} Plateau: within 0.3 points of the best threshold.{where}",
        columns if paper else columns[:-1],
        tuple(rows),
    )


def _plateau(ends: tuple[float, float]) -> tuple[float, float, float]:
    return ends[0], ends[1], ends[1] / ends[0]


_KEYS = (  # of the paper's figures
    *("cells", "losing", "lowest_losing", "highest_losing", "highest_harmless"),
    *("harmless_without", "ungated", "gated", "regime", "correlation"),
)


def _told(bands: Bands) -> dict[str, tuple[Value, Value]]:
    """Figures of some cells, each with its interval, in the order of `_KEYS`."""
    return {
        "cells": (bands.cells, None),
        "cells losing more than 10 points": (bands.losing, None),
        "lowest certificate of a cell losing more than 10 points": (bands.lowest_losing, None),
        "highest finite certificate of such a cell": (bands.highest_losing, None),
        "highest finite certificate of a harmless cell": (bands.highest_harmless, None),
        "harmless cells with an infinite one": (bands.harmless_without, None),
        "mean gain, always": (points(bands.ungated.value), around(bands.ungated.interval)),
        "mean gain, gated": (points(bands.gated.value), around(bands.gated.interval)),
        "cells in the non-degenerate regime": (bands.regime, None),
        "rank correlation with gain there": (bands.correlation, None),
    }


def by_place(found: Certificate, name: str = "certificate-data", what: str = "data") -> Table:
    """The same by data, or by whatever else the cells are told apart."""
    rows: list[tuple[Value, ...]] = [
        (
            *(place, b.cells, points(b.ungated.value), around(b.ungated.interval)),
            *(points(b.gated.value), around(b.gated.interval)),
            *(points(b.over_always.value), around(b.over_always.interval)),
            points(found.best[place]),
            *(b.losing, b.lowest_losing, b.highest_harmless, b.regime, b.correlation),
        )
        for place, b in found.by_place.items()
    ]
    return Table(
        name,
        f"The same by {what}; gains in points, the gate at {found.tau:g}, and at the threshold "
        "that would have been best there.",
        (
            *(Column(what), Column("cells", "d"), Column("always", "+.2f")),
            *(Column(f"always, {INTERVAL}", "+.2f"), Column("gated", "+.2f")),
            *(Column(f"gated, {INTERVAL}", "+.2f"), Column("over always", "+.2f")),
            *(Column(f"over always, {INTERVAL}", "+.2f"), Column("best", "+.2f")),
            *(Column("losing", "d"), Column("lowest losing", ".3g")),
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
