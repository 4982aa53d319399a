"""Train the CIFAR-10 classifier that is checked: half a minute on one GPU.

    python benchmarks/real/train_cifar10.py TRAIN TEST OUT.safetensors

TRAIN and TEST are what `caster fit --model` takes: cifar10:train and cifar10:test, or .npz files.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from sources import SOURCES, train

from caster.io.images import open_images
from caster.io.labels import encode
from models import Normalised


def read(source: str) -> tuple[np.ndarray, np.ndarray]:
    image_set = open_images(source, labelled=True)
    images = np.stack([image_set.read(i) for i in range(len(image_set))])
    return images, encode(image_set.labels, image_set.classes)


def main(train_set: str, test_set: str, out: Path) -> None:
    (source,) = [source for source in SOURCES if source.name == "ResNet-18, CIFAR-10"]
    net = Normalised(train(source, *read(train_set), seed=0), [127.5] * 3, 127.5).eval().cpu()
    save_file({name: value.contiguous() for name, value in net.state_dict().items()}, out)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels = read(test_set)
    net = net.to(device)
    with torch.inference_mode():
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float()
        answers = torch.cat([net(part.to(device)).argmax(1).cpu() for part in pixels.split(500)])
    print(f"{out}: {float((answers.numpy() == labels).mean()):.2%} of {test_set} right")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
