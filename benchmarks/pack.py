"""Bytes and seconds of packed records: `python benchmarks/pack.py [CELLS] [IMAGES] [CLASSES]`.

Records of a sweep that was never run, whose methods agree with the frozen model in 85 % of the
images, are written to a temporary folder, packed, and verified and reported from the pack.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from measure import machine

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.consistent_records import Consistent
from tests.support.record_maker import sha

from caster_bench.engine.pack import pack
from caster_bench.engine.record import round_seconds
from caster_bench.records.store import Pack
from caster_bench.studies.report import write_report
from caster_bench.studies.results import load
from caster_bench.sweeps import Spec
from verify import sweep_of

AGREE = 0.85
Tables = tuple[dict[str, Any], dict[str, Any]]


class Agreeing(Consistent):
    """Records whose methods mostly say what the frozen model says."""

    def columns(self, spec: Spec) -> Tables:
        """Samples and batches of a cell."""
        samples, batches = super().columns(spec)
        batches = batches | {"seconds": round_seconds(batches["seconds"])}
        own = spec.method in ("frozen", "caster", "caster-ungated")
        return (samples, batches) if own else self.agreeing(spec, (samples, batches))

    def transported(self, spec: Spec) -> Tables:
        """Of a cell that always transports."""
        return self.agreeing(spec, super().transported(spec))

    def agreeing(self, spec: Spec, tables: Tables) -> Tables:
        """The frozen model's answer where the method agrees with it."""
        samples, batches = tables
        rng = np.random.default_rng(int(sha("agree", spec)[:12], 16))
        kept = rng.random(len(samples["frozen"])) < AGREE
        prediction = np.where(kept, samples["frozen"], samples["prediction"])
        return samples | {"prediction": prediction}, batches


def main(cells: int, images: int, classes: int, folder: Path) -> None:
    sweep = sweep_of(cells, folder)
    run = Agreeing(sweep, n=images, classes=classes).make(folder / "run")
    whole = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    began = time.perf_counter()
    done, problems = pack(sweep, run, Pack(folder / "pack"))
    seconds = time.perf_counter() - began
    if done is None:
        sys.exit(f"the records do not verify: {problems[0]}")
    print(machine())
    print(f"{done.cells} cells of {images} images, {classes} classes: {whole / 2**20:.1f} MiB")
    print(
        f"packed and verified in {seconds:.1f} s: {done.files} files, {done.size / 2**20:.2f} MiB, "
        f"{done.size / done.cells:.0f} bytes a cell, 1 / {whole / done.size:.1f}"
    )
    began = time.perf_counter()
    results, _ = load(sweep, Pack(folder / "pack"))
    loaded = time.perf_counter() - began
    assert results is not None
    began = time.perf_counter()
    write_report(results, folder / "report")
    reported = time.perf_counter() - began
    print(f"verified and read in {loaded:.1f} s, and reported in {reported:.1f} s more")


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as temporary:
        main(*(given + [2000, 2000, 10][len(given) :]), Path(temporary))
