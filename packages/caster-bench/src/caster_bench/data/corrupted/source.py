"""The images that a corrupted set is made of: of one size, in one file, in one order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caster.adapt.reading import ImageArrayBatch, fit, read_batches
from caster.errors import CasterError
from caster.io.growing import GrowingArray
from caster.io.images import Images
from caster.io.progress import Progress
from caster.models.preprocessing import Preprocessing
from caster_bench.data.corrupted.catalogue import Catalogue
from caster_bench.data.corruptions.make import TINY_SIDE

SCRATCH = ".images.npy"
STAGE = "reading images"
AT_ONCE = 256  # images
PIXELS = {"range": 255.0, "mean": (0.0,) * 3, "std": (1.0,) * 3, "layout": "NHWC", "dtype": "uint8"}
AS_THEY_ARE = Preprocessing(**PIXELS)  # type: ignore[arg-type]
# What https://github.com/hendrycks/robustness does in ImageNet-C/create_c/make_imagenet_c.py
# (commit e0377d4), by torchvision's Resize and CenterCrop.
IMAGENET = Preprocessing(
    **PIXELS,  # type: ignore[arg-type]
    resize=256,
    interpolation="bilinear",
    crop=(224, 224),
)


@dataclass(frozen=True)
class Source:
    """Images of one size, mapped from one file, so that every worker can read them."""

    pixels: Path  # .npy, uint8 (N, H, W, 3)
    shape: tuple[int, ...]
    sha256: str  # of pixels, and of labels or names: the same on any machine
    fitted: str  # in words


@contextmanager
def gathered(
    images: Images,
    out: Path,  # where the file lies as long as the block lasts
    catalogue: Catalogue,
    progress: Progress,
) -> Iterator[Source]:
    """Read all images once: nothing is made of a set that turns out to be damaged.

    Files that are larger than 64 pixels are resized and cropped as ImageNet-C's; smaller ones, as
    those of Tiny-ImageNet, and arrays are taken as they are.
    """
    scratch, order = out / SCRATCH, catalogue.order
    first = images.read(order[0])
    large = catalogue.places is not None and max(first.shape[:2]) > TINY_SIDE
    preprocessing = IMAGENET if large else AS_THEY_ARE
    like = np.empty((0, *fit(first, preprocessing, images, order[0]).shape), dtype=np.uint8)
    shape = (len(order), *like.shape[1:])
    digest = hashlib.sha256(json.dumps([shape, *catalogue.facts()]).encode())
    try:
        with (
            closing(GrowingArray(scratch, like)) as array,
            closing(
                read_batches(images, preprocessing, order, AT_ONCE, skip_unreadable=True)
            ) as batches,
        ):
            done = 0
            progress(STAGE, 0, len(order))
            for batch in batches:
                values = _of_one_size(batch, images, shape)
                array.append(values)
                digest.update(values.data)
                done += len(values)
                progress(STAGE, done, len(order))
            array.sync(len(order))
        words = "short side 256 (bilinear), centre crop 224 x 224" if large else "as they are"
        yield Source(scratch.absolute(), shape, digest.hexdigest(), words)
    finally:
        scratch.unlink(missing_ok=True)


def _of_one_size(
    batch: ImageArrayBatch, images: Images, shape: tuple[int, ...]
) -> NDArray[np.uint8]:  # (n, H, W, 3)
    for why in batch.unreadable.values():
        raise CasterError(f"{why}: repair or remove it")
    for group in batch.groups:
        _, height, width, _ = group.prepared.shape
        if (height, width) != shape[1:3]:
            name = images.names[batch.rows[group.places[0]]]
            raise CasterError(
                f"{name} has {width} x {height} pixels and the first image {shape[2]} x "
                f"{shape[1]}: images of up to {TINY_SIDE} pixels are taken as they are, so make "
                "them of one size"
            )
    (group,) = batch.groups
    return group.prepared
