"""CIFAR-10-C and CIFAR-100-C: an array a corruption, its severities one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError
from caster.io.decode import ImageArray
from caster.io.image_arrays import ArrayImages
from caster.io.labels import as_labels
from caster_bench.data.sets.layout import Part
from caster_bench.data.sets.names import SEVERITIES, class_names, corruption


def open_corrupted(part: Part, classes: str) -> ArrayImages:
    """A corruption at a severity: a fifth of `<corruption>.npy` and of `labels.npy`.

    The array stays on the disk; an image is copied out of it when it is asked for.
    """
    images_file, labels_file = (part.folder / file for file in part.files)
    pixels = mapped(images_file)
    numbers = check_arrays(images_file, pixels, labels_file, mapped(labels_file))
    size, rest = divmod(len(pixels), len(SEVERITIES))
    if rest or not size:
        raise CasterError(
            f"{images_file} holds {len(pixels):,} images: that is not five severities"
        )
    ordered = as_labels(class_names(classes))
    if numbers.min() < 0 or numbers.max() >= len(ordered):
        raise CasterError(f"{labels_file}: a label is none of the {len(ordered)} classes")
    start = size * (corruption(part.split)[1] - 1)

    def image(index: int) -> ImageArray:
        return np.array(pixels[start : start + size][index])

    names = tuple(f"{images_file.name}[{i}]" for i in range(start, start + size))
    labels = ordered[np.asarray(numbers[start : start + size])]
    files = (images_file, labels_file)  # of all five severities: the split tells them apart
    return ArrayImages(part.name, files, names, labels, ordered, image, share=part.split)


def check_arrays(
    images_file: Path, pixels: NDArray[Any], labels_file: Path, numbers: NDArray[Any]
) -> NDArray[Any]:  # (N,)
    """The labels, if the arrays are images (N, H, W, 3) with a whole number each."""
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[-1] != 3:
        raise CasterError(
            f"{images_file} is not a published file: {pixels.dtype} {pixels.shape} is not uint8 "
            "(N, H, W, 3)"
        )
    if numbers.dtype.kind not in "iu" or numbers.shape != pixels.shape[:1]:
        raise CasterError(f"{labels_file} has no label for every image of {images_file.name}")
    return numbers


def mapped(path: Path) -> NDArray[Any]:
    """A .npy file, read as it is looked at."""
    try:
        content = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise CasterError(f"cannot read {path}: {error.strerror or error}") from None
    except (EOFError, ValueError):
        content = None
    if not isinstance(content, np.ndarray):
        raise CasterError(f"{path} is truncated, damaged or no .npy file")
    return content
