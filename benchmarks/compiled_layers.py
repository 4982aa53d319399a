"""The cost of adaptation by layers inside a compiled model: images/s against the bare model's.

    python benchmarks/compiled_layers.py resnet50.onnx
    python benchmarks/compiled_layers.py resnet50.onnx --state resnet50.caster --batch 64

Contenders: the bare session of the file; the host path, `Adapter` on the same file; and the file of
`caster compile`. The last two compare every batch with the frozen model, or with `every=8` one
window in eight. All run the same batches of a shuffled stream in turns, after enough batches for
full maps and for skipped comparisons; a line per round, then median ratios. Images are random,
and so is a state that is not given: values change the work only where a verdict does, so the last
line counts verdicts. Needs the extra `onnx`.
"""

from __future__ import annotations

import argparse
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
from caster.core.adaptation import Adaptation
from caster.export import compile_model
from caster.models.onnx import OnnxModel
from caster.state import State, load
from measure import PAUSE, machine

EVERY = 8
PER_CLASS = 2  # random images per class of a state that is not given
Run = Callable[[NDArray[np.float32]], object]


def random_images(count: int, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, *shape), dtype=np.float32)


def fitted(model: OnnxModel, shape: tuple[int, ...], classes: int) -> State:
    """The state of random images, labelled as many times with every class."""
    batches = []
    for first in range(0, classes * PER_CLASS, 50):
        labels = np.arange(first, min(first + 50, classes * PER_CLASS)) % classes
        batches.append((random_images(len(labels), shape, first), labels))
    return caster.fit(model, batches, layers=True).state


def contenders(
    model: OnnxModel, state: State, folder: Path, verdicts: dict[str, Counter[str]]
) -> dict[str, Run]:
    """Functions of a batch, by name; streams count their verdicts."""
    bare = onnxruntime.InferenceSession(model.name, providers=["CPUExecutionProvider"])
    found: dict[str, Run] = {"bare": lambda batch: bare.run(None, {model.input_name: batch})}
    for every in (1, EVERY):
        path = folder / f"every_{every}.onnx"
        compile_model(model, state, path, mechanism="layers", every=every)
        host = caster.Adapter(model, state, mechanism="layers", every=every)
        compiled = caster.wrap(path)
        for name, maker in (("host", host), ("compiled", compiled)):
            label = f"{name}, every={every}"
            verdicts[label] = Counter()
            found[label] = counted(maker.new_stream(), verdicts[label])
    return found


def counted(stream: Callable[[object], Adaptation], verdicts: Counter[str]) -> Run:
    def run(batch: NDArray[np.float32]) -> None:
        verdicts[stream(batch).verdict.reason] += 1

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="an ONNX file that takes (n, 3, size, size)")
    parser.add_argument("--state", type=Path, help="its state; by default one of random images")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--settle", type=int, default=16, help="batches before the first round")
    args = parser.parse_args()
    model = caster.wrap(args.model)
    shape = (3, args.size, args.size)
    logits = model(random_images(1, shape, 0)).logits
    state = load(args.state) if args.state else fitted(model, shape, logits.shape[1])
    print(f"{machine()}, ONNX Runtime {onnxruntime.__version__}")
    print(f"C = {len(state.classes):,}, {len(state.layers):,} sites, batches of {args.batch}")
    verdicts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = contenders(model, state, Path(folder), verdicts)
        for seed in range(args.settle):
            batch = random_images(args.batch, shape, seed)
            for run in runs.values():
                run(batch)
        for counts in verdicts.values():
            counts.clear()
        times: dict[str, list[float]] = {name: [] for name in runs}
        for seed in range(args.settle, args.settle + args.rounds):
            batch = random_images(args.batch, shape, seed)
            for name, run in runs.items():
                time.sleep(PAUSE)
                start = time.perf_counter()
                run(batch)
                times[name].append(time.perf_counter() - start)
            rates = (f"{name} {args.batch / taken[-1]:.1f}" for name, taken in times.items())
            print("  " + "   ".join(rates))
    for name, taken in times.items():
        if name != "bare":
            shares = [bare / own for bare, own in zip(times["bare"], taken, strict=True)]
            print(
                f"  {name} keeps {statistics.median(shares):.1%} of the bare images/s (median), "
                f"{min(shares):.1%} to {max(shares):.1%}; verdicts: {dict(verdicts[name])}"
            )


if __name__ == "__main__":
    main()
