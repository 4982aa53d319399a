"""Layer transport fitted to few images per class: points won and lost, shuffled and sorted.

    python benchmarks/small_source_layers.py MODEL SOURCE.npz TARGET.npz --preprocessing P.toml

MODEL is anything that `caster --model` takes, or a checkpoint of `caster bench train`; the .npz
files hold `images` (uint8) and `labels`, and published data can be named instead (cifar10:train).
SOURCE should be images that the network was not trained on; 5 to 200 images per class are drawn
from it. TARGET is met clean and under the four spare corruptions, in batches of 64, shuffled and
sorted by class. Columns: accuracy of the frozen model, and the points that the default changes
(`caster.fit`, `Adapter(mechanism="auto")`), gated and ungated. The last lines are the worst and the
mean of all.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import caster
from caster.core.arrays import to_numpy
from caster.models.protocol import FrozenModel
from caster_bench.data.corruptions import corrupt
from caster_bench.engine.train.checkpoint import model_of
from caster_bench.engine.train.images import read as read_published
from measure import complete_torchvision, machine

SIZES = (5, 20, 50, 200)
CONDITIONS = [None] + [
    (name, severity)
    for name in ("speckle_noise", "gaussian_blur", "spatter", "saturate")
    for severity in (3, 5)
]
BATCH = 64
WRAP = ("preprocessing", "checkpoint", "device")  # options of `caster.wrap`


def read(source: str, limit: int | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
    if source.endswith(".npz"):
        with np.load(source) as file:
            images, labels = file["images"], file["labels"]
    else:
        published = read_published(source)
        images, labels = published.pixels, published.labels
    rows = np.random.default_rng(0).permutation(len(labels))[:limit]
    return images[rows], labels[rows]


def drawn(labels: NDArray[Any], each: int) -> NDArray[Any]:
    order = np.random.default_rng(each).permutation(len(labels))
    rows = [order[labels[order] == c][:each] for c in np.unique(labels)]
    return np.random.default_rng(each).permutation(np.concatenate(rows))


def batches(model: FrozenModel, images: NDArray[Any], rows: NDArray[Any]) -> list[NDArray[Any]]:
    assert model.preprocessing is not None
    parts = np.array_split(rows, max(1, len(rows) // BATCH))
    return [model.preprocessing.batch(list(images[part])) for part in parts]


def options(about: str, limit: int, sizes: Sequence[int] | None = None) -> argparse.Namespace:
    """Parse MODEL SOURCE TARGET and their options; --fit and --sizes only with default sizes."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    for name in ("model", "source", "target"):
        parser.add_argument(name)
    for name in WRAP:
        parser.add_argument(f"--{name}")
    parser.add_argument("--limit", type=int, default=limit, help="images of the target")
    if sizes is not None:
        parser.add_argument("--fit", type=int, help="images of the source [all]")
        parser.add_argument("--sizes", type=int, nargs="+", default=sizes, help="of a batch")
    return parser.parse_args()


def wrapped(given: argparse.Namespace) -> FrozenModel:
    """Wrap the model that was named."""
    if given.model.endswith(".safetensors"):
        complete_torchvision()
        return model_of(given.model, device=given.device)
    named = {name: getattr(given, name) for name in WRAP}
    return caster.wrap(given.model, **{name: value for name, value in named.items() if value})


def labelled_batches(
    model: FrozenModel, images: NDArray[Any], labels: NDArray[Any], rows: NDArray[Any]
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """These rows in their order, as `caster.fit` takes them."""
    parts = np.array_split(labels[rows], max(1, len(rows) // BATCH))
    return list(zip(batches(model, images, rows), parts, strict=True))


def gains(
    adapter: caster.Adapter, images: NDArray[Any], labels: NDArray[Any], ordered: bool
) -> tuple[float, float, float, float]:
    """Frozen accuracy in percent, points won gated and ungated, and the share accepted."""
    rows = np.arange(len(labels))
    rows = rows[np.argsort(labels, kind="stable")] if ordered else rows
    right, accepted, seen = np.zeros(3), 0, 0
    found = list(adapter.stream(batches(adapter.model, images, rows)))
    for out in found:
        truth = labels[rows[seen : seen + len(out.labels)]]
        frozen = adapter.classes[to_numpy(out.frozen).argmax(axis=1)]
        answers = (frozen, to_numpy(out.labels), to_numpy(out.proposed))
        right += [np.sum(answer == truth) for answer in answers]
        accepted += out.verdict.accepted
        seen += len(truth)
    frozen, gated, ungated = 100 * right / seen
    return frozen, gated - frozen, ungated - frozen, accepted / len(found)


def main() -> None:
    given = options(__doc__, limit=2048)
    print(machine())
    model = wrapped(given)
    source, labels = read(given.source)
    target, truth = read(given.target, given.limit)
    shifted = {
        "clean" if c is None else f"{c[0]} {c[1]}": target
        if c is None
        else np.stack(list(corrupt(target, *c, seed=0)))
        for c in CONDITIONS
    }
    widths = (10, 20, 10, 9, 9, 9, 9)
    heading = ("per class", "target", "stream", "frozen", "default", "ungated", "accepted")
    print("".join(f"{name:>{width}}" for name, width in zip(heading, widths, strict=True)))
    found = []
    for each in SIZES:
        rows = drawn(labels, each)
        state = caster.fit(model, labelled_batches(model, source, labels, rows)).state
        adapter = caster.Adapter(model, state, every=1)
        for name, images in shifted.items():
            for stream in ("shuffled", "sorted"):
                frozen, gated, ungated, share = gains(adapter, images, truth, stream == "sorted")
                found.append((gated, ungated))
                cells = (each, name, stream, f"{frozen:.1f}", f"{gated:+.1f}", f"{ungated:+.1f}")
                cells += (f"{share:.0%}",)
                print("".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)), flush=True)
    for name, values in (("worst", np.min(found, axis=0)), ("mean", np.mean(found, axis=0))):
        print(f"{name:>49}" + "".join(f"{points:>+9.1f}" for points in values))


if __name__ == "__main__":
    main()
