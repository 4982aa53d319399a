"""The cost of transport inside a compiled model: images/s against the bare model's.

    python benchmarks/compiled_features.py efficientnet_lite0.onnx

Both sessions run the same random images on two threads, in turns; a line per round, then the
median share of the bare model's images/s. The source statistics are of random classes, as many as
the model has logits: values do not change the work. Needs the extra `onnx`, and spox.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import onnxruntime

from caster import Caster
from caster.adapt.fitting import bound_state
from caster.export.features import compile_features
from caster.models.onnx import OnnxModel
from measure import PAUSE, machine

THREADS = 2


def session(model: bytes | str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def fitted(n_classes: int, width: int) -> Caster:
    """Source statistics of well-separated classes."""
    rng = np.random.default_rng(0)
    y = np.arange(max(4 * width, 20 * n_classes)) % n_classes
    means = rng.standard_normal((n_classes, width), dtype=np.float32)
    return Caster().fit(rng.standard_normal((len(y), width), dtype=np.float32) + means[y], y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="an ONNX file that takes (n, 3, size, size)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    model = OnnxModel(args.model)
    shape = (args.batch, 3, args.size, args.size)
    images = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    outputs = model(images[:2])
    d, C = outputs.features.shape[1], outputs.logits.shape[1]
    state = bound_state(fitted(C, d), model, tuple(range(C)))
    compiled = compile_features(model.exposed(), state)
    sessions = {"bare": session(str(args.model)), "compiled": session(compiled.SerializeToString())}
    (name,) = (each.name for each in sessions["bare"].get_inputs())
    print(f"{machine()}, ONNX Runtime {onnxruntime.__version__}")
    print(f"C = {C:,}, d = {d:,}, batches of {args.batch}, {THREADS} threads: images/s")
    for each in sessions.values():
        each.run(None, {name: images})
    shares = []
    for _ in range(args.rounds):
        rate = {}
        for which, each in sessions.items():
            time.sleep(PAUSE)
            start = time.perf_counter()
            each.run(None, {name: images})
            rate[which] = args.batch / (time.perf_counter() - start)
        shares.append(rate["compiled"] / rate["bare"])
        print(f"  bare {rate['bare']:6.1f}   compiled {rate['compiled']:6.1f}   {shares[-1]:.1%}")
    print(
        f"  the compiled model keeps {statistics.median(shares):.1%} (median), "
        f"{min(shares):.1%} to {max(shares):.1%}"
    )


if __name__ == "__main__":
    main()
