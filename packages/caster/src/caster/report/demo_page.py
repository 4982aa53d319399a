"""Render the demo's results as one self-contained HTML page with three figures."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import MaxNLocator, PercentFormatter

from caster._version import __version__
from caster.report import figures, html
from caster.report.digits_demo import ANSWERS, WHITE, batch_images, explained, split_digits
from caster.report.figures import LINE_STYLES, VERDICTS, dress, kind_of, legend
from caster.report.mechanism import LAYER_REASONS, LAYER_TERMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from caster.report.digits_demo import Highlight, Results, Stream
    from caster.report.evaluation_results import Batch
    from caster.report.figures import Canvas

TERMS = replace(LAYER_TERMS, noun="adaptation")
STYLES = {name: replace(LINE_STYLES[name], label=words) for name, words in ANSWERS.items()}


def render(results: Results) -> str:
    """Render the page."""
    return html.fill(
        html.HERE,
        "demo.html",
        results=results,
        highlights=[_card(highlight, results) for highlight in results.highlights],
        streams=html.figure(
            lambda canvas, ink: three_streams(canvas, results, ink),
            "Accuracy per batch. " + " ".join(each.sentence for each in results.highlights),
            height=4.2,
        ),
        accuracy=html.figure(
            lambda canvas, ink: accuracy_by_severity(canvas, results, ink),
            _describe_accuracy(results),
            height=6.0,
        ),
        certificate=html.figure(
            lambda canvas, ink: certificate_against_gain(canvas, results, ink),
            figures.describe_certificate(_batches(results), "frozen", TERMS),
            height=5.2,
        ),
        n_target=sum(batch.size for batch in results.clean.batches),
        rows=[_row(stream) for stream in results.streams],
        tau=results.settings.tau,
        noun=LAYER_TERMS.noun,
        reasons=LAYER_REASONS,
        constants=html.layer_constants(
            vars(results.settings), "All at their defaults, none tuned to these digits."
        ),
        version=__version__,
    )


def _batches(results: Results) -> list[Batch]:
    return [batch for stream in results.streams for batch in stream.batches]


def _card(highlight: Highlight, results: Results) -> dict[str, object]:
    """Describe a stream: its accuracies, and the verdict on its median batch in words."""
    stream = highlight.stream
    typical = sorted(stream.batches, key=lambda batch: batch.verdict.ratio)[
        len(stream.batches) // 2
    ]
    return {
        "title": highlight.title,
        "sentence": highlight.sentence,
        "numbers": [f"{100 * stream.accuracy(name):.1f}" for name in ANSWERS],
        "acceptance": f"{stream.acceptance:.0%}",
        "verdict": typical.verdict,
        "explained": explained(typical, results.settings),
    }


def _row(stream: Stream) -> tuple[str, ...]:
    return (
        stream.name,
        str(stream.batch_size),
        stream.order,
        *(f"{100 * stream.accuracy(name):.1f}" for name in ANSWERS),
        f"{stream.acceptance:.0%}",
        html.certificate(stream.ratio),
        ", ".join(
            f"{reason}\N{NO-BREAK SPACE}{count}"
            for reason, count in stream.reasons.items()
            if reason != "accepted"
        ),
    )


def three_streams(canvas: Canvas, results: Results, ink: str) -> None:
    """Plot accuracy along the three streams, with their first digits and verdicts."""
    digits, panels = canvas.subplots(2, 3, sharey="row", height_ratios=(1, 5))
    for axes, highlight in zip(digits, results.highlights, strict=True):
        first = next(batch_images(highlight.stream, split_digits()))[:8]
        axes.imshow(
            np.concatenate(np.pad(first, ((0, 0), (0, 0), (0, 1))), axis=1),
            cmap="gray",
            vmax=WHITE,
            interpolation="nearest",
        )
        axes.set_axis_off()
        axes.set_title(highlight.title, loc="left", color=ink, fontsize=10, fontweight="bold")
    for axes, highlight in zip(panels, results.highlights, strict=True):
        batches = highlight.stream.batches
        numbers = range(1, len(batches) + 1)
        for name, style in STYLES.items():
            accuracies = [batch.accuracy(name) for batch in batches]
            axes.plot(numbers, accuracies, **style.line(ink))
        for i, batch in zip(numbers, batches, strict=True):
            colour, marker = VERDICTS[kind_of(batch.verdict.reason)]
            axes.plot(i, -0.06, marker, color=colour, ms=4.5)
        axes.set_xlabel("batch (mark: verdict)", color=ink)
        axes.set_ylim(-0.12, 1.02)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        dress(axes, ink)
    panels[0].set_ylabel("accuracy", color=ink)
    handles, labels = panels[0].get_legend_handles_labels()
    canvas.legend(handles, labels, ncols=3, **legend(ink))


def _describe_accuracy(results: Results) -> str:
    return "Accuracy against severity for each shift. At severity 5: " + "; ".join(
        f"{s.shift}, frozen {s.accuracy('frozen'):.0%}, ungated {s.accuracy('ungated'):.0%}, "
        f"returned {s.accuracy('gated'):.0%}"
        for s in results.streams
        if s.severity == 5
    )


def accuracy_by_severity(canvas: Canvas, results: Results, ink: str) -> None:
    """Plot accuracy against severity, one panel per shift."""
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
    canvas.legend(handles, labels, ncols=3, **legend(ink))
    canvas.supxlabel("severity (0: clean), and share of batches accepted", color=ink, fontsize=10)


def _severity_panel(axes: Axes, streams: list[Stream], ink: str) -> None:
    severities = [stream.severity for stream in streams]
    for name, style in STYLES.items():
        axes.plot(severities, [stream.accuracy(name) for stream in streams], **style.line(ink))
    axes.set_xticks(severities, [f"{s.severity}\n{s.acceptance:.0%}" for s in streams])
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    dress(axes, ink)
    axes.tick_params(axis="x", labelsize=8)


def certificate_against_gain(canvas: Canvas, results: Results, ink: str) -> None:
    """Plot the gain of adaptation over the frozen head against the certificate."""
    axes = canvas.subplots()
    tau = results.settings.tau
    figures.certificate_against_gain(axes, _batches(results), tau, "frozen", TERMS, ink)
    for height, words in ((0.97, "rejected: gains lost"), (0.03, "rejected: losses prevented")):
        axes.annotate(
            words,
            (tau, height),
            xytext=(10, 0),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            color=ink,
            va="center",
        )
    canvas.legend(ncols=3, **legend(ink))
