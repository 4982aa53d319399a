"""Seconds that verifying and reporting take: `python benchmarks/verify.py [CELLS] [FOLDER]`.

Records of a sweep that was never run, 10,000 images a cell, are written to the folder (a
temporary one by default; those that are there are kept), then verified and reported.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from pathlib import Path

from measure import machine

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.consistent_records import Consistent

from caster_bench.records.store import scan
from caster_bench.studies.report import write_report
from caster_bench.studies.results import load
from caster_bench.studies.verify import verify
from caster_bench.sweeps import Sweep, read

IMAGES, CLASSES = 10_000, 10
METHODS = ("frozen", "source-gda", "caster", "caster-ungated", "t3a", "tent", "eata", "sar")
STREAMS = 95  # nineteen corruptions at five severities

SWEEP = """
name = "speed"
data.cifar10 = {{source = "cifar10:train", target = "cifar10:test"}}
{backbones}
[[grid]]
study = ["corruption", "certificate", "gate", "coverage", "specificity"]
corruptions = "all"
methods = {methods}
"""


def sweep_of(cells: int, folder: Path) -> Sweep:
    """A sweep of at least so many cells."""
    backbones = math.ceil(cells / (STREAMS * len(METHODS)))
    lines = (
        f'backbones.b{i} = {{family = "batch", checkpoint = "b{i}"}}' for i in range(backbones)
    )
    path = folder / "speed.toml"
    path.write_text(SWEEP.format(backbones="\n".join(lines), methods=list(METHODS)))
    return read(path)


def main(cells: int, folder: Path) -> None:
    sweep = sweep_of(cells, folder)
    out = folder / "speed"
    if len(scan(out).cells) < len(sweep.cells):
        began = time.perf_counter()
        Consistent(sweep, n=IMAGES, classes=CLASSES).make(out)
        print(f"{len(sweep.cells)} cells written in {time.perf_counter() - began:.0f} s")
    total = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    began = time.perf_counter()
    problems = verify(sweep, out)
    seconds = time.perf_counter() - began
    print(machine())
    print(f"{len(sweep.cells)} cells, {total / 2**20:.0f} MiB: {len(problems)} problems")
    print(f"verified in {seconds:.1f} s")
    began = time.perf_counter()
    results, _ = load(sweep, out)
    if results is None:
        sys.exit("the records do not verify")
    loaded = time.perf_counter() - began
    write_report(results, folder / "report")
    whole = time.perf_counter() - began
    print(f"verified and read in {loaded:.1f} s, and reported {whole - loaded:.1f} s after that")


if __name__ == "__main__":
    cells = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    if len(sys.argv) > 2:
        main(cells, Path(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(cells, Path(temporary))
