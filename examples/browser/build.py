"""Build the page: train a small network on digits, fit, compile, and write everything it needs.

    npm install onnxruntime-web
    python examples/browser/build.py build/browser
    python -m http.server --directory build/browser

Nothing is downloaded: the digits come with scikit-learn.
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
import warnings
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import caster
from caster.adapt.layer_transport import LayerSettings
from caster.core.verdict import REASONS, Reason
from caster.export import compile_model
from caster.models.onnx import OnnxModel
from caster.report.digits_demo import WHITE, Digits, split_digits
from caster.report.mechanism import LAYER_REASONS

HERE = Path(__file__).parent
PAGE = (HERE / "index.html", HERE / "page.mjs", HERE.parent / "javascript" / "stream.mjs")
RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
MODEL, STATE, ADAPTIVE = "digits.onnx", "digits.caster", "adaptive.onnx"
EPOCHS, BATCH_SIZE = 15, 50
NOISE = 0.15  # largest standard deviation in training: no network is trained on clean images alone


def main() -> None:
    """Read the arguments and build."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path, help="folder to write the page to")
    parser.add_argument(
        "--runtime",
        type=Path,
        default=Path("node_modules/onnxruntime-web/dist"),
        help="folder of onnxruntime-web's modules",
    )
    given = parser.parse_args()
    missing = [name for name in RUNTIME if not (given.runtime / name).is_file()]
    if missing:
        parser.error(f"{given.runtime} has no {missing[0]}: npm install onnxruntime-web")
    build(given.output, given.runtime)


def build(output: Path, runtime: Path) -> None:
    """Write page, models, digits and onnxruntime-web into a folder."""
    (output / "ort").mkdir(parents=True, exist_ok=True)
    digits = split_digits()
    write_models(digits, output)
    (output / "digits.json").write_text(json.dumps(contents(digits)))
    for path in PAGE:
        shutil.copy(path, output)
    for name in RUNTIME:
        shutil.copy(runtime / name, output / "ort")


def write_models(digits: Digits, output: Path) -> None:
    """Train, export, fit on the same images, and compile."""
    images = (digits.source / WHITE).astype(np.float32)[:, None]
    net = train(torch.from_numpy(images), torch.from_numpy(digits.source_labels))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # raised inside the exporter
        torch.onnx.export(
            net,
            (torch.zeros(2, 1, 8, 8),),
            output / MODEL,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("rows")},),
            opset_version=18,
            external_data=False,
            verbose=False,
        )
    rows = range(0, len(images), BATCH_SIZE)
    batches = [(images[i : i + BATCH_SIZE], digits.source_labels[i : i + BATCH_SIZE]) for i in rows]
    model = OnnxModel(output / MODEL)
    adapter = caster.fit(model, batches)
    adapter.save(output / STATE)
    compile_model(model, adapter.state, output / ADAPTIVE)


def train(images: Tensor, labels: Tensor) -> nn.Module:  # (n, 1, 8, 8), (n,)
    """Train four convolutions with BatchNorm, in a few seconds."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
                    nn.BatchNorm2d(outer),
                    nn.ReLU(),
                )
                for inner, outer, stride in ((1, 16, 1), (16, 32, 1), (32, 32, 2), (32, 64, 1))
            ),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )
        optimizer = torch.optim.AdamW(net.parameters())
        steps = EPOCHS * -(-len(images) // BATCH_SIZE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, steps)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(images)).split(BATCH_SIZE):
                noise = NOISE * torch.rand(len(rows), 1, 1, 1) * torch.randn(images[rows].shape)
                loss = nn.functional.cross_entropy(net(images[rows] + noise), labels[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return net.eval().requires_grad_(False)


def contents(digits: Digits) -> dict[str, object]:
    """The digits that the page streams, none of them trained on, and its words for reasons."""
    words = {**REASONS, **LAYER_REASONS}
    pixels: NDArray[np.uint8] = digits.target.astype(np.uint8)
    return {
        "images": base64.b64encode(pixels.tobytes()).decode(),
        "white": int(WHITE),
        "labels": digits.target_labels.tolist(),
        "tau": LayerSettings().tau,
        "reasons": [words.get(reason, reason) for reason in get_args(Reason)],
    }


if __name__ == "__main__":
    main()
