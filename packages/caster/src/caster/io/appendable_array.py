"""Append-only NumPy files, trusted only as far as their checksum holds."""

from __future__ import annotations

import zlib
from os import fsync
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from caster.errors import CasterError


class DamagedError(Exception):
    """The content is not what was written: it must be computed again."""


class AppendableArray:
    """An .npy file to which rows are appended.

    Uses plain writes: on a full disk they raise an error, where a memory map would kill the
    process.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     array = AppendableArray(Path(folder, "a.npy"), like=np.zeros((0, 2)))
    ...     checksum = array.append(np.array([[1.0, 2.0], [3.0, 4.0]]))
    ...     array.sync(rows=1)
    ...     array.close()
    ...     np.load(Path(folder, "a.npy"))
    array([[1., 2.]])
    """

    def __init__(
        self,
        path: Path,
        like: NDArray[Any],  # (any, ...): row shape and dtype
        rows: int = 0,  # already in the file; 0 starts a new file
        checksum: int | None = None,  # of those rows
    ) -> None:
        self.row_shape, self.dtype = like.shape[1:], like.dtype
        self.checksum = _initial_checksum(like) if checksum is None else checksum
        self._file = path.open("r+b" if rows else "w+b", buffering=0)
        try:
            self._start = self._write_header(rows)
            self._seek(rows)
        except OSError:
            self._file.close()
            raise

    def append(self, values: NDArray[Any]) -> int:
        """Append rows; return the checksum of all rows."""
        if values.shape[1:] != self.row_shape or values.dtype != self.dtype:
            raise CasterError(
                f"the model gives {values.dtype} {values.shape[1:]}, where it gave {self.dtype} "
                f"{self.row_shape} before"
            )
        rest = _bytes(values)
        self.checksum = zlib.crc32(rest, self.checksum)
        while rest:
            rest = rest[self._file.write(rest) :]
        return self.checksum

    def sync(self, rows: int) -> None:
        """Flush the first `rows` rows to disk; later appends overwrite any rows after them."""
        self._write_header(rows)
        fsync(self._file.fileno())
        self._seek(rows)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write_header(self, rows: int) -> int:
        """Write the header in place: NumPy pads it so that the row count can grow."""
        descr = npy.dtype_to_descr(self.dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (rows, *self.row_shape)}
        self._file.seek(0)
        npy.write_array_header_1_0(self._file, header)
        return self._file.tell()

    def _seek(self, rows: int) -> None:
        bytes_per_row = int(np.prod(self.row_shape)) * self.dtype.itemsize
        self._file.seek(self._start + rows * bytes_per_row)


def read_checked(path: Path, rows: int, checksum: int) -> NDArray[Any]:
    """Memory-map the first rows of an appended file; raise DamagedError if they changed."""
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)[:rows]
        intact = len(array) == rows and (
            zlib.crc32(_bytes(array), _initial_checksum(array)) == checksum
        )
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise DamagedError(path) from None
        raise  # a missing permission, for example: the content may be intact
    except Exception:  # NumPy raises all kinds of errors on damaged bytes
        raise DamagedError(path) from None
    if not intact:
        raise DamagedError(path)
    return array


def _initial_checksum(like: NDArray[Any]) -> int:
    """Include dtype and row shape in the checksum: the header itself is overwritten."""
    return zlib.crc32(f"{like.dtype.str} {like.shape[1:]}".encode())


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
