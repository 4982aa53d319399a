"""An evaluation as one HTML page that loads nothing else."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from html import escape

from matplotlib.figure import Figure

from caster._version import __version__
from caster.report import certificates, classes, html, noun
from caster.report import evaluation_figures as figures
from caster.report.evaluation_figures import MOST
from caster.report.evaluation_results import Evaluation, Score
from caster.report.mechanism import LAYER_CONSTANTS
from caster.report.metrics import BINS

ROUGH = 20  # batches below which an interval from resampling them is rough


def write(found: Evaluation, path: str | os.PathLike[str]) -> None:
    """Write the page, whole or not at all."""
    html.write(render(found), path)


def render(found: Evaluation) -> str:
    """The page's HTML."""
    n = len(found.batches)
    body = html.fill(
        "caster.report",
        "evaluation.html",
        name=escape(found.name),
        conclusion=escape(found.conclusion),
        source_check=f"<p>{escape(found.source_check)}</p>" if found.source_check else "",
        summary=escape(found.summary),
        warning=f'<div class="story costs"><p>{escape(found.warning)}</p></div>'
        if found.warning
        else "",
        size=f"{found.size:,}",
        rough=_roughness(n),
        baseline=noun(found.baseline),
        scores="\n".join(
            _score(found.mechanism.label(name), score) for name, score in found.scores.items()
        ),
        batches=f"{n:,} batches" if n > 1 else "One batch",
        batch_size=f"{found.batch_size:,}",
        ratio=html.certificate(found.ratio),
        verdicts="\n".join(
            html.row(
                reason,
                html.number(f"{count:,}"),
                html.number(f"{count / n:.0%}"),
                html.words(found.mechanism.reasons[reason]),
            )
            for reason, count in found.reasons.items()
        ),
        smoothed=f", neighbours joined in {MOST} stretches" if n > MOST else "",
        bins=BINS,
        classes=classes.table(found),
        head=_head(found),
        terms=_terms(found),
        constants=_constants(found),
        version=escape(__version__),
        digests="".join(
            f"<br>SHA-256 of the {escape(what)}: <code>{escape(digest)}</code>"
            for what, digest in found.digests.items()
        ),
        **_images(found),
    )
    return html.page(f"caster: evaluation of {found.name}", body)


def _images(found: Evaluation) -> dict[str, str]:
    """The page's images by their placeholders."""

    def image(draw: Callable[[Figure, Evaluation, str], None], alt: str, height: float) -> str:
        return html.figure(lambda canvas, ink: draw(canvas, found, ink), alt, height)

    label = found.mechanism.label
    names = [label(found.baseline), label("gated")]
    errors = [found.scores[name].calibration_error for name in (found.baseline, "gated")]
    return {
        "accuracies": image(
            figures.accuracies,
            "Accuracy: "
            + ", ".join(f"{label(c)} {s.accuracy:.1%}" for c, s in found.scores.items()),
            height=0.7 + 0.5 * len(found.scores),
        ),
        "certificate": image(
            figures.certificate_against_gain,
            certificates.in_words(figures.points(found), found.baseline, found.mechanism.terms),
            height=5.0,
        ),
        "stream": image(
            figures.along_the_stream,
            "Accuracy batch by batch, and the verdicts: "
            + ", ".join(f"{reason} {count}" for reason, count in found.reasons.items()),
            height=4.4,
        ),
        "reliability": image(
            figures.reliability,
            "Accuracy against confidence. Expected calibration error: "
            + ", ".join(f"{n} {100 * e:.1f} points" for n, e in zip(names, errors, strict=True)),
            height=4.5,
        ),
    }


def _score(label: str, score: Score) -> str:
    interval = "none"
    if score.interval:
        interval = f"{100 * score.interval.low:.1f} to {100 * score.interval.high:.1f}"
    return html.row(
        label,
        html.number(f"{100 * score.accuracy:.1f}"),
        html.number(interval),
        html.number(f"{score.harm:.1%}"),
        html.number(f"{score.help:.1%}"),
        html.number(f"{score.nll:.3f}" if math.isfinite(score.nll) else "infinite"),
        html.number(f"{100 * score.calibration_error:.1f}"),
    )


def _terms(found: Evaluation) -> str:
    """What the words of the page mean."""
    if found.mechanism.settings is None:
        return html.terms(found.settings)
    meanings = found.mechanism.reasons.items()
    reasons = (f"<li><code>{reason}</code>: {escape(why)}</li>" for reason, why in meanings)
    return html.fill(
        "caster.report", "layers.html", tau=f"{found.tau:g}", reasons="\n".join(reasons)
    )


def _constants(found: Evaluation) -> str:
    """Every constant of what adapts."""
    caption, own = "As evaluated with.", found.mechanism.settings
    if own is None:
        return html.constants(found.settings, caption)
    rows = (
        html.row(name, html.number(_value(own[name])), html.words("project"), html.words(why))
        for name, why in LAYER_CONSTANTS.items()
    )
    return html.fill("caster.report", "constants.html", caption=caption, rows="\n".join(rows))


def _value(setting: float | str) -> str:
    return setting if isinstance(setting, str) else f"{setting:g}"


def _roughness(n: int) -> str:
    if n == 1:
        return " (none: there is only one)"
    return f" (rough: there are only {n})" if n < ROUGH else ""


def _head(found: Evaluation) -> str:
    words = "The frozen model's own answer. It is also what a refused batch gets."
    if found.baseline != "frozen":
        words = (
            "Not evaluated: no logits were given. Source-GDA takes its place: harm and help are "
            "measured against it, and it is what a refused batch gets."
        )
    return f"<dt>Frozen head</dt><dd>{words}</dd>"
