"""Images in memory that know when they were read, and a model whose answers are plain sums."""

from __future__ import annotations

import threading

import numpy as np

from caster.config import DEFAULT_LIMITS
from caster.io.image_files import UnreadableImage
from caster.models.function import FunctionModel
from caster.models.preprocessing import Preprocessing

AS_THEY_ARE = Preprocessing.in_graph("NHWC", "float32")


class FakeImages:
    """Random pixels; rows in `broken` cannot be decoded."""

    name = "fakes"
    by_class = False
    skipped = ()
    limits = DEFAULT_LIMITS

    def __init__(self, count, broken=(), size=(4, 4), sha256="images-1"):
        rng = np.random.default_rng(count)
        self.pixels = [rng.integers(256, size=(*size, 3), dtype=np.uint8) for _ in range(count)]
        self.names = [f"fake{i}.png" for i in range(count)]
        self.labels = np.arange(count) % 2
        self.classes = np.arange(2)
        self.broken, self.sha256 = set(broken), sha256
        self.reads: list[int] = []
        self.readers: set[str] = set()

    def __len__(self):
        return len(self.names)

    def read(self, index):
        self.reads.append(index)
        self.readers.add(threading.current_thread().name)
        if index in self.broken:
            raise UnreadableImage(f"cannot read {self.names[index]}: it is broken")
        return self.pixels[index]


def answers(images, rows):
    """What the model below says, by hand: features (n, 3), logits (n, 2)."""
    features = np.array([images.pixels[row].mean(axis=(0, 1)) for row in rows], dtype=np.float32)
    return features, features[:, :2] - features[:, 1:]


def model(function=None, version="model-1", logits=True):
    def colours(batch):
        features = batch.mean(axis=(1, 2), dtype=np.float64).astype(np.float32)
        return (features, features[:, :2] - features[:, 1:]) if logits else features

    return FunctionModel(function or colours, version=version, preprocessing=AS_THEY_ARE)
