"""Draw docs/results.png and write the README's table of results, both from committed tables."""

import csv
import re
from pathlib import Path

from matplotlib.figure import Figure

from caster.io.files import replacing
from caster.report.figures import BLUE, GREEN, PURPLE, VERMILLION

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "reproduction" / "report"
NETWORKS = {  # columns of the table: data and family of the records
    "ResNet-18, CIFAR-10, plain": ("CIFAR-10", "BN, plain"),
    "ResNet-18, CIFAR-10": ("CIFAR-10", "BN"),
    "ResNet-18, CIFAR-100": ("CIFAR-100", "BN"),
    "ViT-B, CIFAR-10": ("CIFAR-10", "LN"),
}
METHODS = {  # rows of the table: methods of the records, one of which a network has
    "frozen": re.compile(r"frozen"),
    "BN statistics": re.compile(r"bn-adapt"),
    "LAME": re.compile(r"lame"),
    "T3A": re.compile(r"t3a( \(preset [\w-]+\))?"),
    "SAR": re.compile(r"sar"),
    "EATA": re.compile(r"eata( \(preset [\w-]+\))?"),
    "Tent": re.compile(r"tent( \(preset [\w-]+\))?"),
    "PEA": re.compile(r"pea"),
    "CoTTA": re.compile(r"cotta( \(preset [\w-]+\))?"),
    "ROID": re.compile(r"roid( \(preset [\w-]+\))?"),
    "DeYO, tuned": re.compile(r"deyo \(lr .*\)"),
    "ROID, tuned": re.compile(r"roid \(lr .*\)"),
    "caster, `features`": re.compile(r"caster"),
    "caster, `layers`": re.compile(r"mixture-transport"),
    "caster, `layers`, ungated": re.compile(r"mixture-transport-ungated"),
}
ORDERS = {  # of a stream, on the figure's axis: as the records have it
    "shuffled": "shuffled",
    "long-\ntailed": "long-tailed, imbalance 20",
    "Dirichlet\n1": "dirichlet, concentration 1.0",
    "Dirichlet\n0.1": "dirichlet, concentration 0.1",
    "runs": "runs",
    "sorted": "by-class",
}
LINES = {  # of the figure: method, colour, marker
    "caster, layers": ("mixture-transport", BLUE, "o"),
    "PEA": ("pea", GREEN, "v"),
    "BN statistics": ("bn-adapt", "#e69f00", "D"),
    "Tent": ("tent", VERMILLION, "^"),
    "LAME": ("lame", PURPLE, "P"),
    "frozen": ("frozen", "#4a5461", "s"),
}


def table() -> str:
    """Tabulate accuracy under the fifteen corruptions, the best of each network in bold."""
    columns = []
    for data, family in NETWORKS.values():
        rows = _rows(f"field/tables/corruption-fifteen-{data}-C-star.csv")
        found = [
            next((float(r[family]) for r in rows if own.fullmatch(r["method"]) and r[family]), None)
            for own in METHODS.values()
        ]
        best = max(value for value in found if value is not None)
        columns.append([_cell(value, value == best) for value in found])
    lines = [("accuracy, %", *NETWORKS), ("---", *["--:"] * len(NETWORKS))]
    lines += zip(METHODS, *columns, strict=True)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: float | None, best: bool) -> str:
    if value is None:
        return "-"
    return f"**{value:.1f}**" if best else f"{value:.1f}"


def _rows(name: str) -> list[dict[str, str]]:
    with (REPORT / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def draw() -> Figure:
    """Accuracy by order of the stream, on two networks."""
    rows = [r for r in _rows("mixture/tables/layers-methods.csv") if r["B"] == "64"]
    image = Figure(figsize=(10.4, 3.9), layout="constrained", facecolor="white")
    panels = image.subplots(1, 2, sharey=True)
    for axes, data in zip(panels, ("CIFAR-10", "CIFAR-100"), strict=True):
        top1 = {
            (row["method"].partition(" (")[0], row["stream"]): float(row["top-1"])
            for row in rows
            if row["backbone"] == f"ResNet-18, {data} on {data}"
        }
        for label, (method, colour, marker) in LINES.items():
            values = [top1[method, order] for order in ORDERS.values()]
            ours = method == "mixture-transport"
            axes.plot(
                values,
                marker=marker,
                color=colour,
                label=label,
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
    """Replace the figure, and the table in the README."""
    with replacing(Path(__file__).with_name("results.png")) as temporary:
        draw().savefig(temporary, format="png", dpi=130)
    readme = ROOT / "README.md"
    before, _, after = re.split(
        r"(?m)^(\| accuracy, % \|.*\n(?:\|.*\n)+)", readme.read_text("utf-8")
    )
    with replacing(readme) as temporary:
        temporary.write_text(before + table() + after, "utf-8")


if __name__ == "__main__":
    main()
