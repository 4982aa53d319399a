"""Choose the gate's coverage constants, `min_samples` and `min_classes`, on spare corruptions.

    python benchmarks/coverage DATA OUT --seed 1

DATA holds `cifar10.npz` and `cifar100.npz`, each with arrays `train_images` (uint8, N x 32 x 32 x
3), `train_labels`, `test_images` and `test_labels`; both are read without pickle. Trains source
classifiers, streams the four spare corruptions, none of the fifteen others, and clean
images past them, and writes OUT/records.npz (one row a batch) and OUT/coverage.json (aggregates).
Where OUT/records.npz exists, only the choice is made again. Needs torch; minutes on one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from choice import LIMIT, Records, Row, choose, choose_safest, settle
from corruptions import CORRUPTIONS
from sources import SOURCES
from streams import measure


def summarise(records: Records) -> dict[str, Any]:
    """Both constants, and the aggregates they were chosen on."""
    whole = [m for m, source in enumerate(SOURCES) if source.whole]
    grid = records.evaluate(whole)
    picks = {"chosen": choose(grid)}
    for i, corruption in enumerate(CORRUPTIONS):
        picks[f"without {corruption.__name__}"] = choose(records.evaluate(whole, i))
    by_source = {source.name: records.evaluate([m]) for m, source in enumerate(SOURCES)}
    picks |= {f"only {name}": choose(rows) for name, rows in by_source.items()}
    limits = (0.5, LIMIT, 2.0, 4.0)
    picks |= {f"safest, limit {limit}": choose_safest(grid, limit) for limit in limits}
    min_classes = choose(grid).min_classes
    few = [m for m, source in enumerate(SOURCES) if len(source.labels) < min_classes]
    min_samples = settle(records.evaluate(few), min_classes)
    return {
        "chosen": {"min_samples": min_samples, "min_classes": min_classes},
        "grid": [flat(row) for row in grid],
        "grid by source": {name: [flat(row) for row in rows] for name, rows in by_source.items()},
        "picks": [{"rule": name} | flat(row) for name, row in picks.items()],
        "policies": records.policies(min_samples, min_classes),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows that share their keys."""
    print(" | ".join(rows[0]))
    for row in rows:
        print(" | ".join(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    print(flush=True)


def flat(row: Row) -> dict[str, Any]:
    """A row of the grid without nesting."""
    cells: dict[str, Any] = {"min_samples": row.min_samples, "min_classes": row.min_classes}
    cells |= {f"{order} gain": gain for order, gain in row.gain.items()}
    cells |= {f"{order} accepted": share for order, share in row.accepted.items()}
    cells |= {"clean": row.clean_gain, "worst": row.worst, "at": row.worst_at}
    return cells | {"largest i.i.d. cost": row.cost}


def main() -> None:
    parser = argparse.ArgumentParser(description="Choose min_samples and min_classes.")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "records.npz"
    if not path.exists():
        measured = measure(options.data, options.seed, options.workers)
        np.savez_compressed(path, allow_pickle=False, **measured)
    report = summarise(Records(dict(np.load(path, allow_pickle=False))))
    (options.out / "coverage.json").write_text(json.dumps(report, indent=1))
    rows = report["policies"]
    for kind in ("corrupted", "clean"):
        show([r for r in rows if (r["set"], r["order"], r["B"]) == (kind, "iid", 64)])
    show(report["grid"])
    show(report["picks"])
    print("chosen:", ", ".join(f"{name} {value}" for name, value in report["chosen"].items()))


if __name__ == "__main__":
    main()
