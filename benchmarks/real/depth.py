"""How deep to align, and what the certificate of layer transport sees at each depth.

    python benchmarks/real/depth.py CHECKPOINT DATA CONDITION ...

CHECKPOINT is a file of `caster bench train`, DATA a set such as cifar10 (below $CASTER_DATA), a
CONDITION `clean` or a corruption and its severity, as fog:5. Streams are five batches of 64
images: shuffled; sorted by class; of half of the classes, others in every batch; of shares drawn
from a Dirichlet distribution (0.5) for every batch. A row has the accuracy of the frozen model, and
for every depth that of layer transport, of the same behind its certificate, and the mean ratio. A
network with BatchNorms has another column, of half of the depth by their own moments.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from caster import Adapter
from caster.adapt.source import Source
from caster.core.arrays import to_numpy
from caster.models.sites import batchnorm_sites
from caster.models.torch import TorchModel
from caster_bench.data.corruptions import corrupt
from caster_bench.data.digits import open_data
from caster_bench.engine.shared_images import classes_of
from caster_bench.engine.train.checkpoint import model_of
from caster_bench.methods.registry import create

DEPTHS = (0.5, 1.0)
FIT, IMAGES, BATCH, BATCHES = 2000, 640, 64, 5
TAU = 1.0

Codes = NDArray[np.int64]


def chosen(data: str, n: int, seed: int) -> tuple[NDArray[np.uint8], Codes]:
    """As many images of every class, in a fixed order."""
    images = open_data(data)
    codes, n_classes = classes_of(images)
    order = np.random.default_rng(seed).permutation(len(codes))
    place = np.concatenate(
        [order[codes[order] == c][: -(-n // n_classes)] for c in range(n_classes)]
    )
    rows = np.random.default_rng(seed).permutation(place)[:n]
    return np.stack([np.asarray(images.read(int(row))) for row in rows]), codes[rows]


def streams(codes: Codes) -> Iterator[tuple[str, list[Codes]]]:
    """The rows of every batch."""
    rng = np.random.default_rng(0)
    classes = np.unique(codes)
    shuffled, ordered = rng.permutation(len(codes)), np.argsort(codes, kind="stable")
    yield "shuffled", np.split(shuffled[: BATCH * BATCHES], BATCHES)
    gap = len(codes) // BATCHES
    yield "by class", [ordered[n * gap : n * gap + BATCH] for n in range(BATCHES)]
    halves = [rng.choice(classes, len(classes) // 2, replace=False) for _ in range(BATCHES)]
    pools = [np.flatnonzero(np.isin(codes, half)) for half in halves]
    yield "half of the classes", [rng.choice(pool, BATCH, replace=False) for pool in pools]
    shares = [rng.dirichlet(np.full(len(classes), 0.5))[codes] for _ in range(BATCHES)]
    yield "Dirichlet 0.5", [rng.choice(len(codes), BATCH, p=p / p.sum()) for p in shares]


def main(checkpoint: Path, data: str, conditions: list[str]) -> None:
    model = model_of(checkpoint)
    assert isinstance(model, TorchModel)
    assert model.preprocessing is not None
    prepare = model.preprocessing.batch
    pixels, codes = chosen(f"{data}:train", FIT, seed=1)
    fit = [(prepare(pixels[n : n + 250]), codes[n : n + 250]) for n in range(0, FIT, 250)]
    source = Source(state=Adapter.fit(model, fit, layers=True).state)
    methods = {
        depth: create("layer-transport", model, source, depth=depth, gated=False, every=1)
        for depth in DEPTHS
    }
    pixels, codes = chosen(f"{data}:test", IMAGES, seed=0)
    print(f"{checkpoint.name}, fitted to {FIT} images; sites: ", end="")
    print(", ".join(f"{len(method.sites)} at {depth:g}" for depth, method in methods.items()))
    own = (
        create("layer-transport-ungated", model, Source())
        if batchnorm_sites(model.module)
        else None
    )
    more = 0 if own is None else 1
    titles = "".join(f" {depth:g} | gated | ratio |" for depth in DEPTHS) + " own moments |" * more
    print(f"| condition | stream | frozen |{titles}")
    print("|---|---|--:|" + "--:|--:|--:|" * len(DEPTHS) + "--:|" * more, flush=True)
    for condition in conditions:
        name, _, severity = condition.partition(":")
        met = pixels if name == "clean" else corrupt(pixels, name, int(severity), seed=0)
        for kind, batches in streams(codes):
            given = [(prepare(met[rows]), codes[rows]) for rows in batches]
            columns = [condition, kind, *row(given, methods)]
            if own is not None:
                own.reset()
                columns.append(mean([right(own.predict(x).logits, y) for x, y in given]))
            print(f"| {' | '.join(columns)} |", flush=True)


def row(batches: list, methods: dict) -> list[str]:
    """Of one line: every depth on the same batches."""
    frozen = create("frozen", next(iter(methods.values())).model, Source())
    before = [right(frozen.predict(images).logits, codes) for images, codes in batches]
    columns = [mean(before)]
    for method in methods.values():
        method.reset()
        said = [(method.predict(images), codes) for images, codes in batches]
        after = [right(found.logits, codes) for found, codes in said]
        ratios = [found.ratio for found, _ in said]
        gated = [a if r <= TAU else b for a, b, r in zip(after, before, ratios, strict=True)]
        columns += [mean(after), mean(gated), f"{np.mean(ratios):.3f}"]
    return columns


def mean(shares: list[float]) -> str:
    return f"{100 * np.mean(shares):.1f}"


def right(logits: object, codes: Codes) -> float:
    return float((to_numpy(logits).argmax(axis=1) == codes).mean())


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
