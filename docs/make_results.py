"""Draw docs/results.png from a committed table."""

from pathlib import Path

from docs.make_pages import KINDS, top1
from matplotlib.figure import Figure

from caster.io.files import replacing
from caster.report.figures import BLUE, GREEN, PURPLE, VERMILLION

ORDERS = {  # of a stream, on the axis: as the pages call them
    "shuffled": "shuffled",
    "long-\ntailed": "long-tailed",
    "Dirichlet\n1": "Dirichlet 1",
    "Dirichlet\n0.1": "Dirichlet 0.1",
    "runs": "runs",
    "sorted": "sorted by class",
}
OURS = "caster, `layers`"
LINES = {  # method: colour, marker
    OURS: (BLUE, "o"),
    "PEA": (GREEN, "v"),
    "BN statistics": ("#e69f00", "D"),
    "Tent": (VERMILLION, "^"),
    "LAME": (PURPLE, "P"),
    "frozen": ("#4a5461", "s"),
}


def draw() -> Figure:
    """Accuracy by order of the stream, on two networks."""
    image = Figure(figsize=(10.4, 3.9), layout="constrained", facecolor="white")
    panels = image.subplots(1, 2, sharey=True)
    for axes, data in zip(panels, ("CIFAR-10", "CIFAR-100"), strict=True):
        for method, (colour, marker) in LINES.items():
            values = [top1(KINDS, f"ResNet-18, {data}", method, kind) for kind in ORDERS.values()]
            ours = method == OURS
            axes.plot(
                values,
                marker=marker,
                color=colour,
                label=method.replace("`", ""),
                lw=2.6 if ours else 1.4,
                zorder=3 if ours else 2,
            )
            if ours:
                for x, value in enumerate(values):
                    above = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center"}
                    axes.annotate(f"{value:.0f}", (x, value), color=colour, fontsize=9, **above)
        axes.set_title(f"ResNet-18 on {data}", loc="left", fontsize=11, fontweight="bold")
        axes.set_xticks(range(len(ORDERS)), list(ORDERS))
        axes.set(ylim=(0, 108), yticks=range(0, 101, 20))
        axes.grid(axis="y", alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("accuracy under corruption, %")
    handles, labels = panels[0].get_legend_handles_labels()
    image.legend(handles, labels, ncols=6, frameon=False, loc="outside upper center")
    return image


def main() -> None:
    """Replace the figure."""
    with replacing(Path(__file__).with_name("results.png")) as temporary:
        draw().savefig(temporary, format="png", dpi=130)


if __name__ == "__main__":
    main()
