"""The demo's results as one HTML page that loads nothing else."""

from __future__ import annotations

import os
from html import escape
from statistics import mean

from caster._version import __version__
from caster.report import certificates, html
from caster.report.demo import figures
from caster.report.demo.results import Results, Stream
from caster.report.figures import TRANSPORT_TERMS


def write(results: Results, path: str | os.PathLike[str]) -> None:
    """Write the page, whole or not at all."""
    html.write(render(results), path)


def render(results: Results) -> str:
    """The page's HTML."""
    body = html.fill(
        "caster.report.demo",
        "page.html",
        summary=escape(summary(results)),
        stories="\n".join(
            f'<div class="story {kind}"><p>{escape(story.sentence)}</p></div>'
            for kind, story in zip(("saves", "costs", "misses"), results.stories, strict=True)
        ),
        accuracy=html.figure(
            lambda canvas, ink: figures.accuracy_by_severity(canvas, results, ink),
            _accuracy_alt(results),
            height=6.0,
        ),
        certificate=html.figure(
            lambda canvas, ink: figures.certificate_against_gain(canvas, results, ink),
            certificates.in_words(figures.points(results), "frozen", TRANSPORT_TERMS),
            height=5.2,
        ),
        batch_size=results.clean.batch_size,
        n_target=sum(batch.size for batch in results.clean.batches),
        rows="\n".join(_row(stream) for stream in results.streams),
        terms=html.terms(results.settings),
        constants=html.constants(
            results.settings, "All at their defaults, none tuned to these digits."
        ),
        version=escape(__version__),
        seed=results.seed,
    )
    return html.page("caster demo", body)


def summary(results: Results) -> str:
    """Mean accuracies over the streams that a batch-wise method is made for."""
    size = results.clean.batch_size
    plain = [s for s in results.streams if s.order == "shuffled" and s.batch_size == size]
    frozen, ungated, gated = (
        mean(getattr(stream, name) for stream in plain) for name in ("frozen", "ungated", "gated")
    )
    return (
        f"Over the {len(plain)} shuffled streams in batches of {size}, the frozen head gets "
        f"{frozen:.1%} right on average, transport without the gate {ungated:.1%} and with it "
        f"{gated:.1%}."
    )


def _accuracy_alt(results: Results) -> str:
    worst = [stream for stream in results.streams if stream.severity == 5]
    return "Accuracy against severity for each shift. At severity 5: " + "; ".join(
        f"{s.shift}, frozen head {s.frozen:.0%}, ungated {s.ungated:.0%}, gated {s.gated:.0%}"
        for s in worst
    )


def _row(stream: Stream) -> str:
    accuracies = (stream.frozen, stream.source_gda, stream.ungated, stream.gated)
    refused = ", ".join(
        f"{reason}\N{NO-BREAK SPACE}{count}"
        for reason, count in stream.reasons.items()
        if reason != "accepted"
    )
    return html.row(
        stream.name,
        html.number(stream.batch_size),
        html.words(stream.order),
        *(html.number(f"{100 * accuracy:.1f}") for accuracy in accuracies),
        html.number(f"{stream.acceptance:.0%}"),
        html.number(html.certificate(stream.ratio)),
        html.words(refused),
    )
