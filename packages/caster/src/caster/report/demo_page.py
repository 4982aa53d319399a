"""The demo's results as one self-contained HTML page, with its two figures; no pyplot."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from matplotlib.ticker import PercentFormatter

from caster._version import __version__
from caster.core.verdict import REASONS
from caster.report import CLASSIFIERS, figures, html
from caster.report.figures import LINE_STYLES, TRANSPORT_TERMS, CertificateAxis, dress, legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from caster.report.digits_demo import Results, Story, Stream
    from caster.report.evaluation_results import Batch
    from caster.report.figures import Canvas


def write(results: Results, path: str | os.PathLike[str]) -> None:
    """Write the page atomically."""
    html.write(render(results), path)


def render(results: Results) -> str:
    """Render the page."""
    return html.fill(
        html.HERE,
        "demo.html",
        results=results,
        summary=results.summary,
        stories=list(zip(("saves", "costs", "misses"), results.stories, strict=True)),
        accuracy=html.figure(
            lambda canvas, ink: accuracy_by_severity(canvas, results, ink),
            _accuracy_in_words(results),
            height=6.0,
        ),
        certificate=html.figure(
            lambda canvas, ink: certificate_against_gain(canvas, results, ink),
            figures.certificate_in_words(_batches(results), "frozen", TRANSPORT_TERMS),
            height=5.2,
        ),
        n_target=sum(batch.size for batch in results.clean.batches),
        rows=[_row(stream) for stream in results.streams],
        tau=results.settings.tau,
        reasons=REASONS,
        constants=html.constants(
            results.settings, "All at their defaults, none tuned to these digits."
        ),
        version=__version__,
    )


def _batches(results: Results) -> list[Batch]:
    return [batch for stream in results.streams for batch in stream.batches]


def _row(stream: Stream) -> tuple[str, ...]:
    return (
        stream.name,
        str(stream.batch_size),
        stream.order,
        *(f"{100 * stream.accuracy(classifier):.1f}" for classifier in CLASSIFIERS),
        f"{stream.acceptance:.0%}",
        html.certificate(stream.ratio),
        ", ".join(
            f"{reason}\N{NO-BREAK SPACE}{count}"
            for reason, count in stream.reasons.items()
            if reason != "accepted"
        ),
    )


def _accuracy_in_words(results: Results) -> str:
    return "Accuracy against severity for each shift. At severity 5: " + "; ".join(
        f"{s.shift}, frozen head {s.accuracy('frozen'):.0%}, ungated {s.accuracy('ungated'):.0%}, "
        f"gated {s.accuracy('gated'):.0%}"
        for s in results.streams
        if s.severity == 5
    )


def accuracy_by_severity(canvas: Canvas, results: Results, ink: str) -> None:
    """Plot accuracy of the four classifiers against severity, one panel per shift."""
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
    for name, style in LINE_STYLES.items():
        axes.plot(severities, [stream.accuracy(name) for stream in streams], **style.line(ink))
    axes.set_xticks(severities, [f"{s.severity}\n{s.acceptance:.0%}" for s in streams])
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    dress(axes, ink)
    axes.tick_params(axis="x", labelsize=8)


def certificate_against_gain(canvas: Canvas, results: Results, ink: str) -> None:
    """Plot the gain of transport over the frozen head against the certificate."""
    axes = canvas.subplots()
    axis = figures.certificate_against_gain(
        axes, _batches(results), results.settings.tau, "frozen", TRANSPORT_TERMS, ink
    )
    _annotate(axes, results.costs, axis, (0.02, 0.97), ink)
    _annotate(axes, results.saves, axis, (0.02, 0.03), ink)
    canvas.legend(ncols=3, **legend(ink))


def _annotate(
    axes: Axes, story: Story, axis: CertificateAxis, corner: tuple[float, float], ink: str
) -> None:
    """Draw an arrow from a corner of the axes to the centre of a story's stream."""
    if story.stream is None:
        return
    stream = story.stream
    axes.annotate(
        f"{story.title.lower()}:\n{stream.words}",
        (axis.position(stream.ratio), stream.accuracy("ungated") - stream.accuracy("frozen")),
        corner,
        textcoords="axes fraction",
        color=ink,
        va="top" if corner[1] > 0.5 else "bottom",
        arrowprops={"arrowstyle": "->", "color": ink, "shrinkB": 4},
    )
