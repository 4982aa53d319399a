"""Render an evaluation as one self-contained HTML page with figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from caster._version import __version__
from caster.report import figures, html, noun
from caster.report.evaluation_results import (
    MIN_BATCHES,
    Batch,
    ClassScore,
    Evaluation,
    Score,
    in_points,
)
from caster.report.figures import (
    BLUE,
    LINE_STYLES,
    ROUND,
    VERDICTS,
    VERMILLION,
    LineStyle,
    dress,
    kind_of,
    legend,
)
from caster.report.metrics import BINS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

    from caster.report.figures import Canvas

Edges = NDArray[np.intp]

MIN_BATCHES_FOR_PRECISION = 20  # with fewer batches, bootstrap intervals over batches are rough
MAX_LISTED = 10  # helped classes to list, and as many harmed ones
MAX_POINTS = 100  # points along a stream; more batches are averaged in groups


def render(found: Evaluation) -> str:
    """Render the page."""
    label, n = found.mechanism.label, len(found.batches)
    return html.fill(
        html.HERE,
        "evaluation.html",
        found=found,
        label=label,
        n=n,
        rough=MIN_BATCHES_FOR_PRECISION,
        min_batches=MIN_BATCHES,
        most=MAX_POINTS,
        bins=BINS,
        listed=MAX_LISTED,
        baseline=noun(found.baseline),
        scores=[_score_row(label(name), score) for name, score in found.scores.items()],
        ratio=html.certificate(found.ratio),
        verdicts=[
            (reason, f"{count:,}", f"{count / n:.0%}", found.mechanism.reasons[reason])
            for reason, count in found.reasons.items()
        ],
        classes=list(_class_rows(found.classes)),
        gained=sum(c.gated > c.baseline for c in found.classes),
        lost=sum(c.gated < c.baseline for c in found.classes),
        tau=found.tau,
        reasons=found.mechanism.reasons,
        constants=_constants(found),
        version=__version__,
        **_figures(found),
    )


def _score_row(label: str, score: Score) -> tuple[str, ...]:
    interval = "none"
    if score.interval:
        interval = f"{100 * score.interval.low:.1f} to {100 * score.interval.high:.1f}"
    return (
        label,
        f"{100 * score.accuracy:.1f}",
        interval,
        f"{score.harm:.1%}",
        f"{score.help:.1%}",
        f"{score.nll:.3f}" if math.isfinite(score.nll) else "infinite",
        f"{100 * score.calibration_error:.1f}",
    )


def _constants(found: Evaluation) -> Markup:
    caption, own = "As used in this evaluation.", found.mechanism.settings
    if own is None:
        return html.constants(found.settings, caption)
    return html.layer_constants(own, caption)


# --- classes: as HTML, because the font of a figure may lack the script of a label -------------


def _class_rows(classes: tuple[ClassScore, ...]) -> Iterator[tuple[str, ...]]:
    helped, harmed = most_changed(classes)
    shown = [*helped, *reversed(harmed)]
    largest = max((abs(_change(c)) for c in shown), default=0.0)
    for c in shown:
        yield (
            str(c.label),
            f"{c.size:,}",
            f"{100 * c.baseline / c.size:.1f}",
            f"{100 * c.gated / c.size:.1f}",
            in_points(_change(c)),
            _bar(_change(c) / largest),
        )


def most_changed(
    classes: tuple[ClassScore, ...],
) -> tuple[list[ClassScore], list[ClassScore]]:
    """Select at most `MAX_LISTED` classes helped and harmed, those with most samples first.

    >>> helped, harmed = most_changed((ClassScore("cat", 9, 5, 8), ClassScore("dog", 9, 5, 5)))
    >>> [c.label for c in helped], harmed
    (['cat'], [])
    """
    helped = [c for c in classes if c.gated > c.baseline]
    harmed = [c for c in classes if c.gated < c.baseline]
    return (
        sorted(helped, key=lambda c: c.baseline - c.gated)[:MAX_LISTED],
        sorted(harmed, key=lambda c: c.gated - c.baseline)[:MAX_LISTED],
    )


def _change(c: ClassScore) -> float:
    return (c.gated - c.baseline) / c.size


def _bar(share: float) -> Markup:
    """Draw a bar right of a middle line for a gain, left of it for a loss; -1 to 1."""
    return Markup(
        '<svg width="200" height="12" viewBox="-100 0 200 12" aria-hidden="true">'
        '<rect x="{:.1f}" width="{:.1f}" height="12" fill="{}"/>'
        '<path d="M0 0V12" stroke="currentColor"/></svg>'
    ).format(min(0.0, 98 * share), 98 * abs(share), BLUE if share > 0 else VERMILLION)


# --- figures ----------------------------------------------------------------------------------


def _figures(found: Evaluation) -> dict[str, Markup]:
    """Draw every figure of the page, by its name in the template."""

    def drawn(draw: Callable[[Figure, Evaluation, str], None], alt: str, height: float) -> Markup:
        return html.figure(lambda canvas, ink: draw(canvas, found, ink), alt, height)

    label = found.mechanism.label
    accuracy = ", ".join(f"{label(c)} {s.accuracy:.1%}" for c, s in found.scores.items())
    verdicts = ", ".join(f"{reason} {count}" for reason, count in found.reasons.items())
    errors = ", ".join(
        f"{label(name)} {100 * found.scores[name].calibration_error:.1f} points"
        for name in (found.baseline, "gated")
    )
    return {
        "accuracies": drawn(accuracies, f"Accuracy: {accuracy}", 0.7 + 0.5 * len(found.scores)),
        "certificate": drawn(
            certificate_against_gain,
            figures.describe_certificate(found.batches, found.baseline, found.mechanism.terms),
            5.0,
        ),
        "stream": drawn(along_the_stream, f"Accuracy per batch, and the verdicts: {verdicts}", 4.4),
        "reliability": drawn(
            reliability,
            f"Accuracy against confidence. Expected calibration error: {errors}",
            4.5,
        ),
    }


def accuracies(canvas: Canvas, found: Evaluation, ink: str) -> None:
    """Plot the accuracy of every classifier with its interval."""
    axes = canvas.subplots()
    for y, (name, score) in enumerate(found.scores.items()):
        colour = LINE_STYLES[name].colour or ink
        if score.interval:
            ends = (score.interval.low, score.interval.high)
            axes.plot(ends, (y, y), color=colour, lw=5, alpha=0.35, solid_capstyle="butt")
        axes.plot(score.accuracy, y, "o", color=colour, ms=8, clip_on=False)
        axes.annotate(
            f"{score.accuracy:.1%}",
            (score.accuracy, y),
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


def certificate_against_gain(canvas: Canvas, found: Evaluation, ink: str) -> None:
    """Plot the ungated gain over the baseline against the certificate."""
    figures.certificate_against_gain(
        canvas.subplots(), found.batches, found.tau, found.baseline, found.mechanism.terms, ink
    )
    canvas.legend(ncols=3, **legend(ink))


def reliability(canvas: Canvas, found: Evaluation, ink: str) -> None:
    """Plot accuracy by confidence, for the baseline and the gated mechanism."""
    panels = canvas.subplots(1, 2, sharex=True, sharey=True)
    for axes, name in zip(panels, (found.baseline, "gated"), strict=True):
        _reliability_panel(axes, found.scores[name], _style(found, name), ink)
    panels[0].set_ylabel("accuracy", color=ink)


def _style(found: Evaluation, name: str) -> LineStyle:
    return replace(LINE_STYLES[name], label=found.mechanism.label(name))


def _reliability_panel(axes: Axes, score: Score, style: LineStyle, ink: str) -> None:
    colour, bins = style.colour or ink, score.reliability
    confidences, right = [b.confidence for b in bins], [b.accuracy for b in bins]
    axes.plot((0, 1), (0, 1), color=ink, lw=0.8, ls=":")
    axes.vlines(confidences, confidences, right, color=colour, lw=1.6, alpha=0.5)
    total = sum(b.count for b in bins)
    axes.scatter(confidences, right, s=[12 + 240 * b.count / total for b in bins], color=colour)
    axes.set(xlim=(-0.03, 1.05), ylim=(-0.03, 1.05), aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("confidence", color=ink)
    title = f"{style.label}: ECE {100 * score.calibration_error:.1f} points"
    axes.set_title(title, loc="left", color=ink, fontsize=11)
    dress(axes, ink)


def along_the_stream(canvas: Canvas, found: Evaluation, ink: str) -> None:
    """Plot accuracy per batch, and the verdicts below it."""
    upper, lower = canvas.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    edges = group_edges(len(found.batches))
    groups = [found.batches[a:b] for a, b in pairwise(edges)]
    middles = (edges[:-1] + edges[1:] - 1) / 2 + 1  # batches are counted from 1
    marker = "o" if len(groups) <= 40 else ""
    for name in (found.baseline, "ungated", "gated"):
        shares = [_share(group, name) for group in groups]
        upper.plot(
            middles, shares, marker=marker, ms=4, clip_on=False, **_style(found, name).line(ink)
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
    """Stack the share of every kind of verdict; a group of one batch is a solid cell."""
    starts, widths, base = edges[:-1] + 0.5, np.diff(edges), np.zeros(len(groups))
    for kind, words in kinds.items():
        shares = [np.mean([kind_of(b.verdict.reason) == kind for b in group]) for group in groups]
        axes.bar(starts, shares, widths, base, align="edge", color=VERDICTS[kind][0], label=words)
        base += shares
    axes.set(xlim=(0.5, edges[-1] + 0.5), ylim=(0, 1), yticks=[])


def group_edges(n: int) -> Edges:
    """Split n batches into at most `MAX_POINTS` groups: where each begins, and n.

    >>> group_edges(3), len(group_edges(2_000))
    (array([0, 1, 2, 3]), 101)
    """
    return np.linspace(0, n, min(n, MAX_POINTS) + 1).round().astype(int)


def _share(batches: Sequence[Batch], name: str) -> float:
    return sum(batch.right[name] for batch in batches) / sum(batch.size for batch in batches)


def _possible(limits: tuple[float, float]) -> tuple[float, float]:
    """Clip the limits of an axis of shares to 0 and 1."""
    return max(0.0, limits[0]), min(1.0, limits[1])


def _percent(axis: Axis) -> None:
    """Label ticks in percent, with as many digits as they need."""
    axis.set_major_locator(MaxNLocator(7, steps=ROUND))
    axis.set_major_formatter(lambda share, _: f"{100 * share:.4g}%")
