"""Two runs of one sweep side by side: which cells came out the same, picture by picture.

    python benchmarks/real/again.py RECORDS RECORDS [BACKBONE ...]

RECORDS are folders of `caster bench pack`. Cells are compared by what the sweep says of them,
whatever their checkpoints and moments are; of every backbone it is told whether the weights in
memory were the same.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from caster.records import DONE, Cell, Pack, read_cell, scan
from caster.sweeps import Spec


def cells_in(folder: Path) -> dict[Spec, Cell]:
    """All cells of a pack that have results."""
    cells = map(read_cell, scan(Pack(folder)).records)
    return {Spec.of(cell.identity["spec"]): cell for cell in cells if cell.status == DONE}


def main(one: Path, other: Path, backbones: list[str]) -> None:
    first, second = cells_in(one), cells_in(other)
    both = [spec for spec in first if spec in second]
    same: Counter[tuple[str, str]] = Counter()
    met: Counter[tuple[str, str]] = Counter()
    for spec in both:
        if backbones and spec.backbone not in backbones:
            continue
        a, b = first[spec], second[spec]
        rows = {
            "weights": a.frozen["before"] == b.frozen["before"],
            spec.method: a.tables["samples"] == b.tables["samples"],
        }
        for row, equal in rows.items():
            met[spec.backbone, row] += 1
            same[spec.backbone, row] += equal
    if not met:
        sys.exit(f"{one} and {other} have no cell in common")
    print(f"{'backbone':24} {'':24} {'cells':>6} {'the same':>9}")
    for backbone, row in sorted(met):
        print(f"{backbone:24} {row:24} {met[backbone, row]:6} {same[backbone, row]:9}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
