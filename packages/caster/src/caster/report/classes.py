"""The classes an adaptation changed most, as a table with bars.

HTML and no image: a label may be text in any script, which a drawing's font may lack.
"""

from __future__ import annotations

from caster.report import html
from caster.report.evaluation_results import ClassScore, Evaluation
from caster.report.figures import BLUE, VERMILLION
from caster.report.words import points

LISTED = 10  # classes helped, and as many harmed


def table(found: Evaluation) -> str:
    """The classes helped and harmed most, by samples gained or lost."""
    helped, harmed = most_changed(found.classes)
    shown = [*helped, *reversed(harmed)]
    if not shown:
        return "<p>No class gained or lost a sample.</p>"
    largest = max(abs(_change(c)) for c in shown)
    return html.fill(
        "caster.report",
        "classes.html",
        caption=(
            f"Accuracy in percent, and its change in points. Of {len(found.classes):,} classes "
            f"{sum(c.gated > c.baseline for c in found.classes):,} gained samples and "
            f"{sum(c.gated < c.baseline for c in found.classes):,} lost some; those that gained "
            f"and lost most are shown, {LISTED} of each at most."
        ),
        baseline=found.mechanism.label(found.baseline),
        gated=found.mechanism.label("gated"),
        rows="\n".join(_row(c, largest) for c in shown),
    )


def most_changed(
    classes: tuple[ClassScore, ...],
) -> tuple[list[ClassScore], list[ClassScore]]:
    """Classes helped and classes harmed, most samples first, `LISTED` of each at most.

    >>> helped, harmed = most_changed((ClassScore("cat", 9, 5, 8), ClassScore("dog", 9, 5, 5)))
    >>> [c.label for c in helped], harmed
    (['cat'], [])
    """
    helped = [c for c in classes if c.gated > c.baseline]
    harmed = [c for c in classes if c.gated < c.baseline]
    return (
        sorted(helped, key=lambda c: c.baseline - c.gated)[:LISTED],
        sorted(harmed, key=lambda c: c.gated - c.baseline)[:LISTED],
    )


def _change(c: ClassScore) -> float:
    return (c.gated - c.baseline) / c.size


def _row(c: ClassScore, largest: float) -> str:
    return html.row(
        str(c.label),
        html.number(f"{c.size:,}"),
        html.number(f"{100 * c.baseline / c.size:.1f}"),
        html.number(f"{100 * c.gated / c.size:.1f}"),
        html.number(points(_change(c))),
        f"<td>{_bar(_change(c) / largest)}</td>",
    )


def _bar(share: float) -> str:
    """A bar to the right of a middle line for a gain, to the left for a loss; -1 to 1."""
    colour = BLUE if share > 0 else VERMILLION
    return (
        '<svg width="200" height="12" viewBox="-100 0 200 12" aria-hidden="true">'
        f'<rect x="{min(0.0, 98 * share):.1f}" width="{98 * abs(share):.1f}" height="12" '
        f'fill="{colour}"/><path d="M0 0V12" stroke="currentColor"/></svg>'
    )
