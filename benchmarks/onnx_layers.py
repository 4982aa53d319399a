"""What layers add to ONNX Runtime on a long stream: images/s against the bare session.

    python benchmarks/onnx_layers.py MODEL.onnx IMAGES.npz

IMAGES.npz holds `images` (uint8, of the model's size) and `labels`; the graph normalises them
itself. Two images of every class are fitted, the others come shuffled, as often as it takes. The
stream is brought to a rest first; then the bare session, batches in a rest, and the compared window
between two rests with the session folded after it are timed in turns. `long stream` weighs rests
and windows as a stream has them that has been stable for long. Needs the extra `onnx`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import numpy as np
import onnxruntime

import caster
from measure import PAUSE, machine


def seconds(run: Callable[[], object]) -> float:
    time.sleep(PAUSE)
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with np.load(args.images) as file:
        images, labels = file["images"], file["labels"]
    order = np.random.default_rng(0).permutation(len(labels))
    rank = np.zeros(len(labels), int)  # of an image among those of its class
    for c in np.unique(labels):
        rank[order[labels[order] == c]] = np.arange(np.sum(labels == c))
    source, target = order[rank[order] < 2], order[rank[order] >= 2]

    def batch_of(rows: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(images[rows].transpose(0, 3, 1, 2), np.float32)

    size = args.batch
    model = caster.wrap(args.model)
    parts = [source[i : i + size] for i in range(0, len(source), size)]
    start = time.perf_counter()
    adapter = caster.fit(model, [(batch_of(part), labels[part]) for part in parts])
    fitting = time.perf_counter() - start
    bare = onnxruntime.InferenceSession(str(args.model), providers=["CPUExecutionProvider"])
    start = time.perf_counter()
    for part in parts:
        bare.run(None, {model.input_name: batch_of(part)})
    plain = time.perf_counter() - start
    print(f"{machine()}, ONNX Runtime {onnxruntime.__version__}")
    print(f"{args.model.name}, C = {len(adapter.classes):,}, batches of {size}")
    print(f"fit: {fitting / plain:.2f} times a plain pass over the same images", flush=True)
    stream = adapter.new_stream()
    rows = [target[i : i + size] for i in range(0, len(target) - size + 1, size)]
    turns = cycle([batch_of(part) for part in rows])
    layers = stream._layers
    assert layers is not None
    while layers._rest is None:
        out = stream(next(turns))
    print(f"resting after {stream.samples:,} images; {out.verdict}", flush=True)
    window, every = layers.settings.window // size, layers.settings.every

    def compared() -> None:
        layers._schedule._to_skip, layers._schedule._stable = 0, 10**9
        for _ in range(window + 1):  # the last one folds, and rests again
            stream(next(turns))

    times: dict[str, list[float]] = {"bare": [], "rest": [], "window": []}
    for _ in range(args.rounds):
        batch = next(turns)
        feeds = {model.input_name: batch}
        times["bare"].append(seconds(lambda feeds=feeds: bare.run(None, feeds)))
        times["rest"].append(seconds(lambda batch=batch: stream(batch)))
    for _ in range(2):
        times["window"].append(seconds(compared))
    middle = {name: statistics.median(taken) for name, taken in times.items()}
    shares = [a / b for a, b in zip(times["bare"], times["rest"], strict=True)]
    batches = every * window
    long = (middle["window"] + (batches - window - 1) * middle["rest"]) / batches
    print(f"bare: {size / middle['bare']:.1f} images/s")
    spread = f"{min(shares):.1%} to {max(shares):.1%}"
    print(f"rest: {statistics.median(shares):.1%} of bare ({spread})")
    print(f"compared window and fold: {middle['window'] / middle['bare']:.1f} bare batches")
    print(f"long stream: {statistics.median(shares) * middle['rest'] / long:.1%} of bare")


if __name__ == "__main__":
    main()
