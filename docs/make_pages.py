"""Write the figures of the committed reports and records into the pages that mark them.

A page marks a figure (`66<!--=NAME--> %`, rounded to the digits that stand there), a table in its
header (`| network<!--=NAME--> | ...`), whose first column names the rows, all that the report has,
and a statement that the figures must bear out (`none loses<!--=NAME-->`).
"""

from __future__ import annotations

import csv
import math
import re
import sys
from collections.abc import Callable, Mapping, Set
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from caster.io.files import replacing
from caster_bench import sweeps
from caster_bench.records.store import Pack, Record, described, read, scan

ROOT = Path(__file__).parents[1]
REPRODUCTION = ROOT / "reproduction"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
KINDS, KEPT = "mixture/layers-methods", "mixture/mixture-kept"  # tables of reports
FIELD, FIELD_KEPT = "field/layers-methods", "field/mixture-kept"
PAPER, SEVERE = "reproduction/corruption-all-backbones", "reproduction/corruption-fifteen-backbones"
LAYERS_KEPT = "mixture/layers-kept"
TEN, HUNDRED = "ResNet-18, CIFAR-10", "ResNet-18, CIFAR-100"
PLAIN = "ResNet-18, plainly trained, CIFAR-10"
VIT, SWIN = "ViT-B, CIFAR-10", "Swin-T, CIFAR-100"
FIFTY, LITE = "ResNet-50, ImageNet", "EfficientNet-Lite0, ImageNet"
SMALL, MINI, MINI_VIT = "small/layers-methods", "mini-ResNet, CIFAR-10", "mini-ViT, CIFAR-10"
OURS, UNGATED = "mixture transport", "mixture transport, ungated"
LAYERS, LAYERS_UNGATED = "layer transport", "layer transport, ungated"
CONTINUAL, SORTED, MIXED = "shuffled, continual", "sorted by class", "shuffled, mixed"
LOOSE, TAILS = "Dirichlet 1", "long-tailed"
BURSTS, BURSTS_CONTINUAL = "Dirichlet 0.1", "Dirichlet 0.1, continual"
IN_REPORTS = {  # methods and kinds of streams, where a page does not call them the same
    "BN statistics": "bn-adapt",
    "caster, `features`": "caster",
    "caster, `layers`": "mixture-transport",
    "sorted by class": "by-class",
    "clean, sorted by class": "clean, by-class",
    "turning: shuffled, then sorted": "turning",
    "Dirichlet 0.1": "dirichlet, concentration 0.1",
    "Dirichlet 1": "dirichlet, concentration 1.0",
    "smoothed frozen: the vote alone": "smoothed-frozen",
    "k-NN": "knn",
    "clean, Dirichlet 0.1": "clean, dirichlet, concentration 0.1",
    "Dirichlet 0.1, continual": "dirichlet, concentration 0.1, continual",
    "Dirichlet 0.1, recurring": "dirichlet, concentration 0.1, recurring",
    "Dirichlet 0.1, mixed": "dirichlet, concentration 0.1, mixed",
    "mixed within batches, shuffled": "shuffled, mixed",
    "mixed within batches, Dirichlet 0.1": "dirichlet, concentration 0.1, mixed",
    "long-tailed": "long-tailed, imbalance 20",
    "long-tailed, 20": "long-tailed, imbalance 20",
}
Row = dict[str, Any]  # of a report's table


class Table(NamedTuple):
    """A table of a page."""

    cells: Callable[[str], list[str]]  # of a row, by its title
    titles: Set[str] = frozenset()  # of rows that it may not leave out, as reports have them


Values = Mapping[str, float | Table | bool]


# --- what pages mark --------------------------------------------------------------------------


def figures() -> dict[str, float]:
    """All figures in sentences."""
    small = [look(KEPT, network) for network in (TEN, HUNDRED, VIT, SWIN)]
    large = [look(KEPT, network) for network in (FIFTY, LITE)]
    learners = [f"ResNet-{depth}, CIFAR-{classes}" for depth in (18, 50) for classes in (10, 100)]
    leads = [lead(PAPER, own, LAYERS, best_learner(own)) for own in learners]
    gated = [lead(PAPER, own, LAYERS, "frozen") for own in learners]
    shares = [
        100 * gain / lead(PAPER, own, LAYERS_UNGATED, "frozen")
        for own, gain in zip(learners, gated, strict=True)
    ]
    tuned = [rows("tuning/tuning", own, "EATA") for own in (TEN, PLAIN, HUNDRED)]
    adam = [trials[1]["accuracy"] - trials[0]["accuracy"] for trials in tuned]
    losses, largest, _ = without_resets()
    classes = small_record("mini-resnet", "frozen", "fog").batches.classes
    answers = small_record("mini-vit", "mixture-transport", "contrast").samples.prediction
    vit = vit_top1()
    found = {
        "rejected-field": 100 - look(FIELD, TEN, OURS)["accepted, %"],
        "rejected-mixed": 100 - look(KINDS, TEN, OURS, MIXED)["accepted, %"],
        "rejected-loose": 100 - look(KINDS, HUNDRED, OURS, LOOSE)["accepted, %"],
        "missed-mixed": lead(KINDS, TEN, UNGATED, OURS, MIXED),
        "missed-loose": lead(KINDS, HUNDRED, UNGATED, OURS, LOOSE),
        "kept-shuffled": kept(TEN, "shuffled"),
        "kept-mixed": kept(TEN, MIXED),
        "kept-loose": kept(HUNDRED, LOOSE),
        "clean-frozen": top1(KINDS, HUNDRED, "frozen", f"clean, {SORTED}"),
        "clean-sorted": top1(KINDS, HUNDRED, OURS, f"clean, {SORTED}"),
        "tails-behind": lead(KINDS, TEN, LAYERS, OURS, TAILS),
        "tails-behind-ungated": lead(KINDS, TEN, LAYERS, UNGATED, TAILS),
        "tails-ahead": lead(KINDS, HUNDRED, OURS, LAYERS, TAILS),
        "streams-cifar": sum(own["streams"] for own in small),
        "loss-cifar": max(own["worst loss, gated"] for own in small),
        "loss-cifar-ungated": max(own["worst loss, ungated"] for own in small),
        "loss-imagenet-ungated": max(own["worst loss, ungated"] for own in large),
        "pea-ahead": lead(KINDS, FIFTY, "PEA", OURS),
        "vit-t3a-behind": lead(FIELD, VIT, OURS, "T3A"),
        "swin-pea-ahead": lead(KINDS, SWIN, "PEA", OURS),
        "streams-field": look(FIELD_KEPT, "all")["streams"],
        "kept-plain": look(FIELD_KEPT, PLAIN)["kept, %"],
        "kept-vit": look(FIELD_KEPT, VIT)["kept, %"],
        "continual-loss": max(np.mean(own) for own in losses.values()),
        "continual-worst": max(map(max, losses.values())),
        "bn-100": top1(FIELD, HUNDRED, "BN statistics"),
        "deyo-tuned-plain": top1(FIELD, PLAIN, "DeYO, tuned"),
        "layers-lead-least": min(leads),
        "layers-lead-most": max(leads),
        "layers-kept-least": min(shares),
        "layers-kept-most": max(shares),
        "layers-severe": top1(SEVERE, "ResNet-50, CIFAR-100", LAYERS),
        "bn-severe": top1(SEVERE, "ResNet-50, CIFAR-100", "BN statistics"),
        "tent-severe": top1(SEVERE, "ResNet-50, CIFAR-100", "Tent"),
        "layers-50-ungated": top1(KINDS, FIFTY, LAYERS_UNGATED),
        "layers-loss-50": look(LAYERS_KEPT, FIFTY)["worst loss, gated"],
        "eata-adam-least": min(adam),
        "eata-adam-most": max(adam),
        "layers-lost-50": 100 - look(LAYERS_KEPT, FIFTY)["kept, %"],
        "small-classes": float(np.mean(classes)),
        "small-vit-class": 100 * np.bincount(answers).max() / len(answers),
        "small-speed": look("small/cost", MINI, OURS)["of frozen, %"],
        "small-clean": top1(SMALL, MINI, "frozen", f"clean, {BURSTS}"),
        "small-note": top1(SMALL, MINI, "NOTE", BURSTS),
        "small-rotta": top1(SMALL, MINI, "RoTTA", BURSTS),
        "small-ours": top1(SMALL, MINI, OURS, BURSTS),
        "small-frozen": top1(SMALL, MINI, "frozen", BURSTS),
        "small-vote": top1(SMALL, MINI, "smoothed frozen", BURSTS),
        "small-vit-clean": top1(SMALL, MINI_VIT, "frozen", "clean, shuffled"),
        "small-vit-frozen": top1(SMALL, MINI_VIT, "frozen"),
        "small-foa": top1(SMALL, MINI_VIT, "FOA"),
        "small-vit-pea": top1(SMALL, MINI_VIT, "PEA"),
        "small-vit-ours": top1(SMALL, MINI_VIT, OURS),
        "small-vit-ungated": top1(SMALL, MINI_VIT, UNGATED),
        "small-vit-loss": look(SMALL, MINI_VIT, OURS)["worst loss"],
        "small-vote-loss": look(SMALL, MINI, "smoothed frozen", BURSTS)["worst loss"],
    }
    for name, network in (("10", TEN), ("100", HUNDRED)):
        found |= {
            f"sorted-frozen-{name}": top1(KINDS, network, "frozen", SORTED),
            f"sorted-tent-{name}": top1(KINDS, network, "Tent", SORTED),
            f"sorted-{name}": top1(KINDS, network, OURS, SORTED),
            f"kept-{name}": look(FIELD_KEPT, network)["kept, %"],
            f"resets-{name}": top1(FIELD, network, OURS),
            f"continual-{name}": top1(FIELD, network, OURS, CONTINUAL),
            f"continual-roid-{name}": top1(FIELD, network, "ROID", CONTINUAL),
            f"continual-class-{name}": math.ceil(largest[f"cifar{name}"]),
            f"roid-tuned-{name}": top1(FIELD, network, "ROID, tuned"),
            f"layers-gain-{name}": lead(KINDS, network, LAYERS, "frozen"),
            f"layers-gain-mixed-{name}": lead(KINDS, network, LAYERS, "frozen", MIXED),
        }
    for name, network in (("50", FIFTY), ("lite", LITE)):
        found |= {
            f"loss-{name}": look(KEPT, network)["worst loss, gated"],
            f"gain-{name}": lead(KINDS, network, OURS, "frozen"),
            f"gain-pea-{name}": lead(KINDS, network, "PEA", "frozen"),
            f"layers-{name}": top1(KINDS, network, LAYERS),
            f"bn-{name}": top1(KINDS, network, "BN statistics"),
            f"pea-{name}": top1(KINDS, network, "PEA"),
        }
    for name in ("pea", "foa"):
        streams = vit[name].keys()
        found[f"vit-{name}-streams"] = len(streams)
        for method in (name, "frozen", "mixture-transport"):
            mean = np.mean([vit[method][stream] for stream in streams])
            found[f"vit-{method}-on-{name}-streams"] = float(mean)
    ahead_of_pea = {
        stream: vit["mixture-transport"][stream] - pea for stream, pea in vit["pea"].items()
    }
    found["vit-pea-behind"] = np.mean([*ahead_of_pea.values()])
    found["vit-pea-ahead-streams"] = sum(own < 0 for own in ahead_of_pea.values())
    found["vit-pea-behind-contrast"] = ahead_of_pea.pop("contrast")
    found["vit-pea-behind-others"] = np.mean([*ahead_of_pea.values()])
    for name in ("field", "mixture", "reproduction", "small"):
        sweep = sweeps.read(REPRODUCTION / "sweeps" / f"{name}.toml")
        found[f"cells-{name}"] = len(sweep.cells)
        if name != "field":
            found[f"streams-{name}"] = len({spec.stream for spec in sweep.cells})
    return found


def tables() -> dict[str, Table]:
    """All tables; those without titles are a choice of rows."""
    results = [(own, "shuffled") for own in (PLAIN, TEN, HUNDRED, VIT)]
    layers = [(own, "shuffled") for own in (TEN, PLAIN, HUNDRED, VIT)]
    streams = [(own, kind) for own in (TEN, HUNDRED) for kind in (CONTINUAL, "shuffled")]
    continual = {row["method"].partition(" (")[0] for row in rows(FIELD, TEN, kind=CONTINUAL)}
    kept = {row["backbone"] for row in report(LAYERS_KEPT)} - {"all"}
    bursts = [(MINI, kind) for kind in (BURSTS, BURSTS_CONTINUAL, f"clean, {BURSTS}")]
    every = {
        re.sub(r" \(lr .*", ", tuned", row["method"]) for row in rows(SMALL, MINI, kind=BURSTS)
    }
    learning = {row["backbone"] for row in report(PAPER) if row["method"] == "layer-transport"}
    return {
        "results": Table(partial(accuracy_row, FIELD, results, "-")),
        "kinds-10": Table(partial(kind_row, TEN), kinds(TEN)),
        "kinds-100": Table(partial(kind_row, HUNDRED), kinds(HUNDRED)),
        "kinds-vit": Table(partial(kind_row, VIT), kinds(VIT)),
        "kinds-swin": Table(partial(kind_row, SWIN), kinds(SWIN)),
        "kinds-50": Table(partial(kind_row, FIFTY), kinds(FIFTY, clean=True)),
        "kinds-lite": Table(partial(kind_row, LITE), kinds(LITE, clean=True)),
        "continual": Table(partial(accuracy_row, FIELD, streams, ""), continual),
        "layers-kept": Table(layers_kept_row, kept),
        "layers-kinds": Table(layers_kind_row, kinds(HUNDRED)),
        "layers-field": Table(partial(accuracy_row, FIELD, layers, "")),
        "layers-learning": Table(learning_row, learning),
        "small-bursts": Table(partial(accuracy_row, SMALL, bursts, ""), every | {"CoTTA"}),
        "tuning": Table(
            partial(tuning_row, "tuning/tuning", (TEN, PLAIN, HUNDRED)),
            {row["method"] for row in report("tuning/tuning")},
        ),
        "small-tuning": Table(
            partial(tuning_row, "small/tuning", (MINI,)),
            {row["method"] for row in report("small/tuning")},
        ),
    }


BOLD = ("results", "tuning")  # tables with the best of each column in bold


def statements() -> dict[str, bool]:
    """All statements that the figures must bear out."""
    pea = [lead(KINDS, network, "PEA", OURS) for network in (FIFTY, LITE)]
    layers = {own["backbone"]: own for own in report(LAYERS_KEPT)}
    aim = {name for name in layers if layers[name]["kept, %"] >= 90}
    aim &= {name for name in layers if layers[name]["worst loss, gated"] <= 1}
    learners, tuned = {"tent", "roid", "deyo", "cotta"}, {"tent", "eata", "sar", "deyo", "roid"}
    rivals = {"bn-adapt", "tent", "eata", "sar", "deyo", "roid", "pea"}
    return {
        "field-none-loses": look(FIELD_KEPT, "all")["worst loss, gated"] == 0,
        "loose-none-loses": look(KINDS, HUNDRED, OURS, LOOSE)["worst loss"] == 0,
        "loss-50-is-clean": "clean" in look(KEPT, FIFTY)["where"],
        "loss-lite-is-shot-noise": "shot_noise" in look(KEPT, LITE)["where"],
        "tuned-ahead": [len(tuned_ahead(own, OURS)) for own in (TEN, PLAIN, HUNDRED)] == [3, 3, 5],
        "tuned-ahead-of-layers": tuned_ahead(TEN, LAYERS) == {"roid", "tent"}
        and tuned_ahead(PLAIN, LAYERS) == tuned_ahead(HUNDRED, LAYERS) == tuned,
        "rivals-ahead-10": ahead(FIELD, TEN, OURS)
        == {"pea", "cotta", "tent", "roid", "layer-transport"},
        "rivals-ahead-50": ahead(KINDS, FIFTY, OURS) == rivals,
        "pea-ahead-of-both": round(pea[0]) == round(pea[1]),
        "continual-ahead-10": ahead(FIELD, TEN, OURS, CONTINUAL)
        == {"roid", "tent", "pea", "deyo", "layer-transport"},
        "continual-ahead-100": ahead(FIELD, HUNDRED, OURS, CONTINUAL) == {"roid"},
        "continual-none-loses": without_resets()[2],
        "small-first": all(
            row["top-1"] < top1(SMALL, MINI, OURS, kind) or "-transport" in row["method"]
            for kind in (BURSTS, BURSTS_CONTINUAL)
            for row in rows(SMALL, MINI, kind=kind)
        ),
        "small-behind-frozen": learners | {"bn-adapt", "eata", "eta", "sar", "coral"}
        == {row["method"] for row in rows(SMALL, MINI, kind=BURSTS_CONTINUAL) if row["gain"] < -10},
        "small-vit-pea-first": ahead(SMALL, MINI_VIT, OURS) == {"pea"},
        "small-vit-loss-is-contrast": "contrast" in look("small/mixture-kept", MINI_VIT)["where"],
        "layers-aim": aim == {TEN, HUNDRED, LITE},
        "layers-behind-imagenet": all(rivals < ahead(KINDS, own, LAYERS) for own in (FIFTY, LITE)),
        "layers-behind-severe": {"bn-adapt", "tent", "eata", "sar"}
        == ahead(SEVERE, "ResNet-50, CIFAR-100", LAYERS),
        "layers-loss-50-is-defocus": "defocus_blur" in layers[FIFTY]["where"],
        "layers-field-none-loses": look("field/layers-kept", "all")["worst loss, gated"] == 0,
        "layers-behind-plain": ahead(FIELD, PLAIN, LAYERS) == learners | {"mixture-transport"},
        "layers-behind-100": ahead(FIELD, HUNDRED, LAYERS)
        == learners | rivals | {"mixture-transport"},
        "layers-ahead-10": ahead(FIELD, TEN, LAYERS) == set(),
    }


# --- rows of tables ---------------------------------------------------------------------------


def accuracy_row(table: str, streams: list[tuple[str, str]], absent: str, method: str) -> list[str]:
    """Accuracy of a method on kinds of streams."""
    found = [rows(table, network, method, kind) for network, kind in streams]
    return [f"{own[0]['top-1']:.1f}" if own else absent for own in found]


def kind_row(network: str, kind: str) -> list[str]:
    """Frozen, best of the other methods, plain, ours, share of accepted batches, ungated."""
    others = [row for row in rows(KINDS, network, kind=kind) if "-transport" not in row["method"]]
    others = [row for row in others if row["method"] != "frozen"]
    best = max(others, key=lambda row: row["top-1"])
    name = "Tent" if best["method"] == "tent" else best["method"].upper()
    plain = [f"{own['top-1']:.1f}" for own in rows(KINDS, network, LAYERS, kind)] or [""]
    frozen, ours, ungated = (look(KINDS, network, own, kind) for own in ("frozen", OURS, UNGATED))
    shown = [f"{frozen['top-1']:.1f}", f"{best['top-1']:.1f} ({name})", *plain]
    shown = emphasized([*shown, f"{ours['top-1']:.1f}"])
    return [*shown, f"{ours['accepted, %']:.0f} %", f"{ungated['top-1']:.1f}"]


def kinds(network: str, clean: bool = False) -> set[str]:
    """Kinds of streams of a network: of corrupted images, and of clean ones if asked for."""
    own = [row for row in report(KINDS) if row["backbone"] == network]
    found = {row["stream"] + (f", B = {row['B']:.0f}" if row["B"] != 64 else "") for row in own}
    return {kind for kind in found if clean or not kind.startswith("clean")}


def layers_kept_row(network: str) -> list[str]:
    """Gains and worst losses of layer transport, and the gain of mixture transport."""
    own = look(LAYERS_KEPT, network)
    gains = [f"{own[name]:+.2f}" for name in ("ungated", "gated")]
    losses = [f"{own[f'worst loss, {name}']:.2f}" for name in ("ungated", "gated")]
    share, mixture = f"{own['kept, %']:.0f} %", f"{look(KEPT, network)['gated']:+.2f}"
    return [f"{own['streams']:.0f}", *gains, share, *losses, mixture]


def layers_kind_row(kind: str) -> list[str]:
    """Accuracy of the frozen model and of layer transport, ungated and gated, on two networks."""
    own = [look("mixture/layers-streams", network, kind=kind) for network in (TEN, HUNDRED)]
    return [f"{row['frozen']:.1f} / {row['ungated']:.1f} / {row['gated']:.1f}" for row in own]


def learning_row(network: str) -> list[str]:
    """Accuracy and worst loss of layer transport and of methods that learn."""
    best = best_learner(network)
    methods = ("BN statistics", best, "caster", LAYERS_UNGATED, LAYERS)
    own = [look(PAPER, network, method) for method in methods]
    shown = [f"{row['top-1']:.2f} ({row['worst loss'] or 0:.1f})" for row in own]
    return [f"{top1(PAPER, network, 'frozen'):.2f}", shown[0], f"{best} {shown[1]}", *shown[2:]]


def tuning_row(table: str, networks: tuple[str, ...], method: str) -> list[str]:
    """Accuracy with the published setting and with the best of five."""
    tried = [rows(table, network, method) for network in networks]
    found = [[row["accuracy"] for row in own] for own in tried]
    return [f"{own[0]:.1f} → {max(own):.1f}" if own else "" for own in found]


def emphasized(cells: list[str]) -> list[str]:
    """Put the best of the cells' last figures in bold."""
    last = re.compile(r"\d+\.\d(?!.*\d\.\d)")
    best = max((found[0] for cell in cells if (found := last.search(cell))), key=float, default="")
    return [
        last.sub(lambda found: f"**{best}**" if found[0] == best else found[0], cell)
        for cell in cells
    ]


# --- where they are found ---------------------------------------------------------------------


@cache
def report(name: str) -> list[Row]:
    """Rows of a table of a sweep's report; networks without the name of their data."""
    sweep, _, table = name.partition("/")
    with (REPRODUCTION / "report" / sweep / f"tables/{table}.csv").open(encoding="utf-8") as file:
        found = [
            {name: float(cell) if re.match(r"-?\d", cell) else cell for name, cell in row.items()}
            for row in csv.DictReader(file)
        ]
    return [row | {"backbone": row["backbone"].partition(" on ")[0]} for row in found]


def rows(table: str, network: str, method: str = "", kind: str = "shuffled") -> list[Row]:
    """Rows of a network; of a method and a kind of stream, as pages call them, if there are any.

    `DeYO, tuned` is `deyo (lr 0.01)` in reports, and `Tent` may be `tent (preset layer-norm)`.
    """
    name = re.sub(", (ungated|tuned)$", "", method)
    name = IN_REPORTS.get(name, name.lower().replace(" ", "-")) or ".*"
    name += "-ungated" if method.endswith(", ungated") else ""
    name += r" \(lr .*\)" if method.endswith(", tuned") else r"( \(preset .*\))?"
    kind, _, size = kind.partition(", B = ")
    stream, batches = IN_REPORTS.get(kind, kind), (float(size),) if size else (None, 64, 200)
    return [
        row
        for row in report(table)
        if row["backbone"] == network and re.fullmatch(name, row.get("method", ""))
        if row.get("stream", stream) == stream and row.get("B") in batches
    ]


def reported(title: str) -> str:
    """Return what reports call the title of a row, in small letters and without commas."""
    kind, at, size = title.partition(", B = ")
    return re.sub("[, ]+", "-", IN_REPORTS.get(kind, kind).lower() + at + size)


def look(table: str, network: str, method: str = "", kind: str = "shuffled") -> Row:
    """Return the only such row."""
    found = rows(table, network, method, kind)
    if len(found) != 1:
        sys.exit(f"{table} has {len(found)} rows of {network}, {method or 'any'}, {kind}")
    return found[0]


def top1(table: str, network: str, method: str, kind: str = "shuffled") -> float:
    """Return the accuracy of a method."""
    return look(table, network, method, kind)["top-1"]


def lead(table: str, network: str, method: str, other: str, kind: str = "shuffled") -> float:
    """Points by which a method is ahead of another."""
    return top1(table, network, method, kind) - top1(table, network, other, kind)


def ahead(table: str, network: str, method: str, kind: str = "shuffled") -> set[str]:
    """Names of the methods that are ahead of one, with published settings and gates."""
    own = top1(table, network, method, kind)
    better = [row["method"] for row in rows(table, network, kind=kind) if row["top-1"] > own]
    return {name.partition(" (preset")[0] for name in better if not re.search("-ungated|lr", name)}


def tuned_ahead(network: str, method: str) -> set[str]:
    """Names of the methods that are ahead of one under the field's protocol with tuned rates."""
    found = rows(FIELD, network)
    better = [row["method"] for row in found if row["top-1"] > top1(FIELD, network, method)]
    return {name.partition(" (")[0] for name in better if "(lr " in name}


def kept(network: str, kind: str) -> float:
    """Percent of the ungated gain that is left behind the certificate."""
    gated, ungated = (lead(KINDS, network, own, "frozen", kind) for own in (OURS, UNGATED))
    return 100 * gated / ungated


def best_learner(network: str) -> str:
    """Return the best of three methods that learn."""
    return max(("Tent", "EATA", "SAR"), key=lambda method: top1(PAPER, network, method))


@cache
def without_resets() -> tuple[dict[str, list[float]], dict[str, float], bool]:
    """Return what no report has of streams without resets, corruption by corruption.

    By data, all losses to a reset and the largest share of one class in an accepted batch, in
    percent; and whether no corruption is below the frozen model.
    """
    right, below, largest = {}, [], {}
    backbones = "resnet18-cifar10", "resnet18-cifar100"
    recorded = [each for own in backbones for each in records("field", own, "mixture-transport")]
    for record in recorded:
        spec, samples, batches = record.spec, record.samples, record.batches
        continual = spec.schedule == "continual"
        for i, (name, _) in enumerate(spec.conditions):
            part = samples.batch * len(spec.conditions) // len(batches.batch) == i
            frozen, ours = (
                100 * np.mean(own[part] == samples.label[part])
                for own in (samples.frozen, samples.prediction)
            )
            right[spec.data, name, continual] = ours
            below.append(ours < frozen)
        if continual:
            accepted = [
                samples.prediction[samples.batch == i] for i in np.flatnonzero(batches.accepted)
            ]
            largest[spec.data] = max(100 * np.bincount(own).max() / len(own) for own in accepted)
    losses = {
        data: [right[key] - right[*key[:2], True] for key in right if key[0] == data and not key[2]]
        for data in largest
    }
    return losses, largest, not any(below)


@cache
def vit_top1() -> dict[str, dict[str, float]]:
    """Return the accuracy of four methods on every corruption of the ViT-B that they ran on.

    Under the field's protocol; reports leave out a method that lacks a stream.
    """
    found: dict[str, dict[str, float]] = {}
    for method in ("frozen", "mixture-transport", "pea", "foa"):
        own = records("field", "vit_base-cifar10", method)
        found[method] = {
            record.spec.conditions[0][0]: 100
            * float(np.mean(record.samples.prediction == record.samples.label))
            for record in own
        }
        if len(found[method]) != len(own):
            sys.exit(f"field.toml has two cells of {method} for one stream of the ViT-B")
    return found


def small_record(backbone: str, method: str, corruption: str) -> Record:
    """Return the record of a small network under a corruption."""
    wanted = ((corruption, 5),)
    for record in records("small", f"{backbone}-cifar10", method):
        if record.spec.conditions == wanted:
            return record
    sys.exit(f"no record of {backbone}, {method}, {corruption}")


def records(sweep: str, backbone: str, method: str) -> list[Record]:
    """Return all records of a method on a backbone."""
    found = scan(Pack(REPRODUCTION / "records" / sweep)).records
    specs = ((where, described(where)[1]) for where in found)
    wanted = backbone, method
    return [read(where) for where, spec in specs if (spec.backbone, spec.method) == wanted]


# --- how they get into the pages --------------------------------------------------------------


def pattern(values: Values) -> re.Pattern[str]:
    """Pattern of markers, with the figure before or the rows below, and of other comments."""
    tables = "|".join(name for name, value in values.items() if isinstance(value, Table)) or "(?!)"
    return re.compile(
        r"(?P<figure>\d[\d.,]*)?<!--(?! Generated by )"
        rf"(=(?P<name>(?P<table>{tables})|(\w+-)*\w+)-->)?"
        r"(?(table)(?P<header>.*\n\|[-:| ]+\n)?(?P<rows>(?(header)(\|.*\n)*)))"
    )


def fill(pages: Mapping[str, str], values: Values) -> dict[str, str]:
    """Put values where pages mark them, or exit with a line that says what is wrong."""
    marker = pattern(values)
    filled = {
        page: marker.sub(partial(replaced, page, values), text) for page, text in pages.items()
    }
    used = {found["name"] for text in pages.values() for found in marker.finditer(text)}
    if unused := sorted(values.keys() - used):
        sys.exit(f"no page marks {', '.join(unused)}")
    return filled


def replaced(page: str, values: Values, found: re.Match[str]) -> str:
    """Return a marker with its figure or its rows."""
    name, figure = found["name"], found["figure"]
    value = values.get(name)
    at = f"{page}, line {found.string.count(chr(10), 0, found.start()) + 1}:"
    if name is None:
        sys.exit(f"{at} a comment must be a marker, `<!--=NAME-->` on one line")
    if found[0].count("<!--") > 1:
        sys.exit(f"{at} the table of '{name}' has other comments")
    if value is None:
        sys.exit(f"{at} nothing is called '{name}'")
    if value is False:
        sys.exit(f"{at} the records contradict the statement '{name}'")
    if value is True:
        return found[0]
    if not isinstance(value, Table):
        if not figure:
            sys.exit(f"{at} '{name}' must follow its figure")
        if not 0 <= value < math.inf:
            sys.exit(f"{at} the records contradict the sentence: '{name}' is {value}")
        return f"{value:,.{len(figure.partition('.')[2])}f}" + found[0].removeprefix(figure)
    if not found["rows"]:
        sys.exit(f"{at} '{name}' must stand in the header of its table")
    titles = [row.split("|")[1].strip() for row in found["rows"].splitlines()]
    there = set(map(reported, titles))
    if absent := [title for title in sorted(value.titles) if reported(title) not in there]:
        sys.exit(f"{at} '{name}' leaves out {'; '.join(absent)}")
    columns = [titles, *map(list, zip(*map(value.cells, titles), strict=True))]
    if len(columns) != found["header"].splitlines()[1].count("|") - 1:
        sys.exit(f"{at} '{name}' has {len(columns)} columns, and its header has others")
    if name in BOLD:
        columns[1:] = map(emphasized, columns[1:])
    lines = [f"| {' | '.join(row)} |\n".replace("|  ", "| ") for row in zip(*columns, strict=True)]
    return found[0].removesuffix(found["rows"]) + "".join(lines)


def main() -> None:
    """Rewrite the pages whose figures changed."""
    pages = {str(page.relative_to(ROOT)): page.read_text("utf-8") for page in PAGES}
    for name, text in fill(pages, {**figures(), **tables(), **statements()}).items():
        if text != pages[name]:
            with replacing(ROOT / name) as temporary:
                temporary.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
