"""The choice: every pair of the grid on the batches measured, and the rules that pick one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from corruptions import CONDITIONS, SEVERITIES
from numpy.typing import NDArray
from scipy.stats import spearmanr
from sources import SOURCES
from streams import BATCH_SIZES, ORDERS, accepts

Array = NDArray[Any]
MIN_SAMPLES = (1, 2, 4, 8, 12, 16, 24, 32, 48)
MIN_CLASSES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
LIMIT = 1.0  # points a cell may lose to the frozen model
TIE = 0.05  # points of gain that count as equal
FREE = 0.1  # points of gain a requirement may cost any i.i.d. stream


@dataclass(frozen=True)
class Row:
    """One pair of the grid, in points of accuracy over the frozen model and shares of batches."""

    min_samples: int
    min_classes: int
    gain: dict[str, float]  # by order, mean over models and batch sizes, corrupted
    accepted: dict[str, float]  # likewise
    clean_gain: float  # i.i.d.
    worst: float  # smallest gain of a cell: model, corrupted or clean, order, batch size
    worst_at: str
    cost: float  # largest gain lost to coverage by an i.i.d. stream: model, condition, batch size


class Records:
    """The batches measured, added up over cells: model, corrupted or clean, order, batch size."""

    def __init__(self, columns: dict[str, Array]) -> None:
        self.columns = columns
        self.shape = (len(SOURCES), 2, len(ORDERS), len(BATCH_SIZES))
        self.streams = (len(SOURCES), len(CONDITIONS), len(BATCH_SIZES))
        self.model, self.condition = (columns[k].astype(int) for k in ("model", "condition"))
        at = (self.model, 1 * (self.condition == 0), columns["order"].astype(int))
        size = np.searchsorted(BATCH_SIZES, columns["batch"])
        self.cell = np.ravel_multi_index((*at, size), self.shape)
        self.evidence = np.stack([columns[name] for name in ("ratio", "confident", "classes")])
        self.steps = columns["ungated"] - columns["frozen"]
        self.stream = np.ravel_multi_index((self.model, self.condition, size), self.streams)
        self.iid = columns["order"] == 0

    def accepted(self, min_samples: int, min_classes: int) -> Array:  # -> (rows,)
        """The gate's verdict on every batch."""
        n_classes = np.array([len(source.labels) for source in SOURCES])[self.model]
        return accepts(self.evidence, n_classes, min_samples, min_classes)

    def sum(self, weights: Array) -> Array:  # (rows,) -> (models, 2, orders, sizes)
        """A quantity added up over every cell's batches."""
        return np.bincount(self.cell, weights, int(np.prod(self.shape))).reshape(self.shape)

    def gains(self, accepted: Array) -> Array:  # (rows,) -> (models, conditions, sizes)
        """Points gained by every i.i.d. stream."""
        weights = (self.columns["size"] * self.iid, self.steps * accepted * self.iid)
        size, steps = (np.bincount(self.stream, w, np.prod(self.streams)) for w in weights)
        return (100 * steps / size).reshape(self.streams)

    def evaluate(self, sources: list[int], left_out: int | None = None) -> list[Row]:
        """Every pair of the grid on some sources, without one corruption where named."""
        kept = (self.condition - 1) // len(SEVERITIES) != left_out
        samples, batches = self.sum(kept * self.columns["size"]), self.sum(kept)
        free = self.gains(kept * self.accepted(1, 1))
        rows = []
        for pair in ((s, c) for s in MIN_SAMPLES for c in MIN_CLASSES):
            accepted = kept * self.accepted(*pair)
            points = (100 * self.sum(self.steps * accepted) / samples)[sources]
            share = (self.sum(accepted) / batches)[sources]
            m, clean, o, b = np.unravel_index(points.argmin(), points.shape)
            kind, size = ("corrupted", "clean")[clean], BATCH_SIZES[b]
            rows.append(
                Row(
                    *pair,
                    gain=dict(zip(ORDERS, points[:, 0].mean(axis=(0, 2)).tolist(), strict=True)),
                    accepted=dict(zip(ORDERS, share[:, 0].mean(axis=(0, 2)).tolist(), strict=True)),
                    clean_gain=float(points[:, 1, 0].mean()),
                    worst=float(points.min()),
                    worst_at=f"{SOURCES[sources[m]].name}, {kind}, {ORDERS[o]}, B {size}",
                    cost=float((free - self.gains(accepted))[sources].max()),
                )
            )
        return rows

    def policies(self, min_samples: int, min_classes: int) -> list[dict[str, Any]]:
        """Accuracies of every cell: frozen, Source-GDA, never, always or sometimes gated."""
        size, ones = self.sum(self.columns["size"]), np.ones(len(self.steps))
        accuracy = {k: 100 * self.sum(self.columns[k]) / size for k in ("frozen", "gda", "ungated")}
        values = dict(accuracy)
        for name, pair in {"tau alone": (1, 1), "gated": (min_samples, min_classes)}.items():
            accepted = self.accepted(*pair)
            values[name] = accuracy["frozen"] + 100 * self.sum(self.steps * accepted) / size
            values[f"{name}, accepted"] = self.sum(accepted) / self.sum(ones)
        values["confident"] = self.sum(self.columns["confident"]) / size
        values["classes"] = self.sum(self.columns["classes"]) / self.sum(ones)
        table = []
        for flat, at in enumerate(np.ndindex(*self.shape)):
            m, clean, o, b = at
            row: dict[str, Any] = {"model": SOURCES[m].name, "set": ("corrupted", "clean")[clean]}
            row |= {"order": ORDERS[o], "B": BATCH_SIZES[b]}
            row |= {name: float(value[at]) for name, value in values.items()}
            ratio, steps, condition = (
                column[self.cell == flat]
                for column in (self.columns["ratio"], self.steps, self.condition)
            )
            row["median ratio"] = float(np.median(ratio))
            if (clean, ORDERS[o], BATCH_SIZES[b]) == (0, "iid", 64):
                row["spearman"] = float(spearmanr(ratio, steps).statistic)
                by = [condition == c for c in np.unique(condition)]
                medians, gains = [np.median(ratio[c]) for c in by], [steps[c].mean() for c in by]
                row["spearman of conditions"] = float(spearmanr(medians, gains).statistic)
            table.append(row)
        return table


def choose(rows: list[Row]) -> Row:
    """The smallest loss in other orders among pairs that cost no i.i.d. stream over FREE points.

    Pairs that differ by less than a tenth of FREE are equal; of these the smallest constants win.
    """
    affordable = [row for row in rows if row.cost <= FREE]
    losses = [round(-row.gain["correlated"] - row.gain["ordered"], 2) for row in affordable]
    ranked = zip(losses, affordable, strict=True)
    return min(ranked, key=lambda it: (it[0], it[1].min_classes, it[1].min_samples))[1]


def choose_safest(rows: list[Row], limit: float = LIMIT) -> Row:
    """The rule written before the first run, and overruled: docs/coverage.md says why.

    The largest i.i.d. gain among pairs whose worst cell loses at most `limit` points.
    Where none is that safe, the limit is the smallest worst loss of any pair, plus TIE. Of pairs
    within TIE of the largest gain the smallest worst loss wins, then the smallest constants.
    """
    floor = min(-limit, max(row.worst for row in rows) - TIE)
    safe = [row for row in rows if row.worst >= floor]
    best = max(row.gain["iid"] for row in safe)
    equal = [row for row in safe if row.gain["iid"] >= best - TIE]
    return min(equal, key=lambda row: (round(-row.worst, 2), row.min_classes, row.min_samples))


def settle(rows: list[Row], min_classes: int) -> int:
    """The largest `min_samples` within TIE of the best i.i.d. gain, given `min_classes`.

    For sources with fewer classes than that: as many confident samples as classes are implied,
    so elsewhere `min_samples` hardly matters.
    """
    gains = {row.min_samples: row.gain["iid"] for row in rows if row.min_classes == min_classes}
    return max(size for size, gain in gains.items() if gain >= max(gains.values()) - TIE)
