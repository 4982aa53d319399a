"""Arrays in NumPy's .npz format, streamed out of the zip file without unpickling anything."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from caster.config import DEFAULT_LIMITS, Limits
from caster.errors import CasterError

EXPANSION = 8  # an array may take that many times its file's size, whatever the limit
LONGEST_HEADER = 2**16  # bytes; NumPy's own check comes after it has read all of them
TOGETHER = ("features", "labels", "logits")
# What a damaged archive raises, by where the damage is: an unknown method of compression is a
# NotImplementedError and an encrypted member a RuntimeError, of which the former is one.
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError)


class NpzFile:
    """An .npz file, read by row."""

    def __init__(self, path: Path, limits: Limits = DEFAULT_LIMITS) -> None:
        self.path, self.limits = path, limits
        try:
            with zipfile.ZipFile(path) as archive:
                members = [n.removesuffix(".npy") for n in archive.namelist() if n.endswith(".npy")]
                self.shapes = {name: self._shape(archive, name) for name in members}
        except PermissionError:
            raise CasterError(f"cannot read {path}: no permission") from None
        except DAMAGE:
            raise CasterError(f"{path} is truncated, damaged or not an .npz file") from None
        self.names = tuple(self.shapes)
        self.rows = _common_rows(path, self.shapes)

    def width(self, name: str) -> int:
        """Values in a row of an array."""
        return math.prod(self.shapes[name][1:])

    def read(self, name: str) -> NDArray[Any]:
        """One whole array."""
        with ExitStack() as stack:
            archive = stack.enter_context(zipfile.ZipFile(self.path))
            member = _Member(stack, archive, name, self)
            return member.take(member.shape[0]) if member.shape else member.take(1).reshape(())

    def chunks(self, names: tuple[str, ...], rows: int) -> Iterator[tuple[NDArray[Any], ...]]:
        """These arrays side by side, so many rows at a time."""
        with ExitStack() as stack:
            archive = stack.enter_context(zipfile.ZipFile(self.path))
            members = [_Member(stack, archive, name, self) for name in names]
            for start in range(0, self.rows, rows):
                count = min(rows, self.rows - start)
                yield tuple(member.take(count) for member in members)

    def _shape(self, archive: zipfile.ZipFile, name: str) -> tuple[int, ...]:
        with ExitStack() as stack:
            return _Member(stack, archive, name, self).shape


class _Member:
    """One array of an open .npz file, handed out a few rows at a time."""

    def __init__(
        self, stack: ExitStack, archive: zipfile.ZipFile, name: str, file: NpzFile
    ) -> None:
        self.name, self.path, self.limits = name, file.path, file.limits
        path = file.path
        try:
            self.stream: IO[bytes] = stack.enter_context(archive.open(f"{name}.npy"))
        except DAMAGE:
            raise CasterError(f"`{name}` in {path} is damaged") from None
        try:
            header = _read_header(self.stream)
        except Exception:  # NumPy raises whatever damaged bytes lead it to
            raise CasterError(f"`{name}` in {path} is not a plain NumPy array") from None
        self.shape, fortran, self.dtype = header
        if self.dtype.hasobject:
            raise CasterError(
                f"`{name}` in {path} holds Python objects, which caster never unpickles: "
                "save numbers or text"
            )
        if fortran and len(self.shape) > 1:
            raise CasterError(
                f"`{name}` in {path} is stored by column: save np.ascontiguousarray of it"
            )

    def take(self, rows: int) -> NDArray[Any]:
        """The next rows."""
        row_shape = self.shape[1:]
        wanted = rows * math.prod(row_shape) * self.dtype.itemsize
        check_bytes(self.limits, self.name, self.path, wanted)
        if self.dtype.kind in "US":
            width = self.dtype.itemsize // np.dtype(f"{self.dtype.kind}1").itemsize
            what = f"`{self.name}` in {self.path} has room for {width:,} characters a row"
            self.limits.check("label_length", width, what)
        try:
            content = self.stream.read(wanted)
        except DAMAGE:
            raise CasterError(f"`{self.name}` in {self.path} is damaged") from None
        except MemoryError:
            raise CasterError(f"not enough memory for `{self.name}` in {self.path}") from None
        if len(content) < wanted:
            raise CasterError(f"`{self.name}` in {self.path} ends early: the file is truncated")
        return np.frombuffer(content, dtype=self.dtype).reshape(rows, *row_shape)


def _read_header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and type of an array that NumPy saved."""
    version = npy.read_magic(stream)
    if version == (2, 0) and int.from_bytes(stream.peek(4)[:4], "little") > LONGEST_HEADER:
        raise ValueError("the header is too long")
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
    shape, fortran, dtype = read(stream)
    if min(shape, default=0) < 0:
        raise ValueError("a negative number of rows")
    return shape, fortran, dtype


def check_bytes(limits: Limits, name: str, path: Path, size: int) -> None:
    """Reject an array that takes too much memory for the limit and for the size of its file."""
    if size > EXPANSION * path.stat().st_size:
        limits.check("array_bytes", size, f"`{name}` in {path} takes {size:,} bytes")


def _common_rows(path: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """Rows of the arrays that belong together; other arrays in the file may have any shape."""
    rows = {name: shapes[name][0] for name in TOGETHER if shapes.get(name)}
    if len(set(rows.values())) > 1:
        found = ", ".join(f"{count} of `{name}`" for name, count in rows.items())
        raise CasterError(f"the arrays in {path} differ in rows: {found}")
    return next(iter(rows.values()), 0)
