"""How often SAR's recorded answers differ from those of BatchNorm with batch statistics.

    python benchmarks/sar_records.py reproduction/records/reproduction

On a network without BatchNorm, the latter are the frozen model's.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from pathlib import Path

from caster_bench.records.schema import DONE
from caster_bench.records.store import Pack, read, read_cell, scan
from caster_bench.sweeps import Spec

streams = defaultdict(dict)
for location in scan(Pack(Path(sys.argv[1]))).records:
    cell = read_cell(location)
    spec = Spec.of(cell.identity["spec"])
    if cell.status == DONE and spec.method in ("sar", "bn-adapt") and not spec.alone:
        streams[spec.stream][spec.method] = location
differ, total = Counter(), Counter()
for stream, met in streams.items():
    if len(met) == 2:
        ours, plain = (read(met[method]).samples.prediction for method in ("sar", "bn-adapt"))
        differ[stream.backbone] += int((ours != plain).sum())
        total[stream.backbone] += len(ours)
for backbone, count in total.items():
    print(f"{backbone}: {100 * differ[backbone] / count:.2f} % of {count:,} answers")
