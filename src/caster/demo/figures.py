"""The demo's two figures, drawn on any matplotlib figure or part of one, without pyplot."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from caster.demo.results import Batch, Results, Story, Stream

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    Canvas = Figure | SubFigure

# Okabe and Ito's colours, told apart with any colour vision and on a light or a dark page.
BLUE, VERMILLION, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"

LINES = {  # property of a Stream: label, colour (None: the ink's), style of line, width
    "frozen": ("frozen head", None, "-", 1.4),
    "source_gda": ("Source-GDA", GREEN, ":", 1.8),
    "ungated": ("transport, ungated", VERMILLION, "--", 1.8),
    "gated": ("transport, gated", BLUE, "-", 2.6),
}
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 3, 5, 10, 20, 50, 100)


def accuracy_by_severity(canvas: Canvas, results: Results, ink: str) -> None:
    """Accuracy of the four classifiers against severity, a panel a shift."""
    shifts = list(dict.fromkeys(s.shift for s in results.streams if s.severity))
    panels = canvas.subplots(-(-len(shifts) // 3), 3, sharey=True, squeeze=False)
    for axes, shift in zip(panels.flat, shifts, strict=True):
        _severity_panel(
            axes, [results.clean, *(s for s in results.streams if s.shift == shift)], ink
        )
        axes.set_title(shift, loc="left", color=ink, fontsize=11, fontweight="bold")
    for axes in panels[:, 0]:
        axes.set_ylabel("accuracy", color=ink)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    canvas.legend(handles, labels, ncols=4, **_legend(ink))
    canvas.supxlabel("severity (0: clean), and share of batches accepted", color=ink, fontsize=10)


def _severity_panel(axes: Axes, streams: list[Stream], ink: str) -> None:
    severities = [stream.severity for stream in streams]
    for name, (label, colour, style, width) in LINES.items():
        accuracies = [getattr(stream, name) for stream in streams]
        axes.plot(severities, accuracies, style, color=colour or ink, lw=width, label=label)
    axes.set_xticks(severities, [f"{s.severity}\n{s.acceptance:.0%}" for s in streams])
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    _dress(axes, ink)
    axes.tick_params(axis="x", labelsize=8)


def certificate_against_gain(canvas: Canvas, results: Results, ink: str) -> None:
    """What transport gained over the frozen head against the certificate, a point a batch."""
    axes = canvas.subplots()
    batches = [batch for stream in results.streams for batch in stream.batches]
    finite = [b.verdict.ratio for b in batches if math.isfinite(b.verdict.ratio)]
    low, high = 0.9 * min(finite), 1.15 * max(finite)
    nowhere = 1.25 * high  # where a batch without a certificate is drawn, beyond a dotted line
    for label, colour, marker, chosen in _kinds(batches):
        axes.scatter(
            [min(batch.verdict.ratio, nowhere) for batch in chosen],
            [batch.gain for batch in chosen],
            s=[4 + 0.4 * batch.size for batch in chosen],
            c=colour,
            marker=marker,
            alpha=0.6,
            linewidths=0,
            label=f"{label} ({len(chosen)})",
        )
    axes.set_xscale("log")
    axes.set_xlim(low, 1.25 * nowhere)
    ticks = [tick for tick in TICKS if low <= tick <= high]
    axes.xaxis.set_major_locator(FixedLocator([*ticks, nowhere]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([*(f"{tick:g}" for tick in ticks), "none"])
    axes.set_ylim(-1.05, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    axes.set_xlabel("certificate, log scale (none: no confident sample)", color=ink)
    axes.set_ylabel("transport less frozen head, points", color=ink)
    axes.axhline(0, color=ink, lw=0.8)
    axes.axvline(high, color=ink, lw=0.8, ls=":")
    axes.axvline(results.settings.tau, color=ink, lw=1.2, ls="--")
    axes.text(1.03 * results.settings.tau, 1.0, f"τ = {results.settings.tau:g}", color=ink)
    _point_at(axes, results.costs, nowhere, (0.02, 0.97), ink)
    _point_at(axes, results.saves, nowhere, (0.02, 0.03), ink)
    _dress(axes, ink)
    canvas.legend(ncols=3, **_legend(ink))


def _kinds(batches: list[Batch]) -> Iterator[tuple[str, str, str, list[Batch]]]:
    """Label, colour, marker and batches of the three kinds of verdict."""
    reasons = {"accepted": "accepted", "ratio": "refused by certificate"}
    other = "refused for coverage"
    looks = {
        "accepted": (BLUE, "o"),
        "refused by certificate": (VERMILLION, "^"),
        other: (PURPLE, "s"),
    }
    for label, look in looks.items():
        yield label, *look, [b for b in batches if reasons.get(b.verdict.reason, other) == label]


def _point_at(
    axes: Axes, story: Story, nowhere: float, corner: tuple[float, float], ink: str
) -> None:
    """An arrow from a corner of the axes to the middle of a story's stream."""
    if story.stream is None:
        return
    stream = story.stream
    axes.annotate(
        f"{story.title.lower()}:\n{stream.words}",
        (min(stream.ratio, nowhere), stream.ungated - stream.frozen),
        corner,
        textcoords="axes fraction",
        color=ink,
        va="top" if corner[1] > 0.5 else "bottom",
        arrowprops={"arrowstyle": "->", "color": ink, "shrinkB": 4},
    )


def _legend(ink: str) -> dict[str, Any]:
    return {
        "loc": "outside upper center",
        "frameon": False,
        "labelcolor": ink,
        "fontsize": 9.5,
        "columnspacing": 1.4,
        "handletextpad": 0.5,
    }


def _dress(axes: Axes, ink: str) -> None:
    axes.patch.set_alpha(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(ink)
    axes.tick_params(colors=ink, labelsize=9)
    axes.grid(axis="y", color=ink, alpha=0.15, lw=0.8)
    axes.set_axisbelow(True)
