"""Draw docs/results.png, the README's figure, from the committed tables of the field's protocol."""

import csv
from pathlib import Path

from matplotlib.figure import Figure

from caster.io.files import replacing
from caster.report.figures import BLUE

TABLES = Path(__file__).parents[1] / "reproduction" / "report" / "field" / "tables"
GROUPS = {  # title: table, column
    "ResNet-18, plain training\nCIFAR-10": ("CIFAR-10", "BN, plain"),
    "ResNet-18\nCIFAR-10": ("CIFAR-10", "BN"),
    "ResNet-18\nCIFAR-100": ("CIFAR-100", "BN"),
    "ViT-B\nCIFAR-10": ("CIFAR-10", "LN"),
}
METHODS = {  # label: colour and rows, one of which a group has
    "frozen": ("#b8bec6", ("frozen",)),
    "BN statistics": ("#97a1ad", ("bn-adapt",)),
    "SAR": ("#7a8592", ("sar",)),
    "EATA": ("#616c79", ("eata", "eata (preset cifar100)", "eata (preset layer-norm)")),
    "Tent": ("#4a5461", ("tent", "tent (preset layer-norm)")),
    "ROID": ("#2f3742", ("roid", "roid (preset imagenet)")),
    "PEA": ("#1c2430", ("pea",)),
    "caster, features": ("#c8dcf5", ("caster",)),
    "caster, layers": (BLUE, ("mixture-transport",)),
    "caster, layers, no gate": ("#8fb7e8", ("mixture-transport-ungated",)),
}
RIVALS = ("BN statistics", "SAR", "EATA", "Tent", "ROID", "PEA")


def main() -> None:
    """Accuracy of every method by network and data, with 95 % intervals over corruptions."""
    rows = {}
    for data in ("CIFAR-10", "CIFAR-100"):
        with (TABLES / f"corruption-fifteen-{data}-C-star.csv").open(encoding="utf-8") as file:
            rows[data] = {row["method"]: row for row in csv.DictReader(file)}
    image = Figure(figsize=(10.4, 4.4), layout="constrained", facecolor="white")
    axes = image.subplots()
    width = 0.84 / len(METHODS)
    others = [name for label, (_, names) in METHODS.items() if label in RIVALS for name in names]
    rivals = [
        [name for name in others if rows[data].get(name, {}).get(family)]
        for data, family in GROUPS.values()
    ]
    for i, (label, (colour, names)) in enumerate(METHODS.items()):
        named = False
        for j, (data, family) in enumerate(GROUPS.values()):
            found = [rows[data][name] for name in names if rows[data].get(name, {}).get(family)]
            for row in found:
                mean, low, high = (
                    float(row[f"{family}{end}"]) for end in ("", " 95 % low", " 95 % high")
                )
                x = j + (i - (len(METHODS) - 1) / 2) * width
                ends, name = [[mean - low], [high - mean]], None if named else label
                named = True
                axes.errorbar(x, mean, ends, color=colour, marker="o", linewidth=1.6, label=name)
                best = mean == max(float(rows[data][own][family]) for own in rivals[j])
                if label in ("frozen", "caster, layers") or best:
                    axes.annotate(f"{mean:.1f}", (x, high), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(GROUPS)), list(GROUPS))
    axes.set_ylim(25, 108)
    axes.set_yticks(range(30, 101, 10))
    axes.set_ylabel("accuracy under 15 corruptions, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=5, loc="upper center", columnspacing=1.2)
    with replacing(Path(__file__).with_name("results.png")) as temporary:
        image.savefig(temporary, format="png", dpi=130)


if __name__ == "__main__":
    main()
