"""How methods of test-time adaptation behave, and what they cost, on CIFAR-10.

    python benchmarks/methods behaviour --data DATA --out OUT   # accuracy, acceptance, harm
    python benchmarks/methods referee --data DATA --out OUT     # the referee's threshold
    python benchmarks/methods cost --data DATA --out OUT        # throughput and memory
    python benchmarks/methods table --out OUT                   # the tables again

DATA holds `cifar10.npz` with arrays `train_images` (uint8, N x 32 x 32 x 3), `train_labels`,
`test_images` and `test_labels`. Networks are trained on first use and kept in OUT, beside one JSON
line a result, written as it comes: a run that is cut off goes on where it was, and with
`--seconds` it begins nothing more after that time. `--workers 1` gives behaviour times that count;
cost is measured alone in any case. `--tiny` is a rehearsal in minutes on a CPU. Exits with 1 if
anything failed or is left to do. Needs torch, timm and Pillow; minutes on one GPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cost import alone, cost
from plans import behaviour, referee
from subjects import DEVICE, Run
from tables import show


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Methods of test-time adaptation on CIFAR-10.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("behaviour", "referee", "cost", "alone", "table"):
        one = verbs.add_parser(verb)
        one.add_argument("--out", type=Path, required=True)
        if verb == "table":
            continue
        one.add_argument("--data", type=Path, required=True)
        one.add_argument("--tiny", action="store_true")
        if verb == "alone":  # what `cost` starts for each method
            one.add_argument("model")
            one.add_argument("method")
            continue
        one.add_argument("--seconds", type=float, default=float("inf"))
        if verb != "cost":
            one.add_argument("--workers", type=int, default=6 if DEVICE == "cuda" else 2)
        if verb == "behaviour":
            one.add_argument("--slow-cells", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    given = options()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.verb == "table":
        show(given.out)
        return
    run = Run(given.data, given.out, given.tiny)
    if given.verb == "alone":
        print(json.dumps(alone(run, given.model, given.method)))
        return
    try:
        if given.verb == "behaviour":
            behaviour(run, given.workers, given.seconds, given.slow_cells)
        elif given.verb == "referee":
            referee(run, given.workers, given.seconds)
        else:
            cost(run, given.seconds)
    finally:
        show(given.out, [given.verb])


if __name__ == "__main__":
    main()
