"""Layer transport on streams of every order and batch size, and what its certificate makes of them.

    python benchmarks/layers run --data DATA --out OUT          # one JSON line a stream
    python benchmarks/layers table --out OUT                    # tables of all lines in OUT

DATA and OUT are as in benchmarks/methods, whose trained networks it takes and makes: DATA holds
`cifar10.npz`. Every batch's ratio is kept with what the frozen and the aligned network get right,
so the tables gate at any threshold. A run that is cut off goes on where it was. Constants are
chosen on the four spare corruptions (`--corruptions spare`, the default); `reported` are the
others. On a CPU take fewer: `--pictures 500 --source-pictures 3000`. `--tiny` is a rehearsal.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "methods"))

from cells import Cell, Subject, Variant, measure, open_subject, pictures_under
from lines import Lines, append, words
from subjects import SUBJECTS, Run
from tables import show

from caster.data import CORRUPTIONS
from caster.data.corruptions import SPARE
from caster.data.streams import ORDERS

GROUPS = {"spare": SPARE, "reported": tuple(c for c in CORRUPTIONS if c not in SPARE)}
PLAN = ("shuffled", "by-class", "dirichlet", "long-tailed")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Layer transport on CIFAR-10.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    table = verbs.add_parser("table")
    table.add_argument("--out", type=Path, required=True)
    table.add_argument("--tau", type=float, default=None)
    run = verbs.add_parser("run")
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--data", type=Path, required=True)
    run.add_argument("--network", choices=SUBJECTS, default="ConvNeXt-12")
    run.add_argument("--corruptions", nargs="*", default=["spare"])
    run.add_argument("--severities", nargs="+", type=int, default=[5])
    run.add_argument("--clean", action="store_true", help="also the pictures as they are")
    run.add_argument("--orders", nargs="+", choices=ORDERS, default=PLAN)
    run.add_argument("--sizes", nargs="+", type=int, default=[64, 8, 200, 1])
    run.add_argument("--prior", type=float, default=None)
    run.add_argument("--memory", type=int, default=None)
    run.add_argument("--window", type=int, default=None)
    run.add_argument("--sites", nargs="+", default=None)
    run.add_argument("--pictures", type=int, default=10_000)
    run.add_argument("--source-pictures", type=int, default=50_000)
    run.add_argument("--seconds", type=float, default=float("inf"))
    run.add_argument("--threads", type=int, default=None)
    run.add_argument("--tiny", action="store_true")
    return parser.parse_args()


def plan(given: argparse.Namespace) -> list[Cell]:
    """Every stream that is asked for; those of one condition after each other."""
    names = [c for each in given.corruptions for c in GROUPS.get(each, (each,))]
    conditions = [f"{c}-{s}" for s in given.severities for c in names]
    conditions += ["clean"] if given.clean else []
    return [Cell(c, o, n) for c in conditions for n in given.sizes for o in given.orders]


def run(given: argparse.Namespace) -> None:
    end = time.time() + given.seconds
    where = Run(given.data, given.out, given.tiny)
    names = ("prior", "memory", "window", "sites")
    chosen = {name: getattr(given, name) for name in names}
    variant = Variant({k: v for k, v in chosen.items() if v is not None})
    path = given.out / "layers.jsonl"
    lines = Lines(path)
    lines.repair()
    subject = open_subject(where, given.network, given.pictures, given.source_pictures)
    lines.check(given.network, subject.model.sha256)
    left = 0
    for cell in plan(given):
        if lines.done(given.network, variant.label, cell.label, settings=variant.of(subject)):
            continue
        if time.time() > end:
            left += 1
            continue
        append(path, line_of(subject, variant, cell))
    show(given.out)
    Lines(path).conclude(left)


def line_of(subject: Subject, variant: Variant, cell: Cell) -> dict[str, object]:
    """The result of one stream, or what went wrong with it."""
    line: dict[str, object] = {"model": subject.name, "method": variant.label}
    line |= {"condition": cell.label, "sha256": subject.model.sha256}
    try:
        images = pictures_under(subject, cell.condition)
        return line | {"settings": variant.of(subject)} | measure(subject, variant, cell, images)
    except Exception as error:  # of one stream: the others go on
        return line | {"error": words(error), "settings": variant.of(subject)}


def main() -> None:
    given = options()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.verb == "table":
        show(given.out, given.tau)
        return
    if given.threads is not None:
        import torch

        torch.set_num_threads(given.threads)
    run(given)


if __name__ == "__main__":
    main()
