"""The cost of `caster predict` on a CPU beyond the model: EfficientNet-Lite0, batches of 64.

    python benchmarks/onnx_predict.py

Images per second of `caster predict --model` from decoded images to the table of adapted answers,
against bare `session.run` of the same file on the same images, preprocessed beforehand. For 10 and
1,000 classes; alternating, one round per line. Weights and images are random, which does not change
the work. Needs the extras `onnx` and `timm`, and torch to export the model.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from caster import Adapter, Caster, wrap
from caster.adapt.fitting import bound_state
from caster.adapt.prediction import predict_images
from caster.io.images import open_images
from caster.models.preprocessing import Preprocessing
from measure import PAUSE, complete_torchvision, limit_sessions, machine

BATCH, BATCHES, ROUNDS = 64, 16, 3
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


def main() -> None:
    limit_sessions()
    print(f"{machine()}, ONNX Runtime {onnxruntime.__version__}")
    for n_classes in (10, 1000):
        with tempfile.TemporaryDirectory() as folder:
            measure(n_classes, Path(folder))


if __name__ == "__main__":
    complete_torchvision()
    main()
