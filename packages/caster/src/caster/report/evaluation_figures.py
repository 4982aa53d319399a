"""An evaluation's figures, drawn on any matplotlib figure or part of one, without pyplot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from caster.report import certificates
from caster.report.certificates import Point
from caster.report.evaluation_results import Batch, Evaluation, Score
from caster.report.figures import LOOKS, ROUND, VERDICTS, Look, dress, kind_of, legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

    from caster.report.figures import Canvas

Edges = NDArray[np.intp]

MOST = 100  # places along a stream; of more batches, neighbours are taken together


def accuracies(canvas: Canvas, found: Evaluation, ink: str) -> None:
    """Accuracy of every classifier, with its interval."""
    axes = canvas.subplots()
    for place, (name, score) in enumerate(found.scores.items()):
        colour = LOOKS[name].colour or ink
        if score.interval:
            ends = (score.interval.low, score.interval.high)
            axes.plot(ends, (place, place), color=colour, lw=5, alpha=0.35, solid_capstyle="butt")
        axes.plot(score.accuracy, place, "o", color=colour, ms=8, clip_on=False)
        axes.annotate(
            f"{score.accuracy:.1%}",
            (score.accuracy, place),
            (0, 9),
            textcoords="offset points",
            ha="center",
            color=ink,
            fontsize=10,
        )
    axes.set_yticks(
        range(len(found.scores)), [found.mechanism.label(name) for name in found.scores]
    )
    axes.set_ylim(len(found.scores) - 0.6, -0.8)
    axes.margins(x=0.12)
    axes.set_xlim(_possible(axes.get_xlim()))
    _percent(axes.xaxis)
    axes.set_xlabel("accuracy", color=ink)
    dress(axes, ink, grid="x")
    axes.tick_params(axis="y", labelsize=10.5, length=0)


def points(found: Evaluation) -> list[Point]:
    """Every batch, with what adapting gained on it, whatever the verdict."""
    return [
        Point(
            batch.verdict.ratio,
            batch.accuracy("ungated") - batch.accuracy(found.baseline),
            batch.size,
            batch.verdict.reason,
        )
        for batch in found.batches
    ]


def certificate_against_gain(canvas: Canvas, found: Evaluation, ink: str) -> None:
    """What adapting gained over the baseline against the certificate, a point a batch."""
    certificates.certificate_against_gain(
        canvas.subplots(), points(found), found.tau, found.baseline, found.mechanism.terms, ink
    )
    canvas.legend(ncols=3, **legend(ink))


def reliability(canvas: Canvas, found: Evaluation, ink: str) -> None:
    """Accuracy by confidence, of the baseline and of what is gated side by side."""
    panels = canvas.subplots(1, 2, sharex=True, sharey=True)
    for axes, name in zip(panels, (found.baseline, "gated"), strict=True):
        _reliability_panel(axes, found.scores[name], _look(found, name), ink)
    panels[0].set_ylabel("accuracy", color=ink)


def _look(found: Evaluation, name: str) -> Look:
    """How a classifier is drawn, under the name it has here."""
    return replace(LOOKS[name], label=found.mechanism.label(name))


def _reliability_panel(axes: Axes, score: Score, look: Look, ink: str) -> None:
    colour, bins = look.colour or ink, score.reliability
    confidences, right = [b.confidence for b in bins], [b.accuracy for b in bins]
    axes.plot((0, 1), (0, 1), color=ink, lw=0.8, ls=":")
    axes.vlines(confidences, confidences, right, color=colour, lw=1.6, alpha=0.5)
    total = sum(b.count for b in bins)
    axes.scatter(confidences, right, s=[12 + 240 * b.count / total for b in bins], color=colour)
    axes.set(xlim=(-0.03, 1.05), ylim=(-0.03, 1.05), aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("confidence", color=ink)
    title = f"{look.label}: ECE {100 * score.calibration_error:.1f} points"
    axes.set_title(title, loc="left", color=ink, fontsize=11)
    dress(axes, ink)


def along_the_stream(canvas: Canvas, found: Evaluation, ink: str) -> None:
    """Accuracy batch by batch, and the verdicts below it."""
    upper, lower = canvas.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    edges = stretches(len(found.batches))
    groups = [found.batches[a:b] for a, b in pairwise(edges)]
    middles = (edges[:-1] + edges[1:] - 1) / 2 + 1  # batches are counted from 1
    marker = "o" if len(groups) <= 40 else ""
    for name in (found.baseline, "ungated", "gated"):
        shares = [_share(group, name) for group in groups]
        upper.plot(
            middles, shares, marker=marker, ms=4, clip_on=False, **_look(found, name).line(ink)
        )
    upper.set_ylim(_possible(upper.get_ylim()))
    _percent(upper.yaxis)
    upper.set_ylabel("accuracy", color=ink)
    _verdict_strip(lower, groups, edges, found.mechanism.terms.kinds)
    dress(upper, ink)
    dress(lower, ink)
    lower.set_xlabel("batch", color=ink)
    lower.xaxis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))
    lines, bars = (axes.get_legend_handles_labels() for axes in (upper, lower))
    # A legend fills its columns first: a line above, a verdict below.
    handles, labels = (
        [entry for pair in zip_longest(*both) for entry in pair if entry is not None]
        for both in zip(lines, bars, strict=True)
    )
    canvas.legend(handles, labels, ncols=3, **legend(ink))


def _verdict_strip(
    axes: Axes, groups: Sequence[Sequence[Batch]], edges: Edges, kinds: Mapping[str, str]
) -> None:
    """Share of every kind of verdict, stacked: whole cells where every batch has its own."""
    starts, widths, base = edges[:-1] + 0.5, np.diff(edges), np.zeros(len(groups))
    for kind, words in kinds.items():
        shares = [np.mean([kind_of(b.verdict.reason) == kind for b in group]) for group in groups]
        axes.bar(starts, shares, widths, base, align="edge", color=VERDICTS[kind][0], label=words)
        base += shares
    axes.set(xlim=(0.5, edges[-1] + 0.5), ylim=(0, 1), yticks=[])


def stretches(n: int) -> Edges:
    """Where each of at most `MOST` stretches of n batches begins, and n.

    >>> stretches(3), len(stretches(2_000))
    (array([0, 1, 2, 3]), 101)
    """
    return np.linspace(0, n, min(n, MOST) + 1).round().astype(int)


def _share(batches: Sequence[Batch], name: str) -> float:
    return sum(batch.right[name] for batch in batches) / sum(batch.size for batch in batches)


def _possible(limits: tuple[float, float]) -> tuple[float, float]:
    """Limits of an axis of shares: none are below 0 or above 1."""
    return max(0.0, limits[0]), min(1.0, limits[1])


def _percent(axis: Axis) -> None:
    """As many digits as the ticks need, and no more."""
    axis.set_major_locator(MaxNLocator(7, steps=ROUND))
    axis.set_major_formatter(lambda share, _: f"{100 * share:.4g}%")
