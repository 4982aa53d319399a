"""Export a checkpoint of `caster bench train` to ONNX, with a preprocessing file.

    python benchmarks/real/export.py checkpoints/resnet50-cifar10-0.safetensors

writes resnet50-cifar10-0.onnx and resnet50-cifar10-0.toml into the same folder.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import torch

from caster_bench.engine.train.checkpoint import load

sys.path.append(str(Path(__file__).parents[1]))

from measure import complete_torchvision


def main(path: Path) -> None:
    complete_torchvision()
    net, metadata = load(path)
    images = torch.zeros(2, 3, metadata.size, metadata.size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from the exporter
        torch.onnx.export(
            net, (images,), str(path.with_suffix(".onnx")), dynamo=False,
            input_names=["images"], dynamic_axes={"images": {0: "n"}},
        )  # fmt: skip
    stated = {name: v for name, v in asdict(metadata.preprocessing).items() if v is not None}
    lines = [f"{name} = {_toml(value)}\n" for name, value in stated.items()]
    path.with_suffix(".toml").write_text("".join(lines))


def _toml(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else repr(value).replace("'", '"')


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
