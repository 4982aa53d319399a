"""Picture of the specificity study."""

from __future__ import annotations

from typing import TYPE_CHECKING

from caster.report.figures import BLUE, VERMILLION, dress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from caster_bench.studies.each.specificity import Specificity


ABREAST = 3  # panels, beyond which their titles would run into each other


def rows(found: Specificity) -> int:
    """How many rows of panels there are."""
    return -(-len(found.relations) // ABREAST)


def draw(figure: Figure, found: Specificity, ink: str) -> None:
    """A panel a gated policy."""
    across = min(ABREAST, len(found.relations))
    grid = figure.subplots(rows(found), across, sharey=True, squeeze=False)
    panels = grid.ravel()
    for axes in panels[len(found.relations) :]:
        axes.remove()
    for axes, relation in zip(panels, found.relations, strict=False):
        axes.scatter(
            [100 * gain for gain in relation.gain],
            [100 * accept for accept in relation.accept],
            s=22,
            alpha=0.7,
            linewidths=0,
            c=BLUE if relation.own else VERMILLION,
        )
        rho = relation.correlation
        title = relation.gated if rho is None else f"{relation.gated}:\n{rho:+.2f}"
        axes.set_title(title, color=ink, fontsize=10)
        axes.set_xlabel(f"gain of {relation.mechanism},\npoints", color=ink)
        axes.set_ylim(-4, 104)
        dress(axes, ink)
    for axes in grid[:, 0]:
        axes.set_ylabel("batches accepted, %", color=ink)
