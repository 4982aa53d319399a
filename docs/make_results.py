"""Draw docs/results.png, the README's figure, from the committed tables of the reproduction."""

import csv
from pathlib import Path

from matplotlib.figure import Figure

from caster.io.files import replacing
from caster.report.figures import BLUE

INK = "#1b1f24"
TABLES = Path(__file__).parents[1] / "reproduction" / "report" / "reproduction" / "tables"
GROUPS = {  # title: table, column
    "ResNets\nCIFAR-10": ("CIFAR-10", "BN"),
    "ResNets\nCIFAR-100": ("CIFAR-100", "BN"),
    "Transformers, ConvNeXt\nCIFAR-10": ("CIFAR-10", "LN"),
    "Transformers, ConvNeXt\nCIFAR-100": ("CIFAR-100", "LN"),
}
METHODS = {  # row: label and colour
    "frozen": ("frozen", "#b8bec6"),
    "bn-adapt": ("BN statistics", "#97a1ad"),
    "sar": ("SAR", "#7a8592"),
    "eata": ("EATA", "#616c79"),
    "tent": ("Tent", "#4a5461"),
    "caster": ("caster, features", "#8fb7e8"),
    "layer-transport": ("caster, layers", BLUE),
}


def main() -> None:
    """Accuracy of every method by network family and data, with 95 % intervals over cells."""
    rows = {}
    for data, _ in GROUPS.values():
        with (TABLES / f"corruption-all-{data}-C-star.csv").open(encoding="utf-8") as file:
            rows[data] = {row["method"]: row for row in csv.DictReader(file)}
    image = Figure(figsize=(10.4, 4.2), layout="constrained", facecolor="white")
    axes = image.subplots()
    width = 0.8 / len(METHODS)
    for i, (method, (label, colour)) in enumerate(METHODS.items()):
        for j, (data, family) in enumerate(GROUPS.values()):
            row = rows[data][method]
            mean, low, high = (
                float(row[f"{family}{end}"]) for end in ("", " 95 % low", " 95 % high")
            )
            x = j + (i - (len(METHODS) - 1) / 2) * width
            ends, name = [[mean - low], [high - mean]], label if j == 0 else None
            axes.errorbar(x, mean, ends, color=colour, marker="o", linewidth=1.6, label=name)
            if method in ("frozen", "layer-transport"):
                axes.annotate(f"{mean:.1f}", (x, high), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(GROUPS)), list(GROUPS))
    axes.set_ylim(45, 95)
    axes.set_ylabel("accuracy under 19 corruptions, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=7, loc="upper center", columnspacing=1.2)
    with replacing(Path(__file__).with_name("results.png")) as temporary:
        image.savefig(temporary, format="png", dpi=130)


if __name__ == "__main__":
    main()
