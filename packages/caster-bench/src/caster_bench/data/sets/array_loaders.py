"""Loaders of sets stored as arrays: CIFAR, CIFAR-C and Fashion-MNIST.

Arrays are mapped, or decompressed on first use; an image is copied when it is read.
"""

from __future__ import annotations

import gzip
import math
import struct
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError
from caster.io.files import open_regular
from caster.io.image_arrays import ArrayImages
from caster.io.image_files import ImageArray
from caster.io.labels import Labels, as_labels
from caster_bench.data.plain_pickle import read_plain_pickle
from caster_bench.data.sets.dataset import SplitFiles
from caster_bench.sweeps.spec import SEVERITIES

PIXELS = 3 * 32 * 32  # in a row of CIFAR: all red, then all green, then all blue
UNSIGNED_BYTES = 0x08  # third byte of an idx file; the fourth is the number of dimensions
GZIP_DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, struct.error)

Rows = tuple[NDArray[np.uint8], NDArray[Any]]  # (n, PIXELS), (n,)


# CIFAR-10 and CIFAR-100, in the two versions that need no MATLAB


def open_cifar_pickles(split: SplitFiles) -> ArrayImages:
    """Open cifar-10-batches-py or cifar-100-python without unpickling.

    The last file has the class names, the others images.
    """
    *batches, meta = (split.folder / file for file in split.files)
    names = _value(meta, read_plain_pickle(meta), "fine_label_names", "label_names")
    if not isinstance(names, list) or not all(isinstance(n, str | bytes) for n in names):
        raise CasterError(f"{meta} is damaged: the class names are not a list of names")
    classes = [n if isinstance(n, str) else n.decode("latin-1") for n in names]
    return _open_rows(split.name, batches, meta, [_pickled_rows(path) for path in batches], classes)


def open_cifar_records(
    split: SplitFiles,
    labels: int,  # bytes before a row; the last is the label, in CIFAR-100 the fine one
) -> ArrayImages:
    """Open cifar-10-batches-bin or cifar-100-binary.

    The last file has the class names, the others images.
    """
    *batches, meta = (split.folder / file for file in split.files)
    try:
        classes = meta.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise CasterError(f"cannot read {meta}: {reason}") from None
    rows = [_binary_rows(path, labels) for path in batches]
    return _open_rows(split.name, batches, meta, rows, classes)


def _pickled_rows(path: Path) -> Rows:
    content = read_plain_pickle(path)
    pixels = _value(path, content, "data")
    labels = _value(path, content, "fine_labels", "labels")
    numbers = isinstance(labels, list) and all(isinstance(label, int) for label in labels)
    rows = isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8
    if not numbers or not rows or pixels.shape != (len(labels), PIXELS):
        raise CasterError(f"{path} is damaged: it must have {PIXELS} pixels for every label")
    return pixels, np.asarray(labels)


def _value(path: Path, content: Any, *keys: str) -> Any:
    """Return the value of the first key present; Python 2 wrote keys as bytes."""
    for key in keys:
        for spelling in (key, key.encode()):
            if isinstance(content, dict) and spelling in content:
                return content[spelling]
    raise CasterError(f"{path} is damaged: it has no `{keys[-1]}`")


def _binary_rows(path: Path, labels: int) -> Rows:
    try:
        content = np.asarray(np.memmap(path, np.uint8, "r"))
        records = content.reshape(-1, labels + PIXELS)
    except OSError as error:
        raise CasterError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise CasterError(
            f"{path} is truncated or damaged: its size is not a multiple of {labels + PIXELS} bytes"
        ) from None
    return records[:, labels:], records[:, labels - 1]


def _open_rows(
    name: str, files: list[Path], meta: Path, batches: list[Rows], classes: list[str]
) -> ArrayImages:
    for path, (_, labels) in zip(files, batches, strict=True):
        _check_classes(path, labels, len(classes))
    rows = tuple(row for pixels, _ in batches for row in pixels)
    names = tuple(
        f"{path.name}[{i}]"
        for path, (pixels, _) in zip(files, batches, strict=True)
        for i in range(len(pixels))
    )

    def image(index: int) -> ImageArray:
        return np.ascontiguousarray(rows[index].reshape(3, 32, 32).transpose(1, 2, 0))

    ordered = as_labels(classes)
    labels = ordered[np.concatenate([labels for _, labels in batches])]
    return ArrayImages(name, (*files, meta), names, labels, ordered, image)


# CIFAR-C: one array per corruption, its severities one after the other


def open_cifar_c(split: SplitFiles, classes: Labels | tuple[str, ...]) -> ArrayImages:
    """Open one severity: a fifth of `<corruption>.npy` and of `labels.npy`."""
    images_file, labels_file = (split.folder / file for file in split.files)
    pixels = map_npy(images_file)
    numbers = check_arrays(images_file, pixels, labels_file, map_npy(labels_file))
    size, rest = divmod(len(pixels), len(SEVERITIES))
    if rest or not size:
        raise CasterError(f"{images_file} has {len(pixels):,} images: not five severities")
    ordered = as_labels(classes)
    _check_classes(labels_file, numbers, len(ordered))
    start = size * (parse_condition(split.split)[1] - 1)

    def image(index: int) -> ImageArray:
        return np.array(pixels[start : start + size][index])

    names = tuple(f"{images_file.name}[{i}]" for i in range(start, start + size))
    labels = ordered[np.asarray(numbers[start : start + size])]
    files = (images_file, labels_file)  # shared by all severities: `share` tells them apart
    return ArrayImages(split.name, files, names, labels, ordered, image, share=split.split)


def parse_condition(split: str) -> tuple[str, int]:
    """Split "fog-3" into corruption and severity.

    >>> parse_condition("fog-3")
    ('fog', 3)
    """
    name, _, severity = split.rpartition("-")
    return name, int(severity)


def check_arrays(
    images_file: Path, pixels: NDArray[Any], labels_file: Path, numbers: NDArray[Any]
) -> NDArray[Any]:  # (N,)
    """Return the labels if the arrays are images (N, H, W, 3) with an integer each."""
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[-1] != 3:
        raise CasterError(
            f"{images_file} is not a published file: {pixels.dtype} {pixels.shape} is not uint8 "
            "(N, H, W, 3)"
        )
    if numbers.dtype.kind not in "iu" or numbers.shape != pixels.shape[:1]:
        raise CasterError(f"{labels_file} does not have a label for every image of {images_file}")
    return numbers


def map_npy(path: Path) -> NDArray[Any]:
    """Map a .npy file."""
    try:
        content = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise CasterError(f"cannot read {path}: {error.strerror or error}") from None
    except (EOFError, ValueError):
        content = None
    if not isinstance(content, np.ndarray):
        raise CasterError(f"{path} is truncated, damaged or not a .npy file")
    return content


def _check_classes(path: Path, numbers: NDArray[Any], count: int) -> None:
    if numbers.min(initial=0) < 0 or numbers.max(initial=0) >= count:
        raise CasterError(f"{path} is damaged: a label is not one of the {count} classes")


# Fashion-MNIST: idx files, often gzipped


def open_fashion_mnist(split: SplitFiles, classes: tuple[str, ...]) -> ArrayImages:
    """Open an idx file of images and one of labels."""
    images_file, labels_file = (split.folder / file for file in split.files)
    images, (_, numbers) = IdxImages(images_file), read_idx(labels_file, 1)
    if len(numbers) != images.shape[0]:
        raise CasterError(
            f"{images_file} has {images.shape[0]} images, and {labels_file} {len(numbers)} labels"
        )
    _check_classes(labels_file, numbers, len(classes))
    ordered = as_labels(classes)
    names = tuple(f"{split.split}[{i}]" for i in range(len(numbers)))
    files = (images_file, labels_file)
    return ArrayImages(split.name, files, names, ordered[numbers], ordered, images.image)


class IdxImages:
    """Grey images of an idx file, read on first use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shape, _ = read_idx(path, 3, header_only=True)  # (N, H, W)
        self._lock = threading.Lock()
        self._pixels: NDArray[np.uint8] | None = None

    def image(self, index: int) -> ImageArray:
        """Return one image with three equal channels."""
        with self._lock:  # the first thread decompresses all images while others wait
            if self._pixels is None:
                _, self._pixels = read_idx(self.path, 3)
        return np.repeat(self._pixels[index][:, :, np.newaxis], 3, axis=2)


def read_idx(
    path: Path, dimensions: int, header_only: bool = False
) -> tuple[tuple[int, ...], NDArray[np.uint8]]:
    """Read the shape and the unsigned bytes of an idx file, gzipped or not."""
    try:
        with open_regular(path) as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if zipped else open(path, "rb") as file:
            zeros, kind, stated = struct.unpack(">HBB", file.read(4))
            if (zeros, kind, stated) != (0, UNSIGNED_BYTES, dimensions):
                raise CasterError(f"{path} is not an idx file of bytes in {dimensions} dimensions")
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            content = b"" if header_only else file.read()
    except GZIP_DAMAGE:
        raise CasterError(f"{path} is damaged or truncated") from None
    except OSError as error:
        raise CasterError(f"cannot read {path}: {error.strerror}") from None
    if header_only:
        return shape, np.empty(0, np.uint8)
    if len(content) != math.prod(shape):
        raise CasterError(f"{path} is damaged: it has {len(content):,} bytes for {shape}")
    return shape, np.frombuffer(content, np.uint8).reshape(shape)
