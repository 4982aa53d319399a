"""The demo's results as one HTML page that loads nothing else."""

from __future__ import annotations

import io
import math
import os
from base64 import b64encode
from collections.abc import Callable
from html import escape
from importlib.resources import files
from statistics import mean
from string import Template

from matplotlib import rc_context
from matplotlib.figure import Figure

from caster import config
from caster._version import __version__
from caster.core.types import REASONS
from caster.demo import figures
from caster.demo.results import Results, Stream
from caster.files import replacing

INK = "#1b1f25"  # a colour nothing else has: replaced by the one that suits the reader's page
STYLE = (
    "<style>:root{color:#1b1f24}@media (prefers-color-scheme:dark){:root{color:#e8eaed}}</style>"
)


def write(results: Results, path: str | os.PathLike[str]) -> None:
    """Write the page, whole or not at all."""
    text = render(results)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def render(results: Results) -> str:
    """The page's HTML."""
    template = Template(files("caster.demo").joinpath("page.html").read_text(encoding="utf-8"))
    clean = results.clean
    return template.substitute(
        summary=escape(summary(results)),
        stories="\n".join(
            f'<div class="story {kind}"><p>{escape(story.sentence)}</p></div>'
            for kind, story in zip(("saves", "costs", "misses"), results.stories, strict=True)
        ),
        accuracy=_svg(figures.accuracy_by_severity, results, height=6.0),
        accuracy_alt=escape(_accuracy_alt(results)),
        certificate=_svg(figures.certificate_against_gain, results, height=5.2),
        certificate_alt=escape(_certificate_alt(results)),
        batch_size=clean.batch_size,
        n_target=sum(batch.size for batch in clean.batches),
        rows="\n".join(_row(stream) for stream in results.streams),
        tau=f"{results.settings.tau:g}",
        reasons="\n".join(
            f"<li><code>{reason}</code>: {escape(words)}</li>" for reason, words in REASONS.items()
        ),
        constants="\n".join(_constants(results)),
        version=escape(__version__),
        seed=results.seed,
    )


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


def _svg(draw: Callable[[Figure, Results, str], None], results: Results, height: float) -> str:
    """A figure as a data address, in SVG that follows the reader's light or dark page."""
    figure = Figure(figsize=(8.6, height), layout="constrained")
    figure.patch.set_alpha(0)
    draw(figure, results, INK)
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": "caster"}):  # the same results give the same bytes
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue().replace(INK, "currentColor").replace("<defs>", f"{STYLE}<defs>", 1)
    return "data:image/svg+xml;base64," + b64encode(svg.encode()).decode()


def _accuracy_alt(results: Results) -> str:
    worst = [stream for stream in results.streams if stream.severity == 5]
    return "Accuracy against severity for each shift. At severity 5: " + "; ".join(
        f"{s.shift}, frozen head {s.frozen:.0%}, ungated {s.ungated:.0%}, gated {s.gated:.0%}"
        for s in worst
    )


def _certificate_alt(results: Results) -> str:
    batches = [batch for stream in results.streams for batch in stream.batches]
    accepted = [batch.gain for batch in batches if batch.verdict.accepted]
    refused = [batch.gain for batch in batches if not batch.verdict.accepted]
    return (
        "Gain of transport over the frozen head against the certificate, a point a batch. "
        f"{len(accepted)} batches are accepted, and {sum(gain < 0 for gain in accepted)} of them "
        f"lose; {len(refused)} are refused, and {sum(gain > 0 for gain in refused)} of them would "
        f"have gained, {sum(gain < 0 for gain in refused)} lost."
    )


def _row(stream: Stream) -> str:
    accuracies = (stream.frozen, stream.source_gda, stream.ungated, stream.gated)
    refused = ", ".join(
        f"{reason}\N{NO-BREAK SPACE}{count}"
        for reason, count in stream.reasons.items()
        if reason != "accepted"
    )
    cells = [
        f"<td>{stream.batch_size}</td>",
        f'<td class="words">{escape(stream.order)}</td>',
        *(f"<td>{100 * accuracy:.1f}</td>" for accuracy in accuracies),
        f"<td>{stream.acceptance:.0%}</td>",
        f"<td>{f'{stream.ratio:.2f}' if math.isfinite(stream.ratio) else 'none'}</td>",
        f'<td class="words">{escape(refused)}</td>',
    ]
    return f'<tr><th scope="row">{escape(stream.name)}</th>{"".join(cells)}</tr>'


def _constants(results: Results) -> list[str]:
    return [
        f'<tr><th scope="row">{escape(name)}</th><td>{getattr(results.settings, name):g}</td>'
        f'<td class="words">{origin}</td><td class="words">{escape(why)}</td></tr>'
        for name, _, origin, why in config.describe()
    ]
