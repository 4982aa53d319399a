"""Layer transport with a thousand classes: ImageNet networks on corrupted validation pictures.

    CASTER_DATA=FOLDER python benchmarks/real/layers.py efficientnet_lite0 contrast:5 fog:3 clean

FOLDER as for `python benchmarks/real`. Source statistics come from four of the five pictures a
class, streams from the fifth: shuffled, and sorted by class, which puts classes together that are
neighbours in WordNet. Prints a row a stream.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from models import RAW_224, load
from numpy.typing import NDArray

from caster import Adapter, wrap
from caster.arrays import to_numpy
from caster.data import Pictures, corrupt, open_pictures
from caster.methods import Source, create

BATCH = 64
EACH = 5  # pictures a class
METHODS = ("frozen", "layer-transport-ungated", "layer-transport")


def read(pictures: Pictures, rows: NDArray[Any]) -> NDArray[np.uint8]:  # (n, 224, 224, 3)
    """Resized and cropped as the network wants them, in bytes that can be corrupted."""
    return np.stack([RAW_224.fitted(pictures.read(int(row))) for row in rows])


def batches(images: NDArray[np.uint8], labels: NDArray[Any]) -> Iterator[tuple[Any, Any]]:
    for i in range(0, len(images), BATCH):
        part = images[i : i + BATCH]
        yield part.transpose(0, 3, 1, 2).astype(np.float32), labels[i : i + BATCH]


def streamed(model: Any, source: Source, images: Any, labels: Any) -> list[str]:
    cells = []
    for name in METHODS:
        method, right, answers = create(name, model, source), 0, []
        for batch, truth in batches(images, labels):
            answers.append(method.predict(batch))
            right += int((to_numpy(answers[-1].logits).argmax(axis=1) == truth).sum())
        cells.append(f"{100 * right / len(labels):.1f}")
    ratios = [answer.ratio for answer in answers if answer.ratio is not None]
    accepted = np.mean([answer.accepted for answer in answers])
    return [*cells, f"{accepted:.0%}", f"{np.median(ratios):.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network")
    parser.add_argument("conditions", nargs="+", help="NAME:SEVERITY, or clean")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    root = Path(os.environ["CASTER_DATA"])
    model = wrap(load(given.network, root / "models"), device=given.device)
    pictures = open_pictures(root / "imagenet-val5k", labelled=True)
    rows = np.arange(len(pictures))
    known, met = rows[rows % EACH < EACH - 1], rows[rows % EACH == EACH - 1]
    parts = (known[i : i + BATCH] for i in range(0, len(known), BATCH))
    chunks = (next(batches(read(pictures, part), part // EACH)) for part in parts)
    source = Source(state=Adapter.fit(model, chunks, layers=True).state)
    images, labels = read(pictures, met), met // EACH
    shuffled = np.random.default_rng(0).permutation(len(met))
    print("| condition | order | frozen | ungated | gated | accepted | median ratio |")
    print("|---|---|--:|--:|--:|--:|--:|", flush=True)
    for condition in given.conditions:
        name, _, severity = condition.partition(":")
        changed = images if name == "clean" else corrupt(images, name, int(severity))
        for order, place in (("shuffled", shuffled), ("sorted", np.arange(len(met)))):
            cells = streamed(model, source, changed[place], labels[place])
            print(f"| {condition} | {order} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
