"""Published ImageNet weights as checkpoints for sweeps.

    python benchmarks/real/published.py WEIGHTS TEST OUT

WEIGHTS holds `resnet50` and `efficientnet_lite0`, as .pt or .safetensors: state dicts of networks
that take RGB from 0 to 255 and normalise inside. TEST has one folder per class, named by WordNet
identifier; the checkpoints, OUT/ARCHITECTURE.safetensors, record their accuracy on it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from caster.core.arrays import to_numpy
from caster.io.files import file_digest
from caster.io.images import open_images
from caster.io.labels import as_labels, encode
from caster_bench.data.sets.published import class_names
from caster_bench.engine.networks import build
from caster_bench.engine.record import software
from caster_bench.engine.train.checkpoint import Metadata, model_of, save

sys.path.append(str(Path(__file__).parents[1]))

from measure import complete_torchvision

SIDE, AT_ONCE = 224, 50
SEEN = 1_281_167  # images of ImageNet's training set
Weights = dict[str, Tensor]


def keras(weights: Weights) -> Weights:
    """ResNet-50 for RGB and without biases in its convolutions.

    A bias before a BatchNorm is subtracted from its running mean instead.
    """
    turned = {}
    for name, value in weights.items():
        layer, _, kind = name.rpartition(".")
        if kind == "bias" and f"{layer}.running_mean" not in weights and layer != "fc":
            continue
        if kind == "running_mean":
            value = value - weights[f"{convolution_before(layer)}.bias"]
        turned[name] = value
    turned["conv1.weight"] = turned["conv1.weight"].flip(1)  # the weights are for BGR
    return turned


def convolution_before(norm: str) -> str:
    """The layer whose output a BatchNorm takes."""
    if norm.endswith("downsample.1"):
        return f"{norm[:-1]}0"
    return norm.replace("bn", "conv")


@dataclass(frozen=True)
class Published:
    """Published weights: their file and how to convert them."""

    file: str
    mean: tuple[float, float, float]  # of RGB from 0 to 255
    std: float
    turn: Callable[[Weights], Weights]


NETWORKS = {
    "keras_resnet50": Published("resnet50", (123.68, 116.779, 103.939), 1.0, keras),
    "efficientnet_lite0": Published("efficientnet_lite0", (127.0,) * 3, 128.0, lambda held: held),
}


def read(path: Path) -> Weights:
    """A state dict without the pixel normalization."""
    if path.suffix == ".pt":
        held = torch.load(path, map_location="cpu", weights_only=True)
    else:
        held = load_file(path)
    return {k.removeprefix("net."): v for k, v in held.items() if k.startswith("net.")}


def convert(architecture: str, weights: Path, test: Path, out: Path) -> None:
    """Write one checkpoint and measure it."""
    known = NETWORKS[architecture]
    found = [
        path for s in (".pt", ".safetensors") if (path := weights / f"{known.file}{s}").exists()
    ]
    if not found:
        sys.exit(f"{weights} has neither {known.file}.pt nor {known.file}.safetensors")
    classes = as_labels(class_names("imagenet"))
    net = build(architecture, len(classes), SIDE)
    net.load_state_dict(known.turn(read(found[0])))
    images = open_images(test, labelled=True)
    metadata = Metadata(
        architecture=architecture,
        classes=classes,
        size=SIDE,
        mean=tuple(value / 255 for value in known.mean),
        std=(known.std / 255,) * 3,
        recipe=None,
        data={"name": f"ImageNet, by {found[0].name}", "sha256": file_digest(found[0]), "n": SEEN},
        test={"name": test.name, "sha256": images.sha256, "n": len(images)},
        seed=0,
        accuracy=math.nan,
        software=software(),
    )
    path = out / f"{architecture}.safetensors"
    save(net, metadata, path)
    right = accuracy(path, test)
    save(net, replace(metadata, accuracy=right), path)
    print(f"{path}: accuracy {right:.2%} on {len(images):,} images in {test}", flush=True)


def accuracy(path: Path, test: Path) -> float:
    """Accuracy of the checkpoint with its own preprocessing."""
    model = model_of(path)
    images, how = open_images(test, labelled=True), model.preprocessing
    codes = encode(images.labels, as_labels(class_names("imagenet")))
    right = 0
    for start in range(0, len(images), AT_ONCE):
        rows = range(start, min(start + AT_ONCE, len(images)))
        batch = how.batch([how.resize_and_crop(images.read(i)) for i in rows])
        right += int(np.sum(to_numpy(model(batch).logits).argmax(1) == codes[rows]))
    return right / len(images)


def main(weights: Path, test: Path, out: Path) -> None:
    complete_torchvision()
    out.mkdir(parents=True, exist_ok=True)
    for architecture in NETWORKS:
        convert(architecture, weights, test, out)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))
