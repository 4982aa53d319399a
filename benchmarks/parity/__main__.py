"""Compare our corruptions with published packages by image statistics.

    python benchmarks/parity images IMAGES.npz --side 32 [--data DATA --count 256]
    python benchmarks/parity/reference.py IMAGES.npz REFERENCE.csv    # in its environment
    python benchmarks/parity compare IMAGES.npz REFERENCE.csv

DATA is any source that `caster` opens (cifar10:test, a folder, an .npz file); by default, crops of
the two photographs that come with scikit-learn, as in the tests.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from measures import Array, Entry, entry, read, samples

from caster.io.images import open_images
from caster_bench.data.corrupt_job import IMAGENET
from caster_bench.data.corruptions import corrupt
from caster_bench.data.corruptions.constants import CIFAR


def images(options: argparse.Namespace) -> None:
    """Write images, and the constants that the reference needs at 32 pixels."""
    if options.data is None:
        found = samples(options.side)
    else:
        source = open_images(options.data)
        rows = np.random.default_rng(0).permutation(len(source))[: options.count]
        raw = [source.read(int(row)) for row in rows]
        found = np.stack(
            raw if options.side == 32 else [IMAGENET.resize_and_crop(one) for one in raw]
        )
    np.savez(options.images, images=found, constants=json.dumps(CIFAR))


def compare(options: argparse.Namespace) -> None:
    """Print a row per corruption: the largest differences over severities, in levels and dB."""
    with np.load(options.images) as file:
        clean = file["images"]
    reference = read(options.reference)
    packages = sorted({package for package, _, _ in reference}, reverse=True)
    names = dict.fromkeys(name for _, name, _ in reference)
    ours = {}
    for name in names:
        random = reference[packages[0], name, 5].deviation.any()
        seeds = range(options.seeds if random else 1)
        ours[name] = [made(clean, name, severity, seeds, options) for severity in range(1, 6)]
    for package in packages:
        print(f"\n| against {package} | mean | variance | PSNR | bands | of the bound | ± mean |")
        print("|---|" + "--:|" * 6)
        for name in names:
            theirs = [reference[package, name, severity] for severity in range(1, 6)]
            print(row(name, theirs, ours[name]))


def made(
    clean: Array, name: str, severity: int, seeds: range, options: argparse.Namespace
) -> Entry:
    photographs = options.textures if name == "frost" else None
    extra = {} if photographs is None else {"textures": photographs}
    return entry(clean, (corrupt(clean, name, severity, seed=seed, **extra) for seed in seeds))


def row(name: str, theirs: Sequence[Entry], ours: Sequence[Entry]) -> str:
    """Format the largest difference of each kind and ratio to a bound, and the widest mean bound.

    Differences of means below that bound go unnoticed.
    """
    apart = np.stack([our.mean - their.mean for our, their in zip(ours, theirs, strict=True)])
    bounds = [their.bounds(name, our.seeds) for our, their in zip(ours, theirs, strict=True)]
    grey = apart[:, :3].mean(axis=1, keepdims=True)
    kinds = (grey, apart[:, 3:4], apart[:, 4:5], apart[:, 5:])
    largest = (kind.flat[np.abs(kind).argmax()] for kind in kinds)
    cells = " | ".join(f"{number:+.2f}" for number in largest)
    widest = np.stack(bounds)[:, :3].max()
    return f"| {name} | {cells} | {np.max(np.abs(apart) / bounds):.2f} | {widest:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare our corruptions with published packages.")
    verbs = parser.add_subparsers(required=True)
    writer = verbs.add_parser("images")
    writer.set_defaults(verb=images)
    writer.add_argument("images", type=Path)
    writer.add_argument("--side", type=int, choices=(32, 224), required=True)
    writer.add_argument("--data")
    writer.add_argument("--count", type=int, default=256)
    comparer = verbs.add_parser("compare")
    comparer.set_defaults(verb=compare)
    comparer.add_argument("images", type=Path)
    comparer.add_argument("reference", type=Path)
    comparer.add_argument("--seeds", type=int, default=4)
    comparer.add_argument("--textures", type=Path, help="photographs for frost")
    options = parser.parse_args()
    options.verb(options)


if __name__ == "__main__":
    main()
