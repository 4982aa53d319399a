"""The demo's two figures, drawn on any matplotlib figure or part of one, without pyplot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.ticker import PercentFormatter

from caster.report import certificates
from caster.report.certificates import Point, Span
from caster.report.demo.results import Results, Story, Stream
from caster.report.figures import LOOKS, TRANSPORT_TERMS, dress, legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from caster.report.figures import Canvas


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
    canvas.legend(handles, labels, ncols=4, **legend(ink))
    canvas.supxlabel("severity (0: clean), and share of batches accepted", color=ink, fontsize=10)


def _severity_panel(axes: Axes, streams: list[Stream], ink: str) -> None:
    severities = [stream.severity for stream in streams]
    for name, look in LOOKS.items():
        axes.plot(severities, [getattr(stream, name) for stream in streams], **look.line(ink))
    axes.set_xticks(severities, [f"{s.severity}\n{s.acceptance:.0%}" for s in streams])
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    dress(axes, ink)
    axes.tick_params(axis="x", labelsize=8)


def certificate_against_gain(canvas: Canvas, results: Results, ink: str) -> None:
    """What transport gained over the frozen head against the certificate, a point a batch."""
    axes = canvas.subplots()
    span = certificates.certificate_against_gain(
        axes, points(results), results.settings.tau, "frozen", TRANSPORT_TERMS, ink
    )
    _point_at(axes, results.costs, span, (0.02, 0.97), ink)
    _point_at(axes, results.saves, span, (0.02, 0.03), ink)
    canvas.legend(ncols=3, **legend(ink))


def points(results: Results) -> list[Point]:
    """Every batch of every stream."""
    return [
        Point(batch.verdict.ratio, batch.gain, batch.size, batch.verdict.reason)
        for stream in results.streams
        for batch in stream.batches
    ]


def _point_at(axes: Axes, story: Story, span: Span, corner: tuple[float, float], ink: str) -> None:
    """An arrow from a corner of the axes to the middle of a story's stream."""
    if story.stream is None:
        return
    stream = story.stream
    axes.annotate(
        f"{story.title.lower()}:\n{stream.words}",
        (span.place(stream.ratio), stream.ungated - stream.frozen),
        corner,
        textcoords="axes fraction",
        color=ink,
        va="top" if corner[1] > 0.5 else "bottom",
        arrowprops={"arrowstyle": "->", "color": ink, "shrinkB": 4},
    )
