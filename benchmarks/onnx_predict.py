"""The cost of `caster predict` on a CPU beyond the model, in batches of 64.

    python benchmarks/onnx_predict.py
    python benchmarks/onnx_predict.py MODEL.onnx IMAGES.npz MODEL.caster

Images per second of `caster predict --model` from decoded images to the table of adapted answers,
against bare `session.run` of the same file on the same images, preprocessed beforehand.

Without arguments by feature transport: EfficientNet-Lite0 with 10 and 1,000 classes,
alternating, one round per line. Weights and images are random, which does not change the work.

With a model, images of its size and a state that `onnx_layers.py --state` wrote, by transport of
layers, until the stream has rested for some batches: with the settings of `onnx_layers.py`, which
bring it to a rest soon. After every batch of a rest the bare session runs on as many images. Needs
the extras `onnx` and `timm`, and torch to export the model.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from caster import Adaptation, Adapter, Caster, wrap
from caster.adapt.fitting import bound_state
from caster.adapt.layer_transport import LayerTransport
from caster.adapt.prediction import predict_images
from caster.io.images import open_images
from caster.models.heads import Columns
from caster.models.preprocessing import Preprocessing
from measure import PAUSE, complete_torchvision, limit_sessions, machine
from onnx_layers import SETTINGS

BATCH, BATCHES, ROUNDS = 64, 16, 3
RESTING = 12  # batches of a rest that are measured
WIDTH = 1280
TIMMS = Preprocessing(range=1.0, mean=(0.5,) * 3, std=(0.5,) * 3, layout="NCHW")


def export(path: Path, n_classes: int) -> None:
    import timm

    net = timm.create_model("tf_efficientnet_lite0", num_classes=n_classes).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from the exporter
        torch.onnx.export(
            net, (torch.zeros(2, 3, 224, 224),), str(path), dynamo=False,
            input_names=["images"], dynamic_axes={"images": {0: "n"}},
        )  # fmt: skip


def fitted(n_classes: int) -> Caster:
    """Source statistics of well-separated classes, with the width of the model's features."""
    rng = np.random.default_rng(0)
    y = np.arange(max(4000, 20 * n_classes)) % n_classes
    means = rng.standard_normal((n_classes, WIDTH)).astype(np.float32)
    return Caster().fit(rng.standard_normal((len(y), WIDTH), dtype=np.float32) + means[y], y)


def bare(path: Path, images: NDArray[np.uint8]) -> Callable[[], object]:
    options = onnxruntime.SessionOptions()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    ready = [TIMMS.batch(images[i : i + BATCH]) for i in range(0, len(images), BATCH)]
    return lambda: [session.run(None, {"images": batch}) for batch in ready]


def adapted(path: Path, source: Path, n_classes: int, out: Path) -> Callable[[], object]:
    model = wrap(path, preprocessing=TIMMS)
    adapter = Adapter(model, bound_state(fitted(n_classes), model, tuple(range(n_classes))))
    images = open_images(source)
    return lambda: predict_images(adapter, images, out, batch_size=BATCH)


def measure(n_classes: int, folder: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(BATCH * BATCHES, 224, 224, 3), dtype=np.uint8)
    np.savez(folder / "images.npz", images=images)
    export(folder / "model.onnx", n_classes)
    contenders: dict[str, Any] = {
        "session.run": bare(folder / "model.onnx", images),
        "predict": adapted(
            folder / "model.onnx", folder / "images.npz", n_classes, folder / "out.csv"
        ),
    }
    for run in contenders.values():
        run()
    print(f"\nC = {n_classes:,}, {len(images)} images: images/s")
    shares = []
    for _ in range(ROUNDS):
        rate = {}
        for name, run in contenders.items():
            time.sleep(PAUSE)
            start = time.perf_counter()
            run()
            rate[name] = len(images) / (time.perf_counter() - start)
        shares.append(rate["predict"] / rate["session.run"])
        print(
            f"  session.run {rate['session.run']:6.1f}   predict {rate['predict']:6.1f}   "
            f"{shares[-1]:.1%}",
            flush=True,
        )
    print(
        f"  predict keeps {statistics.median(shares):.1%} (median), "
        f"{min(shares):.1%} to {max(shares):.1%}"
    )


def measure_layers(path: Path, source: Path, state: Path) -> None:
    """Predict images in random order until the stream has rested for long enough."""
    session = onnxruntime.InferenceSession(
        path, onnxruntime.SessionOptions(), providers=["CPUExecutionProvider"]
    )
    model = wrap(path, preprocessing=Preprocessing.in_graph("NCHW", "float32"))
    adapter = Adapter(model, state, allow_other_preprocessing=True)
    held = adapter.state
    columns = Columns(held.head)
    adapter._layers = LayerTransport(model, held.layers, columns, held.input_range, SETTINGS)
    images = open_images(source)
    ready = np.stack([images.read(row).transpose(2, 0, 1) for row in range(BATCH)])
    feeds = {model.input_name: ready.astype(np.float32)}
    times: dict[str, list[float]] = {"compared": [], "rest": [], "bare": []}
    start = time.perf_counter()

    def observe(out: Adaptation, at: int) -> None:
        nonlocal start
        resting = out.verdict.reason == "rest"
        times["rest" if resting else "compared"].append(time.perf_counter() - start)
        if resting:
            time.sleep(PAUSE)
            start = time.perf_counter()
            session.run(None, feeds)
            times["bare"].append(time.perf_counter() - start)
        if len(times["rest"]) > RESTING:
            raise StopIteration
        time.sleep(PAUSE)
        start = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder, suppress(StopIteration):
        out = Path(folder) / "out.csv"
        predict_images(adapter, images, out, batch_size=BATCH, shuffle=0, observe=observe)
    bare, rests = times["bare"][1:], times["rest"][1:]  # the first of them folds the maps
    shares = [one / other for one, other in zip(bare, rests, strict=True)]
    middle = statistics.median(bare)
    print(
        f"{path.name}, C = {len(adapter.classes):,}: session.run {BATCH / middle:.1f} images/s\n"
        f"  predict in a rest keeps {statistics.median(shares):.1%} (median of {len(shares)}), "
        f"{min(shares):.1%} to {max(shares):.1%}\n"
        f"  before it, {len(times['compared']) * BATCH:,} images: "
        f"{middle / statistics.median(times['compared']):.1%}"
    )


def main() -> None:
    limit_sessions()
    print(f"{machine()}, ONNX Runtime {onnxruntime.__version__}")
    if len(sys.argv) == 4:
        measure_layers(*map(Path, sys.argv[1:]))
        return
    for n_classes in (10, 1000):
        with tempfile.TemporaryDirectory() as folder:
            measure(n_classes, Path(folder))


if __name__ == "__main__":
    complete_torchvision()
    main()
