"""Published image sets, corruptions of images, and streams of both."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError
from caster.io.image_arrays import ArrayImages
from caster.io.images import Images, open_images
from caster_bench.data.corrupted_reader import is_corrupted_set, open_corrupted_set
from caster_bench.data.sets import SETS, open_set

DIGITS = "digits"  # scikit-learn's: they need no download
SIDE = 32  # pixels of scikit-learn's digits, enlarged


def open_named(source: str, root: Path | None) -> Images | None:
    """Open a split of a published set or of the digits, or a folder from `caster corrupt`.

    Return None if it is none of these.
    """
    if is_corrupted_set(Path(source)):
        return open_corrupted_set(Path(source))
    folder, _, split = source.rpartition(":")
    if folder and is_corrupted_set(Path(folder)):
        return open_corrupted_set(Path(folder), split)
    name, _, split = source.partition(":")
    if Path(source).exists():
        return None
    if name == DIGITS:
        return open_digits(split)
    return open_set(source, root) if name in SETS else None


def open_data(source: str, root: Path | None = None) -> Images:
    """Open labelled images: anything that `caster` opens.

    >>> test = open_data("digits:test")
    >>> len(test), test.read(0).shape, len(test.classes)
    (896, (32, 32, 3), 10)
    """
    return open_images(source, root, labelled=True)


@cache
def open_digits(split: str) -> Images:
    """Open one of the two halves that `caster demo` uses: 901 digits to train on, 896 to test."""
    if split not in ("train", "test"):
        raise CasterError(f"digits has no split {split!r}: choose digits:train or digits:test")
    from caster.report.digits_demo import WHITE, split_digits

    digits = split_digits()
    train = split == "train"
    images = digits.source if train else digits.target  # (n, 8, 8)
    labels = digits.source_labels if train else digits.target_labels
    pixels = np.rint(images / WHITE * 255).astype(np.uint8)
    name = f"digits:{split}"
    names = tuple(f"{name}[{i}]" for i in range(len(pixels)))
    read = partial(_image, pixels)
    return ArrayImages(name, (), names, labels, np.arange(10), read, share=name)


def _image(pixels: NDArray[np.uint8], index: int) -> NDArray[np.uint8]:  # (SIDE, SIDE, 3)
    scale = SIDE // pixels.shape[1]
    large = pixels[index].repeat(scale, axis=0).repeat(scale, axis=1)
    return np.repeat(large[:, :, np.newaxis], 3, axis=2)
