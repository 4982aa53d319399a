"""What resting costs in accuracy, and moments from a grid of positions.

    python benchmarks/rest_accuracy.py MODEL SOURCE.npz TARGET.npz --preprocessing P.toml

MODEL is anything that `caster --model` takes; the .npz files hold `images` (uint8) and `labels`.
Conditions are clean images and the four spare corruptions at severity 5. Streams: `one shift`,
shuffled images of one condition; `changing`, the conditions one after the other, several times,
without a reset; `turning`, a shuffled stream that turns sorted; and `sorted`. Variants: `compared`
compares every batch with the frozen model (every=1), `default` may rest, `unwatched` rests without
a look at its outputs, and `all positions` measures every position of every layer, compared.
Columns: accuracy in percent, and the share of batches that were answered without a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

import caster
from caster.adapt.output_monitor import OutputMonitor
from caster.core import channels
from caster.core.arrays import to_numpy
from measure import machine
from mixture_ablation import conditions
from small_source_layers import labelled_batches, options, read, wrapped

LENGTH = 1250  # images of a condition in `changing`, about 20 batches of 64
Images = NDArray[Any]


def streams(
    shifted: list[Images], truth: NDArray[Any]
) -> Iterator[tuple[str, list[tuple[Images, NDArray[Any]]]]]:
    """Names, and streams of that name."""
    rows = np.arange(len(truth))
    yield "one shift", [(images, truth) for images in shifted]
    parts = [rows[i : i + LENGTH] for i in range(0, len(rows) - LENGTH + 1, LENGTH)]
    order = [(shifted[i % len(shifted)], part) for i, part in enumerate(2 * parts)]
    images = np.concatenate([images[part] for images, part in order])
    yield "changing", [(images, np.concatenate([truth[part] for _, part in order]))]
    half = len(rows) // 2
    late = rows[half:][np.argsort(truth[half:], kind="stable")]
    turned = np.concatenate([rows[:half], late])
    yield "turning", [(images[turned], truth[turned]) for images in shifted]
    ordered = np.argsort(truth, kind="stable")
    yield "sorted", [(images[ordered], truth[ordered]) for images in shifted]


def answered(
    adapter: caster.Adapter, images: Images, truth: NDArray[Any], size: int
) -> tuple[float, float]:
    """Accuracy in percent, and the share of batches in a rest."""
    model, right, rested, count = adapter.model, 0, 0, 0
    rows = [np.arange(i, min(i + size, len(truth))) for i in range(0, len(truth), size)]
    prepared = (model.preprocessing.batch(list(images[part])) for part in rows)
    for part, out in zip(rows, adapter.stream(prepared), strict=True):
        right += int(np.sum(to_numpy(out.labels) == truth[part]))
        rested += out.verdict.accepted and out.verdict.reason == "rest"
        count += 1
    return 100 * right / len(truth), 100 * rested / count


def frozen_accuracy(model: Any, images: Images, truth: NDArray[Any], classes: Any) -> float:
    right = 0
    parts = np.array_split(np.arange(len(truth)), len(truth) // 200)
    for part in parts:
        logits = to_numpy(model(model.preprocessing.batch(list(images[part]))).logits)
        right += int(np.sum(classes[logits.argmax(axis=1)] == truth[part]))
    return 100 * right / len(truth)


def always_usual(self: OutputMonitor, *outputs: Any) -> Callable[[], bool]:
    return lambda: True


def main() -> None:
    given = options(__doc__, limit=10_000, sizes=[64, 200])
    print(machine())
    model = wrapped(given)
    source, labels = read(given.source, given.fit)
    labelled = labelled_batches(model, source, labels, np.arange(len(labels)))
    fitted = caster.fit(model, labelled)
    with mock.patch.object(channels, "POSITIONS", 10**9):
        everywhere = caster.fit(model, labelled)
    target, truth = read(given.target, given.limit)
    shifted = list(conditions(target))
    watched, unwatched = OutputMonitor.judge, always_usual
    grid, everything = channels.POSITIONS, 10**9
    variants = {
        "compared": (caster.Adapter(model, fitted.state, every=1), watched, grid),
        "default": (fitted, watched, grid),
        "unwatched": (fitted, unwatched, grid),
        "all positions": (caster.Adapter(model, everywhere.state, every=1), watched, everything),
    }
    clean = [frozen_accuracy(model, images, truth, fitted.classes) for images in shifted]
    print(f"frozen: {np.mean(clean):.2f} on average; {', '.join(f'{x:.1f}' for x in clean)}")
    print(
        f"{'B':>4}{'stream':>12}{'variant':>16}{'accuracy':>10}{'resting':>9}  of each", flush=True
    )
    for name, several in streams(shifted, truth):
        for size in given.sizes:
            for variant, (adapter, judge, positions) in variants.items():
                with (
                    mock.patch.object(OutputMonitor, "judge", judge),
                    mock.patch.object(channels, "POSITIONS", positions),
                ):
                    found = np.array([answered(adapter, *stream, size) for stream in several])
                right, rested = found.mean(axis=0)
                each = ", ".join(f"{x:.1f}" for x in found[:, 0])
                print(
                    f"{size:>4}{name:>12}{variant:>16}{right:>10.2f}{rested:>8.0f}%  {each}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
