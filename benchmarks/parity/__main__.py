"""Our corruptions beside published packages, by statistics of what they make.

    python benchmarks/parity pictures PICTURES.npz --side 32 [--data DATA --count 256]
    python benchmarks/parity/reference.py PICTURES.npz REFERENCE.csv    # in its environment
    python benchmarks/parity compare PICTURES.npz REFERENCE.csv

DATA is what `caster` takes (cifar10:test, a folder, an .npz file); without it the pictures are
pieces of the two photographs that come with scikit-learn, those of the tests.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from measures import Array, Entry, entry, read, samples

from caster.data import corrupt, open_pictures
from caster.data.corruptions.constants import CIFAR
from caster.frozen.preprocessing import Preprocessing

FITTED = Preprocessing(
    range=255.0, mean=(0.0,) * 3, std=(1.0,) * 3, layout="NHWC", resize=256,
    interpolation="bilinear", crop=(224, 224), dtype="uint8",
)  # fmt: skip


def pictures(options: argparse.Namespace) -> None:
    """Write pictures, and the constants that the reference needs at 32 pixels."""
    if options.data is None:
        found = samples(options.side)
    else:
        source = open_pictures(options.data)
        rows = np.random.default_rng(0).permutation(len(source))[: options.count]
        raw = [source.read(int(row)) for row in rows]
        found = np.stack(raw if options.side == 32 else [FITTED.fitted(one) for one in raw])
    np.savez(options.pictures, pictures=found, constants=json.dumps(CIFAR))


def compare(options: argparse.Namespace) -> None:
    """Print a row a corruption: the largest differences of its severities, levels and then dB."""
    with np.load(options.pictures) as file:
        clean = file["pictures"]
    reference = read(options.reference)
    packages = sorted({package for package, _, _ in reference}, reverse=True)
    for package in packages:
        print(f"\n| against {package} | mean | variance | PSNR | bands | of the bound |")
        print("|---|" + "--:|" * 5)
        for name in dict.fromkeys(name for _, name, _ in reference):
            theirs = [reference[package, name, severity] for severity in range(1, 6)]
            ours = [made(clean, name, severity, options) for severity in range(1, 6)]
            print(row(name, theirs, ours), flush=True)


def made(clean: Array, name: str, severity: int, options: argparse.Namespace) -> Entry:
    photographs = options.textures if name == "frost" else None
    extra = {} if photographs is None else {"textures": photographs}
    seeds = range(options.seeds)
    return entry(clean, (corrupt(clean, name, severity, seed=seed, **extra) for seed in seeds))


def row(name: str, theirs: Sequence[Entry], ours: Sequence[Entry]) -> str:
    """The largest difference of each kind, and the largest share of a bound."""
    apart = np.stack([our.mean - their.mean for our, their in zip(ours, theirs, strict=True)])
    bounds = [their.bounds(name, our.seeds) for our, their in zip(ours, theirs, strict=True)]
    grey = apart[:, :3].mean(axis=1, keepdims=True)
    kinds = (grey, apart[:, 3:4], apart[:, 4:5], apart[:, 5:])
    largest = (kind.flat[np.abs(kind).argmax()] for kind in kinds)
    cells = " | ".join(f"{number:+.2f}" for number in largest)
    return f"| {name} | {cells} | {np.max(np.abs(apart) / bounds):.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Our corruptions beside published packages.")
    verbs = parser.add_subparsers(required=True)
    writer = verbs.add_parser("pictures")
    writer.set_defaults(verb=pictures)
    writer.add_argument("pictures", type=Path)
    writer.add_argument("--side", type=int, choices=(32, 224), required=True)
    writer.add_argument("--data")
    writer.add_argument("--count", type=int, default=256)
    comparer = verbs.add_parser("compare")
    comparer.set_defaults(verb=compare)
    comparer.add_argument("pictures", type=Path)
    comparer.add_argument("reference", type=Path)
    comparer.add_argument("--seeds", type=int, default=4)
    comparer.add_argument("--textures", type=Path, help="photographs for frost")
    options = parser.parse_args()
    options.verb(options)


if __name__ == "__main__":
    main()
