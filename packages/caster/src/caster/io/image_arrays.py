"""Images side by side in an array: .npz files, and what the publishers' files share with them."""

from __future__ import annotations

import math
import struct
import threading
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from caster.config import DEFAULT_LIMITS, Limits
from caster.errors import CasterError
from caster.io.decode import ImageArray
from caster.io.labels import Labels, as_labels, encode, unique_labels
from caster.io.npz import DAMAGE, NpzFile
from caster.io.traits import digest, is_by_class

LOCAL_HEADER = 30  # bytes before the name of a member; its last four say how long name and rest are


@dataclass(frozen=True, eq=False)
class ArrayImages:
    """Images that share files: each is a slice of something larger.

    >>> grey = np.zeros((2, 4, 4, 3), dtype=np.uint8)
    >>> two = ArrayImages("two", (), ("two[0]", "two[1]"), None, None, grey.__getitem__)
    >>> len(two), two.read(1).shape
    (2, (4, 4, 3))
    """

    name: str
    files: Sequence[Path]  # everything the images and labels come from
    names: Sequence[str]
    labels: Labels | None
    classes: Labels | None
    image: Callable[[int], ImageArray]
    share: str = ""  # which of the images in the files, where it is not all
    limits: Limits = DEFAULT_LIMITS
    skipped: Sequence[str] = ()

    @cached_property
    def by_class(self) -> bool:
        """Whether the images come class by class."""
        return is_by_class(self.labels)

    @cached_property
    def sha256(self) -> str:
        """Digest of the names, sizes and times of change of the files, and which share of them."""
        also = [self.share] if self.share else []
        return digest(((file.name, file) for file in self.files), *also)

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> ImageArray:
        """Take one out."""
        return self.image(index)


def open_npz(path: Path, limits: Limits = DEFAULT_LIMITS) -> ArrayImages:
    """An .npz file with `images` (N, H, W, 3) or (N, H, W), and maybe `labels` and `classes`.

    `classes` are names in the order of the model's outputs; whole-number labels count in it.
    """
    file = NpzFile(path, limits)  # refuses damage, and Python objects in any of the arrays
    held = file.names
    if "images" not in held:
        raise CasterError(f"{path} holds no `images` (it holds {', '.join(held) or 'nothing'})")
    images = _Images(file)
    labels = _labels(file, "labels") if "labels" in held else None
    classes = _labels(file, "classes") if "classes" in held else None
    if classes is not None and len(unique_labels(classes)) < len(classes):
        raise CasterError(f"`classes` in {path} names a class twice")
    if labels is not None:
        if len(labels) != images.shape[0]:
            raise CasterError(f"{path} holds {images.shape[0]} images and {len(labels)} labels")
        labels, classes = _resolved(path, labels, classes)
    names = tuple(f"{path.name}[{i}]" for i in range(images.shape[0]))
    return ArrayImages(str(path), (path,), names, labels, classes, images.image, limits=limits)


class _Images:
    """The member `images`: mapped where it is stored as it is, else decompressed on first use."""

    def __init__(self, file: NpzFile) -> None:
        self._file, self.path = file, file.path
        path = file.path
        self._lock = threading.Lock()
        self._pixels: NDArray[np.uint8] | None = None
        try:
            with zipfile.ZipFile(path) as archive, archive.open("images.npy") as stream:
                version = npy.read_magic(stream)
                read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                self.shape, _, dtype = read(stream)
                info, header = archive.getinfo("images.npy"), stream.tell()
            self._check(dtype)
            if info.file_size != header + math.prod(self.shape):
                raise CasterError(f"`images` in {path} has not the size it claims to have")
            if info.compress_type == zipfile.ZIP_STORED:
                start = _content_offset(path, info) + header
                self._pixels = np.memmap(path, np.uint8, "r", start, self.shape)
        except CasterError:
            raise
        except (ValueError, *DAMAGE):
            raise CasterError(f"`images` in {path} is damaged") from None

    def image(self, index: int) -> ImageArray:
        """A copy of one image; grey ones as three equal channels."""
        if self._pixels is None:
            with self._lock:  # the other threads wait for the first to decompress them all
                if self._pixels is None:
                    self._pixels = self._file.read("images")
        image = np.array(self._pixels[index])
        return image if image.ndim == 3 else np.repeat(image[:, :, np.newaxis], 3, axis=2)

    def _check(self, dtype: np.dtype[Any]) -> None:
        problem = ""
        if dtype != np.uint8:
            problem = f"is {dtype}: save pixels from 0 to 255 as uint8"
        elif len(self.shape) == 3 and self.shape[-1] == 3:
            problem = f"is one image of shape {self.shape}: save images[None]"
        elif len(self.shape) == 4 and self.shape[1] == 3 != self.shape[-1]:
            problem = f"has shape {self.shape}: save images.transpose(0, 2, 3, 1)"
        elif len(self.shape) != 3 and (len(self.shape) != 4 or self.shape[-1] != 3):
            problem = f"has shape {self.shape}: it must be (N, H, W, 3), or (N, H, W) for grey"
        elif 0 in self.shape:
            problem = f"has shape {self.shape}: there is no image in it"
        if problem:
            raise CasterError(f"`images` in {self.path} {problem}")
        height, width = self.shape[1:3]
        what = f"an image in {self.path} has {width:,} x {height:,} pixels"
        self._file.limits.check("pixels", height * width, what)


def _content_offset(path: Path, info: zipfile.ZipInfo) -> int:
    """Where a stored member's bytes begin, which only the header right before them knows."""
    with open(path, "rb") as file:
        file.seek(info.header_offset + LOCAL_HEADER - 4)
        name, extra = struct.unpack("<HH", file.read(4))
    return int(info.header_offset + LOCAL_HEADER + name + extra)


def _labels(file: NpzFile, name: str) -> Labels:
    values = file.read(name)
    try:
        return as_labels(values)
    except CasterError as error:
        raise CasterError(f"`{name}` in {file.path}: {error}") from None


def _resolved(path: Path, labels: Labels, classes: Labels | None) -> tuple[Labels, Labels]:
    """Labels as members of the classes, and the classes."""
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
        raise CasterError(f"label {wrong} in {path} is no index of its {len(classes)} `classes`")
    return classes[labels], classes
