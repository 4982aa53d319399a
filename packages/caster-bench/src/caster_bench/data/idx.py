"""Arrays as MNIST's publishers write them: a magic number, sizes, then bytes; often in a gzip."""

from __future__ import annotations

import gzip
import math
import struct
import threading
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError
from caster.io.decode import ImageArray
from caster.io.files import open_regular

UNSIGNED_BYTES = 0x08  # the third byte of a file; the fourth is the number of dimensions
DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, struct.error)


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """All of a file of unsigned bytes, gzipped or not."""
    shape = idx_shape(path, dimensions)
    with _opened(path) as file:
        try:
            file.read(_header(dimensions))
            content = file.read()
        except DAMAGE:
            raise CasterError(f"{path} is damaged or cut short") from None
    if len(content) != math.prod(shape):
        raise CasterError(f"{path} is damaged: it holds {len(content):,} bytes for {shape}")
    return np.frombuffer(content, np.uint8).reshape(shape)


def idx_shape(path: Path, dimensions: int) -> tuple[int, ...]:
    """The sizes that a file states of itself; its bytes are not read."""
    with _opened(path) as file:
        try:
            zeros, kind, stated = struct.unpack(">HBB", file.read(4))
            if (zeros, kind, stated) != (0, UNSIGNED_BYTES, dimensions):
                raise CasterError(f"{path} is no idx file of bytes in {dimensions} dimensions")
            return struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
        except DAMAGE:
            raise CasterError(f"{path} is damaged or cut short") from None


class GreyImages:
    """The images of an idx file, read from it when the first is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shape = idx_shape(path, 3)  # (N, H, W)
        self._lock = threading.Lock()
        self._pixels: NDArray[np.uint8] | None = None

    def image(self, index: int) -> ImageArray:
        """One image, its grey as three equal channels."""
        with self._lock:  # the other threads wait for the first to decompress them all
            if self._pixels is None:
                self._pixels = read_idx(self.path, 3)
        return np.repeat(self._pixels[index][:, :, np.newaxis], 3, axis=2)


def _header(dimensions: int) -> int:
    return 4 + 4 * dimensions


def _opened(path: Path) -> BinaryIO:
    try:
        with open_regular(path) as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
        return cast(BinaryIO, gzip.open(path, "rb")) if zipped else open(path, "rb")
    except OSError as error:
        raise CasterError(f"cannot read {path}: {error.strerror}") from None
