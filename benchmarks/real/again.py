"""Compare two runs of one sweep: which cells have the same answer to every image.

    python benchmarks/real/again.py RECORDS RECORDS [BACKBONE ...]

RECORDS is the folder of a run or of `caster bench pack`. Cells are matched by their description in
the sweep, whatever their checkpoints and moments; the row `weights` counts those with bit-identical
frozen networks.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from caster_bench.records.schema import DONE, Cell
from caster_bench.records.store import Pack, cells_of, read_cell, scan
from caster_bench.sweeps import Spec


def cells_in(folder: Path) -> dict[Spec, Cell]:
    """All cells with results."""
    records = scan(folder if cells_of(folder).is_dir() else Pack(folder)).records
    cells = [cell for cell in map(read_cell, records) if cell.status == DONE]
    return {Spec.of(cell.identity["spec"]): cell for cell in cells}


def compare(one: Path, other: Path, backbones: list[str]) -> dict[tuple[str, str], list[bool]]:
    """For every cell in both, by backbone and row, whether the answers are the same."""
    first, second = cells_in(one), cells_in(other)
    rows: defaultdict[tuple[str, str], list[bool]] = defaultdict(list)
    for spec in first.keys() & second.keys():
        if not backbones or spec.backbone in backbones:
            a, b = first[spec], second[spec]
            rows[spec.backbone, "weights"].append(a.frozen["before"] == b.frozen["before"])
            same = a.tables["samples"] == b.tables["samples"]
            rows[spec.backbone, spec.method].append(same)
    return dict(rows)


def main(one: Path, other: Path, backbones: list[str]) -> None:
    rows = compare(one, other, backbones)
    if not rows:
        sys.exit(f"{one} and {other} have no cell in common")
    print(f"{'backbone':24} {'in both':24} {'cells':>6} {'the same':>9}")
    for (backbone, row), same in sorted(rows.items()):
        print(f"{backbone:24} {row:24} {len(same):6} {sum(same):9}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
