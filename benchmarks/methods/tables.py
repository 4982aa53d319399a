"""Markdown tables from the JSON lines alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from lines import Line, Lines

NONE = "-"
THRESHOLDS = (0.8, 0.9, 0.95, 0.97, 0.99)  # of the referee
PARTS = {"severity 3": "-3", "severity 5": "-5", "clean": "clean"}  # how conditions end
Cells = dict[str, Line]  # of one method, by condition


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    """Markdown, the first column to the left and the others to the right."""
    rule = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, rule, *rows])


def percent(values: Iterable[float], digits: int = 1) -> str:
    held = list(values)
    return f"{100 * fmean(held):.{digits}f}" if held else NONE


def named(lines: Iterable[Line], key: str) -> list[Any]:
    """Values of a key, in the order they come in."""
    return list(dict.fromkeys(line[key] for line in lines if key in line))


def by_model(lines: Lines) -> dict[str, dict[str, Cells]]:
    """Results without failures: network, method, condition."""
    found: dict[str, dict[str, Cells]] = {}
    for line in sorted(lines.all.values(), key=lambda line: line["model"]):
        cells = found.setdefault(line["model"], {}).setdefault(line["method"], {})
        if "error" not in line:
            cells[line["condition"]] = line
    return found


def of(cells: Cells, ending: str) -> Cells:
    """Those of one severity."""
    return {condition: line for condition, line in cells.items() if condition.endswith(ending)}


def title_of(method: str, cells: Cells) -> str:
    return method + (" (inert)" if any(line["inert"] for line in cells.values()) else "")


def behaviour_row(method: str, cells: Cells, frozen: Cells) -> list[str]:
    """A method's row; where it did not see all that the frozen model did, that is said."""
    row = [title_of(method, cells)]
    for ending in PARTS.values():
        mine, whole = of(cells, ending), of(frozen, ending)
        text = percent(line["accuracy"] for line in mine.values())
        if mine and mine.keys() != whole.keys():
            there = percent(whole[c]["accuracy"] for c in mine if c in whole)
            seen = ", ".join(c.removesuffix(ending) for c in mine)
            text += f" ({seen} alone; frozen there {there})"
        row.append(text)
    corrupted = [line for condition, line in cells.items() if condition != "clean"]
    row += [percent((line["accepted"] for line in corrupted), 0)]
    row += [percent(line["harm"] for line in corrupted)]
    return [*row, f"{median(ln['seconds'] for ln in cells.values()):.2f}" if cells else NONE]


def behaviour_tables(lines: Lines) -> str:
    """One table a network."""
    blocks = []
    for model, methods in by_model(lines).items():
        frozen = methods.get("frozen", {})
        header = [model, *PARTS, "accepted", "harm", "s / 10,000"]
        blocks.append(table(header, (behaviour_row(m, c, frozen) for m, c in methods.items())))
        names = sorted({c.rpartition("-")[0] for c in frozen} - {""})
        blocks.append(f"Corruptions: {', '.join(names)}.")
    blocks.append(
        "Accuracy, acceptance of batches and harm in percent, acceptance and harm over the "
        "corrupted streams a method saw. Harm: frozen right, method wrong. Time: median."
    )
    return "\n\n".join([*blocks, *notes(lines)])


def referee_tables(lines: Lines) -> str:
    """Agreement of head and Source-GDA, then Tent behind every threshold."""
    levels = (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1)
    blocks = []
    for model, methods in by_model(lines).items():
        rows = (
            [condition, *(f"{q:.3f}" for q in np.quantile(line["agreement"], levels))]
            for condition, line in methods.get("source-gda", {}).items()
        )
        header = [f"{model}: agreement, quantiles", *(f"{100 * level:.0f} %" for level in levels)]
        blocks.append(table(header, rows))
        blocks.append(accepted_table(model, methods.get("source-gda", {})))
        header = [model]
        for part in PARTS:
            header += [part, "accepted", "harm"]
        blocks.append(table(header, (referee_row(*each) for each in methods.items())))
    return "\n\n".join([*blocks, *notes(lines)])


def accepted_table(model: str, cells: Cells) -> str:
    """Share of batches that a referee of each threshold accepts: agreement alone decides it."""
    parts = {"severity 3": of(cells, "-3"), "severity 5": of(cells, "-5")}
    parts["both"] = parts["severity 3"] | parts["severity 5"]
    rows = (
        [
            f"{part}, {len(streams)} streams",
            *(
                percent((np.mean(np.array(ln["agreement"]) >= t) for ln in streams.values()), 0)
                for t in THRESHOLDS
            ),
        ]
        for part, streams in parts.items()
    )
    return table([f"{model}: accepted at", *map(str, THRESHOLDS)], rows)


def referee_row(method: str, cells: Cells) -> list[str]:
    """Accuracy, acceptance and harm by severity."""
    row = [title_of(method, cells)]
    for ending in PARTS.values():
        held = of(cells, ending).values()
        row += [percent(line["accuracy"] for line in held)]
        row += [percent((line["accepted"] for line in held), 0)]
        row += [percent(line["harm"] for line in held)]
    return row


def cost_tables(lines: Lines) -> str:
    """One table a network, memory also as a multiple of the frozen model's."""
    blocks = []
    for model, methods in by_model(lines).items():
        found = {name: line for name, cells in methods.items() for line in cells.values()}
        base = found["frozen"]["allocated"] if "frozen" in found else None
        header = [model, "images/s", "of frozen", "allocated, MiB", "of frozen"]
        header += ["reserved, MiB", "retained, MiB", "backward", "accepted"]
        blocks.append(table(header, (cost_row(*each, base) for each in found.items())))
    conditions = ", ".join(named(lines.all.values(), "condition"))
    blocks.append(
        f"{conditions}. Medians of rounds, the frozen model timed in turns with each method; in "
        "brackets the middle half. Memory at its peak, the model and a few batches included; "
        "retained: what the method keeps beside the model. Accepted: percent of batches."
    )
    return "\n\n".join([*blocks, *notes(lines)])


def cost_row(method: str, line: Line, base: float | None) -> list[str]:
    used = line["allocated"]
    return [
        title_of(method, {"": line}),
        f"{line['rate']:,.0f}",
        f"{line['share']:.1%} ({line['share_low']:.1%} to {line['share_high']:.1%})",
        NONE if used is None else f"{used:.0f}",
        NONE if used is None or base is None else f"{used / base:.2f}",
        NONE if used is None else f"{line['reserved']:.0f}",
        f"{line['retained'] / 2**20:.2f}",
        "yes" if line["backward"] else "no",
        percent([line["accepted"]], 0),
    ]


def notes(lines: Lines) -> list[str]:
    """The settings every method ran with, what failed and why, and where it was measured."""
    every = list(lines.all.values())
    errors = [f"{ln['method']}, {ln['model']}: {ln['error']}" for ln in every if "error" in ln]
    parts = {"Settings": settings_in_words(every), "Failed": list(dict.fromkeys(errors))}
    parts["Measured on"] = named(every, "setup")
    return [f"{name}: {'; '.join(said)}." for name, said in parts.items() if said]


def settings_in_words(every: list[Line]) -> list[str]:
    """Of every method; of one that has not the same everywhere, by network."""
    models: dict[tuple[str, str], list[str]] = {}
    for line in every:
        chosen = ", ".join(f"{k} {v}" for k, v in line.get("settings", {}).items())
        if chosen:
            models.setdefault((line["method"], chosen), []).append(line["model"])
    several = Counter(method for method, _ in models)
    return [
        f"{method}{' on ' + ', '.join(dict.fromkeys(on)) if several[method] > 1 else ''}: {chosen}"
        for (method, chosen), on in models.items()
    ]


TABLES = {"behaviour": behaviour_tables, "referee": referee_tables, "cost": cost_tables}


def show(out: Path, names: Iterable[str] = TABLES) -> None:
    """Tables there are results for, printed and written beside them."""
    for name in names:
        path = out / f"{name}.jsonl"
        if path.exists():
            text = TABLES[name](Lines(path))
            (out / f"{name}.md").write_text(text + "\n")
            print(f"\n{text}\n", flush=True)
