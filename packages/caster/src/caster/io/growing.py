"""NumPy files that grow by rows, and are believed only as far as their checksum goes."""

from __future__ import annotations

import zlib
from os import fsync
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from caster.errors import CasterError


class Damaged(Exception):  # noqa: N818
    """What is kept is not what was written: it must be made anew."""


class GrowingArray:
    """An .npy file that rows are appended to.

    They go there by plain writes: on a full disk those raise an error, where a memory map would
    end the process.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     grown = GrowingArray(Path(folder, "a.npy"), like=np.zeros((0, 2)))
    ...     checksum = grown.append(np.array([[1.0, 2.0], [3.0, 4.0]]))
    ...     grown.sync(rows=1)
    ...     grown.close()
    ...     np.load(Path(folder, "a.npy"))
    array([[1., 2.]])
    """

    def __init__(
        self,
        path: Path,
        like: NDArray[Any],  # (any, ...), for the width and the type
        rows: int = 0,  # the file's, to be followed by others; 0 starts anew
        checksum: int | None = None,  # of those
    ) -> None:
        self.width, self.dtype = like.shape[1:], like.dtype
        self.checksum = _start(like) if checksum is None else checksum
        self._file = path.open("r+b" if rows else "w+b", buffering=0)
        try:
            self._start = self._write_header(rows)
            self._seek(rows)
        except OSError:
            self._file.close()
            raise

    def append(self, values: NDArray[Any]) -> int:
        """Add rows; returns the checksum of all."""
        if values.shape[1:] != self.width or values.dtype != self.dtype:
            raise CasterError(
                f"the model gives {values.dtype} {values.shape[1:]}, where it gave {self.dtype} "
                f"{self.width} before"
            )
        rest = _bytes(values)
        self.checksum = zlib.crc32(rest, self.checksum)
        while rest:
            rest = rest[self._file.write(rest) :]
        return self.checksum

    def sync(self, rows: int) -> None:
        """Put so many rows on disk for good; the next ones take the place of any behind them."""
        self._write_header(rows)
        fsync(self._file.fileno())
        self._seek(rows)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _write_header(self, rows: int) -> int:
        """NumPy pads headers for the number of rows to grow in place."""
        descr = npy.dtype_to_descr(self.dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (rows, *self.width)}
        self._file.seek(0)
        npy.write_array_header_1_0(self._file, header)
        return self._file.tell()

    def _seek(self, rows: int) -> None:
        bytes_a_row = int(np.prod(self.width)) * self.dtype.itemsize
        self._file.seek(self._start + rows * bytes_a_row)


def read_grown(path: Path, rows: int, checksum: int) -> NDArray[Any]:
    """The first rows of such a file, mapped from disk, if they are the ones written."""
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)[:rows]
        same = len(array) == rows and _checksum(array) == checksum
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise Damaged(path) from None
        raise  # no permission, say: what is there may be all right
    except Exception:  # NumPy raises whatever damaged bytes lead it to
        raise Damaged(path) from None
    if not same:
        raise Damaged(path)
    return array


def _start(like: NDArray[Any]) -> int:
    """The width and the type are part of the checksum: the header itself is written over."""
    return zlib.crc32(f"{like.dtype.str} {like.shape[1:]}".encode())


def _checksum(array: NDArray[Any]) -> int:
    return zlib.crc32(_bytes(array), _start(array))


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
