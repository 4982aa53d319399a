"""Labelled training images in memory."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.adapt.image_batches import THREADS
from caster.errors import CasterError
from caster.io.labels import Labels, encode, unique_labels
from caster_bench.data import DIGITS, open_data
from caster_bench.data.sets import SETS
from caster_bench.engine.networks import SIZES
from caster_bench.sweeps.spec import known

HELD_OUT = ("test", "val")  # what sets call their held-out split


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Square images of one size, and their class indices."""

    name: str
    pixels: NDArray[np.uint8]  # (N, S, S, 3)
    labels: NDArray[np.int64]  # (N,), indices into classes
    classes: Labels  # (C,)

    @property
    def size(self) -> int:
        """Pixels per side."""
        return int(self.pixels.shape[1])

    def described(self) -> dict[str, Any]:
        """Return name, digest and number of images, as a checkpoint stores them."""
        digest = hashlib.sha256(f"{self.pixels.shape} {self.labels.dtype.str}".encode())
        for part in (self.pixels, self.labels):
            digest.update(np.ascontiguousarray(part).data)
        return {"name": self.name, "sha256": digest.hexdigest(), "n": len(self.labels)}

    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the mean and standard deviation of each channel, of pixels between 0 and 1."""
        values = np.arange(256) / 255
        counts = [np.bincount(self.pixels[..., c].ravel(), minlength=256) for c in range(3)]
        means = [float(values @ count / count.sum()) for count in counts]
        stds = [
            float(np.sqrt((values - mean) ** 2 @ count / count.sum()))
            for mean, count in zip(means, counts, strict=True)
        ]
        if min(stds) == 0:
            raise CasterError(f"the images of {self.name} are all of one colour")
        return tuple(round(mean, 4) for mean in means), tuple(round(std, 4) for std in stds)


def splits(data: str, test: str | None) -> tuple[str, str]:
    """Return the names of the training and the held-out images.

    >>> splits("cifar10", None), splits("tiny-imagenet", None)
    (('cifar10:train', 'cifar10:test'), ('tiny-imagenet:train', 'tiny-imagenet:val'))
    """
    if test is not None:
        return data, test
    title = data.partition(":")[0]
    is_path = Path(title).exists() or Path(title).suffix or Path(title).name != title
    if not is_path:  # it can only be the name of a set
        known(title, (*SETS, DIGITS), "set")
    names = SETS[data].names() if data in SETS else ["train", "test"] if data == DIGITS else []
    held_out = [name for name in HELD_OUT if name in names]
    if "train" not in names or not held_out:
        raise CasterError(
            f"{data} has no train and test split: name the held-out images with {{argument}}",
            argument="test",
        )
    return f"{data}:train", f"{data}:{held_out[0]}"


def read(source: str, root: Path | None = None, classes: Labels | None = None) -> LabelledImages:
    """Read all images of a source; `classes` replaces its own."""
    images = open_data(source, root)
    assert images.labels is not None  # they were opened as labelled images
    own = unique_labels(images.labels) if images.classes is None else images.classes
    known = own if classes is None else classes
    with ThreadPoolExecutor(THREADS) as threads:
        pixels = list(threads.map(images.read, range(len(images))))
    shapes = {image.shape for image in pixels}
    sides = shapes.pop()[:2]
    if shapes or sides[0] != sides[1] or sides[0] not in SIZES:
        known_sizes = " or ".join(f"{size}x{size}" for size in SIZES)
        raise CasterError(f"the images of {source} must all be {known_sizes} pixels")
    return LabelledImages(images.name, np.stack(pixels), encode(images.labels, known), known)
