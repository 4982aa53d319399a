"""What layers add to ONNX Runtime on a long stream: images/s against the bare session.

    python benchmarks/onnx_layers.py MODEL.onnx IMAGES.npz
    python benchmarks/onnx_layers.py MODEL.onnx IMAGES.npz --compiled --state MODEL.caster

IMAGES.npz holds `images` (uint8, of the model's size) and `labels`; the graph normalises them
itself. Two images of every class are fitted, or `--state` is read if it exists and written if not.
The others come shuffled, as often as it takes, to `Adapter` or, with `--compiled`, to the file of
`caster compile`. Every verdict is accepted, as on a long stream that gains. The stream is brought
to a rest first, with a shorter memory than by default; then the bare session, batches in a rest,
and the compared window between two rests with the batch after it, which folds the maps, are timed
in turns. `long stream` weighs rests and windows as a stream has them that has been stable for long.
Shares are by the clock and, in brackets, by processor time, which other work on the machine
disturbs less. Needs the extra `onnx`.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

import caster
from caster.adapt.layer_passes import LayerSettings
from caster.adapt.layer_transport import LayerTransport
from caster.export.compiler import compiled
from caster.models.heads import Columns
from caster.models.onnx import OnnxModel
from caster.state import State
from caster.state import file as states
from measure import PAUSE, limit_sessions, machine

FITTED = 16  # images of a batch that is fitted: larger ones take more memory
STABLE = 10**9  # samples: a rest then lasts as long as it may
SETTINGS = LayerSettings(tau=1e9, memory=512)  # accept every batch; the memory is soon full
Run = Callable[[np.ndarray], Any]


def compiled_stream(model: OnnxModel, state: State) -> tuple[Run, Callable[[], None]]:
    """A stream of a compiled file, and what makes its next batch a compared one."""
    with tempfile.TemporaryDirectory() as folder:
        out, saved = Path(folder) / "adaptive.onnx", Path(folder) / "state.caster"
        states.save(state, saved)
        out.write_bytes(compiled(model, state, SETTINGS)[0].SerializeToString())
        parts = Path(model.name).stat().st_size + saved.stat().st_size
        size = out.stat().st_size
        print(f"file: {size / 2**20:.1f} MB, {size / parts:.3f} times model and state", flush=True)
        start = time.perf_counter()
        stream = caster.wrap(out).new_stream()
        print(f"loaded in {time.perf_counter() - start:.1f} s", flush=True)

    def compare() -> None:
        schedule = np.array([1, STABLE, 0, 0], np.int64)
        stream._state = {**stream._state, "schedule": schedule}

    return stream, compare


def python_stream(model: OnnxModel, state: State) -> tuple[Run, Callable[[], None]]:
    """A stream through aligned sessions, and the same."""
    columns = Columns(state.head)
    stream = LayerTransport(model, state.layers, columns, state.input_range, SETTINGS)

    def compare() -> None:
        stream._schedule._to_skip, stream._schedule._stable = 0, STABLE

    return stream, compare


def seconds(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a run, by the clock and of the processor."""
    time.sleep(PAUSE)
    start = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--compiled", action="store_true", help="the file of `caster compile`")
    parser.add_argument("--state", type=Path, help="of a fit before, or where to write this one's")
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
    limit_sessions()
    bare = onnxruntime.InferenceSession(
        str(args.model), onnxruntime.SessionOptions(), providers=["CPUExecutionProvider"]
    )
    model = caster.wrap(args.model)
    print(f"{machine()}, ONNX Runtime {onnxruntime.__version__}")
    if args.state is not None and args.state.exists():
        state = states.load(args.state)
    else:
        step = FITTED if args.compiled else size
        parts = [source[i : i + step] for i in range(0, len(source), step)]
        start = time.perf_counter()
        state = caster.fit(model, ((batch_of(part), labels[part]) for part in parts)).state
        fitting = time.perf_counter() - start
        if args.state is not None:
            states.save(state, args.state)
        if not args.compiled:
            start = time.perf_counter()
            for part in parts:
                bare.run(None, {model.input_name: batch_of(part)})
            plain = time.perf_counter() - start
            print(f"fit: {fitting / plain:.2f} times a plain pass over the same images")
    print(f"{args.model.name}, C = {len(state.classes):,}, batches of {size}", flush=True)
    stream, compare = (compiled_stream if args.compiled else python_stream)(model, state)
    turns = cycle([target[i : i + size] for i in range(0, len(target) - size + 1, size)])
    seen, reason = 0, ""
    while reason != "rest":
        reason = stream(batch_of(next(turns))).verdict.reason
        seen += size
    print(f"resting after {seen:,} images", flush=True)
    window, every = LayerSettings.window // size, LayerSettings.every

    def compared(batches: list[np.ndarray]) -> None:
        compare()
        reasons = [stream(batch).verdict.reason for batch in batches]
        assert "rest" not in reasons[:-1]
        assert reasons[-1] == "rest"

    times: dict[str, list[tuple[float, float]]] = {"bare": [], "rest": [], "window": []}
    for _ in range(args.rounds):
        batch = batch_of(next(turns))
        feeds = {model.input_name: batch}
        times["bare"].append(seconds(lambda feeds=feeds: bare.run(None, feeds)))
        times["rest"].append(seconds(lambda batch=batch: stream(batch)))
    for _ in range(2):
        batches = [batch_of(next(turns)) for _ in range(window + 1)]  # the last one rests again
        times["window"].append(seconds(lambda batches=batches: compared(batches)))

    def shares(kind: int) -> tuple[float, list[float], float, float]:  # clock or processor
        """Images/s of bare; shares of rests; the window in bare batches; share of long streams."""
        middle = {name: statistics.median(t[kind] for t in taken) for name, taken in times.items()}
        pairs = zip(times["bare"], times["rest"], strict=True)
        rests = [one[kind] / other[kind] for one, other in pairs]
        batches = every * window
        long = (middle["window"] + (batches - window - 1) * middle["rest"]) / batches
        share = statistics.median(rests) * middle["rest"] / long
        return size / middle["bare"], rests, middle["window"] / middle["bare"], share

    (rate, rests, windows, long), (_, own_rests, _, own_long) = shares(0), shares(1)
    print(f"bare: {rate:.1f} images/s")
    spread = f"{min(rests):.1%} to {max(rests):.1%}"
    own = f"{statistics.median(own_rests):.1%}"
    print(f"rest: {statistics.median(rests):.1%} of bare ({spread}; processor {own})")
    print(f"compared window and fold: {windows:.1f} bare batches")
    print(f"long stream: {long:.1%} of bare (processor {own_long:.1%})")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory: {peak:.1f} GB, of which {images.nbytes / 2**30:.1f} GB are the images")


if __name__ == "__main__":
    main()
