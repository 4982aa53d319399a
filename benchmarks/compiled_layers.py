"""The cost of adaptation by layers inside a compiled model: images/s against the bare model's.

    python benchmarks/compiled_layers.py resnet50.onnx
    python benchmarks/compiled_layers.py resnet50.onnx --state resnet50.caster --batch 64

Contenders: the bare session of the file; the host path, `Adapter` on the same file; and the file of
`caster compile`. The last two compare every batch with the frozen model or, with `every=8`, one
window in eight once the verdict has been stable. All run the same batches of a shuffled stream in
turns, after enough batches for full maps and skipped comparisons; a line per round, then the share
of the bare images/s in a settled stream: 1/8 of its batches as the compared ones, 7/8 as the
others. Images are random, and so is a state that is not given. Needs the extra `onnx`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

import caster
from caster.export import compile_model
from caster.models.onnx import OnnxModel
from caster.state import State, load
from measure import PAUSE, machine

EVERY = 8
BARE = ("bare", 1)
PER_CLASS = 2  # random images per class of a state that is not given
Run = Callable[[NDArray[np.float32]], str]  # a batch -> the reason of its verdict


def random_images(count: int, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, *shape), dtype=np.float32)


def fitted(model: OnnxModel, shape: tuple[int, ...], classes: int) -> State:
    """The state of random images, labelled as many times with every class."""
    batches = []
    for first in range(0, classes * PER_CLASS, 50):
        labels = np.arange(first, min(first + 50, classes * PER_CLASS)) % classes
        batches.append((random_images(len(labels), shape, first), labels))
    return caster.fit(model, batches, layers=True).state


def contenders(model: OnnxModel, state: State, folder: Path) -> dict[tuple[str, int], Run]:
    """Functions of a batch, by name and `every`; streams remember."""
    bare = onnxruntime.InferenceSession(model.name, providers=["CPUExecutionProvider"])

    def run_bare(batch: NDArray[np.float32]) -> str:
        bare.run(None, {model.input_name: batch})
        return "frozen"

    found: dict[tuple[str, int], Run] = {BARE: run_bare}
    for every in (1, EVERY):
        path = folder / f"every_{every}.onnx"
        compile_model(model, state, path, mechanism="layers", every=every)
        host = caster.Adapter(model, state, mechanism="layers", every=every).new_stream()
        compiled = caster.wrap(path).new_stream()
        found["host", every] = lambda batch, stream=host: stream(batch).verdict.reason
        found["compiled", every] = lambda batch, stream=compiled: stream(batch).verdict.reason
    return found


def settled(times: list[float], reasons: list[str], every: int) -> float:
    """Median seconds of a batch in a settled stream; NaN if it did not settle."""
    resting = [taken for taken, reason in zip(times, reasons, strict=True) if reason == "rest"]
    compared = [taken for taken, reason in zip(times, reasons, strict=True) if reason != "rest"]
    if every == 1:
        return statistics.median(compared)
    if not resting or not compared:
        return math.nan
    return statistics.median(compared) / every + statistics.median(resting) * (1 - 1 / every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="an ONNX file that takes (n, 3, size, size)")
    parser.add_argument("--state", type=Path, help="its state; by default one of random images")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--settle", type=int, default=16, help="batches before the first round")
    args = parser.parse_args()
    model = caster.wrap(args.model)
    shape = (3, args.size, args.size)
    logits = model(random_images(1, shape, 0)).logits
    state = load(args.state) if args.state else fitted(model, shape, logits.shape[1])
    print(f"{machine()}, ONNX Runtime {onnxruntime.__version__}")
    print(f"C = {len(state.classes):,}, {len(state.layers):,} sites, batches of {args.batch}")
    with tempfile.TemporaryDirectory() as folder:
        runs = contenders(model, state, Path(folder))
        times: dict[tuple[str, int], list[float]] = {name: [] for name in runs}
        reasons: dict[tuple[str, int], list[str]] = {name: [] for name in runs}
        for seed in range(args.settle + args.rounds):
            batch = random_images(args.batch, shape, seed)
            for name, run in runs.items():
                time.sleep(PAUSE)
                start = time.perf_counter()
                reason = run(batch)
                if seed >= args.settle:
                    times[name].append(time.perf_counter() - start)
                    reasons[name].append(reason)
            if seed >= args.settle:
                rates = (f"{args.batch / times[name][-1]:.1f} {reasons[name][-1]}" for name in runs)
                print("  " + "   ".join(rates))
    for name, taken in times.items():
        rate = args.batch / settled(taken, reasons[name], name[1])
        share = settled(times[BARE], reasons[BARE], 1) * rate / args.batch
        counts = dict(Counter(reasons[name]))
        print(f"  {name[0]}, every={name[1]}: {rate:.1f} images/s, {share:.1%} of bare; {counts}")


if __name__ == "__main__":
    main()
