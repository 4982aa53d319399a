"""Images stored in arrays: .npz files, and the base of published sets such as CIFAR-10."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.config import DEFAULT_LIMITS, Limits
from caster.errors import CasterError
from caster.io.feature_files import NpzFile
from caster.io.files import stat_digest
from caster.io.image_files import ImageArray, Images
from caster.io.labels import Labels, as_labels, encode, unique_labels


@dataclass(frozen=True, eq=False)
class ArrayImages(Images):
    """Many images per file.

    >>> pixels = np.zeros((2, 4, 4, 3), dtype=np.uint8)
    >>> images = ArrayImages("two", (), ("two[0]", "two[1]"), None, None, pixels.__getitem__)
    >>> len(images), images.read(1).shape
    (2, (4, 4, 3))
    """

    name: str
    files: Sequence[Path]  # all files that images and labels come from
    names: Sequence[str]
    labels: Labels | None
    classes: Labels | None
    image: Callable[[int], ImageArray]
    share: str = ""  # which of the images in the files, if not all
    limits: Limits = DEFAULT_LIMITS
    skipped: Sequence[str] = ()

    @cached_property
    def sha256(self) -> str:
        """Digest of the names, sizes and times of the files, and of the share."""
        extra = [self.share] if self.share else []
        return stat_digest(((file.name, file) for file in self.files), *extra)

    def read(self, index: int) -> ImageArray:
        """Return one image."""
        return self.image(index)


def open_npz(path: Path, limits: Limits = DEFAULT_LIMITS) -> ArrayImages:
    """Open an .npz file with `images` (N, H, W, 3) or (N, H, W), and maybe `labels` and `classes`.

    `classes` are names in the order of the model's outputs; integer labels are indices into it.
    """
    file = NpzFile(path, limits)  # rejects damage, and Python objects in any array
    if "images" not in file.names:
        found = ", ".join(file.names) or "nothing"
        raise CasterError(f"{path} has no `images` (it has {found})")
    images = _NpzImages(file)
    count = file.shapes["images"][0]
    labels = _labels(file, "labels") if "labels" in file.names else None
    classes = _labels(file, "classes") if "classes" in file.names else None
    if classes is not None and len(unique_labels(classes)) < len(classes):
        raise CasterError(f"`classes` in {path} names a class twice")
    if labels is not None:
        if len(labels) != count:
            raise CasterError(f"{path} has {count} images and {len(labels)} labels")
        labels, classes = _resolve(path, labels, classes)
    names = tuple(f"{path.name}[{i}]" for i in range(count))
    return ArrayImages(str(path), (path,), names, labels, classes, images.read, limits=limits)


class _NpzImages:
    """The array `images`: memory-mapped if stored uncompressed, else loaded on first access."""

    def __init__(self, file: NpzFile) -> None:
        _check_images(file)
        self._file, self._lock = file, threading.Lock()
        self._pixels: NDArray[Any] | None = file.map("images")

    def read(self, index: int) -> ImageArray:
        """Return a copy of one image; grey ones get three equal channels."""
        if self._pixels is None:
            with self._lock:  # other threads wait for the first to decompress the array
                if self._pixels is None:
                    self._pixels = self._file.read("images")
        image = np.array(self._pixels[index])
        return image if image.ndim == 3 else np.repeat(image[:, :, np.newaxis], 3, axis=2)


def _check_images(file: NpzFile) -> None:
    shape, dtype, problem = file.shapes["images"], file.dtypes["images"], ""
    if dtype != np.uint8:
        problem = f"is {dtype}: save pixels from 0 to 255 as uint8"
    elif len(shape) == 3 and shape[-1] == 3:
        problem = f"is one image of shape {shape}: save images[None]"
    elif len(shape) == 4 and shape[1] == 3 != shape[-1]:
        problem = f"has shape {shape}: save images.transpose(0, 2, 3, 1)"
    elif len(shape) != 3 and (len(shape) != 4 or shape[-1] != 3):
        problem = f"has shape {shape}: it must be (N, H, W, 3), or (N, H, W) for grey"
    elif 0 in shape:
        problem = f"has shape {shape}: there is no image in it"
    if problem:
        raise CasterError(f"`images` in {file.path} {problem}")
    height, width = shape[1:3]
    what = f"an image in {file.path} has {width:,} x {height:,} pixels"
    file.limits.check("pixels", height * width, what)


def _labels(file: NpzFile, name: str) -> Labels:
    values = file.read(name)
    try:
        return as_labels(values)
    except CasterError as error:
        raise CasterError(f"`{name}` in {file.path}: {error}") from None


def _resolve(path: Path, labels: Labels, classes: Labels | None) -> tuple[Labels, Labels]:
    """Return labels as members of the classes, and the classes."""
    if classes is None:
        return labels, unique_labels(labels)
    if labels.dtype.kind not in "iu":
        try:
            encode(labels, classes)
        except CasterError as error:
            raise CasterError(f"{path}: {error}") from None
        return labels, classes
    if labels.min() < 0 or labels.max() >= len(classes):
        wrong = labels[(labels < 0) | (labels >= len(classes))][0]
        raise CasterError(
            f"label {wrong} in {path} is not an index into its {len(classes)} `classes`"
        )
    return classes[labels], classes
