"""Picture of the corruption study."""

from __future__ import annotations

from typing import TYPE_CHECKING

from caster.report.figures import BLUE, VERMILLION, dress, legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from caster_bench.studies.each.corruption import Convention

LOOKS = {"batch": ("BatchNorm", BLUE, "o"), "layer": ("LayerNorm", VERMILLION, "s")}


def draw(figure: Figure, found: Convention, ink: str) -> None:
    """A panel a data set; a dot a method and family."""
    places = found.places()
    methods = list(dict.fromkeys(method for _, method, _ in found.entries))
    panels = figure.subplots(1, len(places), sharey=True, squeeze=False)[0]
    for axes, place in zip(panels, places, strict=True):
        for shift, (family, (label, colour, marker)) in enumerate(LOOKS.items()):
            held = {m: e for (p, m, f), e in found.entries.items() if (p, f) == (place, family)}
            if not held:
                continue
            axes.errorbar(
                [100 * entry.mean.value for entry in held.values()],
                [methods.index(method) + 0.2 * (shift - 0.5) for method in held],
                xerr=[100 * (entry.sd or 0.0) for entry in held.values()],
                fmt=marker,
                color=colour,
                ms=6,
                elinewidth=1,
                label=label,
            )
        axes.set_title(place, color=ink, fontsize=10)
        axes.set_xlabel("top-1 accuracy, %", color=ink)
        dress(axes, ink, "x")
    panels[0].set_yticks(range(len(methods)), methods)
    panels[0].invert_yaxis()
    shown = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(shown.values(), shown.keys(), **legend(ink), ncols=2)
