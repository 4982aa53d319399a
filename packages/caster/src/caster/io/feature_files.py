"""Feature files: .npz and .parquet, read in chunks and never loaded whole.

Both have `features` (N, d) and, where they apply, `labels` (N,) and `logits` (N, C): arrays of
those names in an .npz file; columns in a .parquet file, two-dimensional ones with a list of numbers
per row.
"""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from caster.config import DEFAULT_LIMITS, Limits
from caster.errors import CasterError

EXPANSION = 8  # an array may always take this many times the size of its file
LONGEST_HEADER = 2**16  # bytes; NumPy reads a header whole before it checks the length
LOCAL_HEADER = 30  # bytes before a member's name; the last four are two lengths
ALIGNED = ("features", "labels", "logits")  # arrays that must have equally many rows
# Raised by a damaged archive: an unknown compression method is a NotImplementedError and an
# encrypted member a RuntimeError, its base class.
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError)
OBJECT_BYTES = 40  # of a value that is converted through a Python object


class FeatureFile(Protocol):
    """Named arrays with equally many rows, read in chunks."""

    @property
    def path(self) -> Path:
        """Path of the file."""

    @property
    def rows(self) -> int:
        """Number of rows."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays."""

    def read(self, name: str) -> NDArray[Any]:
        """Read a whole array."""

    def chunks(self, names: tuple[str, ...], rows: int) -> Iterator[tuple[NDArray[Any], ...]]:
        """Read these arrays side by side, `rows` at a time; the last chunk may be shorter."""


def open_features(
    path: str | Path,
    *required: str,
    limits: Limits = DEFAULT_LIMITS,
) -> FeatureFile:
    """Open a feature file, by its suffix, and check that it has the required arrays."""
    path = Path(path)
    if not path.is_file():
        raise CasterError(f"{path} does not exist or is not a file")
    if path.suffix == ".npz":
        file: NpzFile | ParquetFile = NpzFile(path, limits)
    elif path.suffix == ".parquet":
        file = ParquetFile(path, limits)
    else:
        raise CasterError(
            f"{path} is not a feature file (.npz or .parquet): save one with "
            "np.savez('features.npz', features=X, labels=y)"
        )
    missing = [name for name in required if name not in file.names]
    if missing:
        found = ", ".join(file.names) or "nothing"
        raise CasterError(f"{path} has no `{missing[0]}` (it has {found})")
    if file.rows == 0:
        raise CasterError(f"{path} has no rows")
    for name, limit in (("features", "features"), ("logits", "classes")):
        width = file.width(name) if name in file.names else 0
        limits.check(limit, width, f"`{name}` in {path} has rows of {width:,} numbers")
    return file


class NpzFile:
    """An .npz file, streamed from the zip archive without unpickling anything."""

    def __init__(self, path: Path, limits: Limits = DEFAULT_LIMITS) -> None:
        self.path, self.limits = path, limits
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, np.dtype[Any]] = {}
        try:
            with zipfile.ZipFile(path) as archive, ExitStack() as stack:
                for name in archive.namelist():
                    if name.endswith(".npy"):
                        member = _Member(stack, archive, name.removesuffix(".npy"), self)
                        self.shapes[member.name] = member.shape
                        self.dtypes[member.name] = member.dtype
        except PermissionError:
            raise CasterError(f"cannot read {path}: no permission") from None
        except DAMAGE:
            raise CasterError(f"{path} is truncated, damaged or not an .npz file") from None
        self.names = tuple(self.shapes)
        self.rows = self._common_rows()

    def width(self, name: str) -> int:
        """Return the number of values per row."""
        return math.prod(self.shapes[name][1:])

    def read(self, name: str) -> NDArray[Any]:
        """Read a whole array."""
        with ExitStack() as stack:
            archive = stack.enter_context(zipfile.ZipFile(self.path))
            member = _Member(stack, archive, name, self)
            return member.take(member.shape[0]) if member.shape else member.take(1).reshape(())

    def chunks(self, names: tuple[str, ...], rows: int) -> Iterator[tuple[NDArray[Any], ...]]:
        """Read these arrays side by side, `rows` at a time."""
        with ExitStack() as stack:
            archive = stack.enter_context(zipfile.ZipFile(self.path))
            members = [_Member(stack, archive, name, self) for name in names]
            for start in range(0, self.rows, rows):
                count = min(rows, self.rows - start)
                yield tuple(member.take(count) for member in members)

    def map(self, name: str) -> NDArray[Any] | None:
        """Memory-map an array; None if it is stored compressed."""
        shape, dtype = self.shapes[name], self.dtypes[name]
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(f"{name}.npy") as stream:
                _read_header(stream)
                info, header_bytes = archive.getinfo(f"{name}.npy"), stream.tell()
            if info.file_size != header_bytes + math.prod(shape) * dtype.itemsize:
                raise CasterError(f"`{name}` in {self.path} does not have the size it states")
            if info.compress_type != zipfile.ZIP_STORED:
                return None
            start = _content_offset(self.path, info) + header_bytes
            return np.memmap(self.path, dtype, "r", start, shape)
        except CasterError:
            raise
        except (ValueError, *DAMAGE):
            raise CasterError(f"`{name}` in {self.path} is damaged") from None

    def _common_rows(self) -> int:
        """Return the rows of the arrays that belong together; others may have any shape."""
        rows = {name: self.shapes[name][0] for name in ALIGNED if self.shapes.get(name)}
        if len(set(rows.values())) > 1:
            found = ", ".join(f"{count} of `{name}`" for name, count in rows.items())
            raise CasterError(f"the arrays in {self.path} differ in rows: {found}")
        return next(iter(rows.values()), 0)


class _Member:
    """One array of an open .npz file, read a few rows at a time."""

    def __init__(
        self, stack: ExitStack, archive: zipfile.ZipFile, name: str, file: NpzFile
    ) -> None:
        self.name, self.path, self.limits = name, file.path, file.limits
        what = f"`{name}` in {file.path}"
        try:
            self.stream: IO[bytes] = stack.enter_context(archive.open(f"{name}.npy"))
        except DAMAGE:
            raise CasterError(f"{what} is damaged") from None
        try:
            self.shape, fortran, self.dtype = _read_header(self.stream)
        except Exception:  # NumPy raises all kinds of errors on damaged bytes
            raise CasterError(f"{what} is not a plain NumPy array") from None
        if self.dtype.hasobject:
            raise CasterError(
                f"{what} has Python objects, which caster never unpickles: save numbers or text"
            )
        if fortran and len(self.shape) > 1:
            raise CasterError(f"{what} is stored by column: save np.ascontiguousarray of it")

    def take(self, rows: int) -> NDArray[Any]:
        """Read the next rows."""
        what = f"`{self.name}` in {self.path}"
        row_shape = self.shape[1:]
        size = rows * math.prod(row_shape) * self.dtype.itemsize
        _check_bytes(self.limits, self.name, self.path, size)
        if self.dtype.kind in "US":
            width = _text_width(self.dtype)
            self.limits.check("label_length", width, f"{what} has {width:,} characters per row")
        try:
            content = self.stream.read(size)
        except DAMAGE:
            raise CasterError(f"{what} is damaged") from None
        except MemoryError:
            raise CasterError(f"not enough memory for {what}") from None
        if len(content) < size:
            raise CasterError(f"{what} ends early: the file is truncated")
        return np.frombuffer(content, dtype=self.dtype).reshape(rows, *row_shape)


def _read_header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read shape, order and dtype of a saved array."""
    version = npy.read_magic(stream)
    if version == (2, 0) and int.from_bytes(stream.peek(4)[:4], "little") > LONGEST_HEADER:
        raise ValueError("the header is too long")
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
    shape, fortran, dtype = read(stream)
    if min(shape, default=0) < 0:
        raise ValueError("a negative number of rows")
    return shape, fortran, dtype


def _content_offset(path: Path, info: zipfile.ZipInfo) -> int:
    """Return where a stored member's bytes begin, which only its local header states."""
    with open(path, "rb") as file:
        file.seek(info.header_offset + LOCAL_HEADER - 4)
        name, extra = struct.unpack("<HH", file.read(4))
    return int(info.header_offset + LOCAL_HEADER + name + extra)


def _check_bytes(limits: Limits, name: str, path: Path, size: int) -> None:
    """Reject an array that is too large both for the limit and for the size of its file."""
    if size > EXPANSION * path.stat().st_size:
        limits.check("array_bytes", size, f"`{name}` in {path} takes {size:,} bytes")


def _text_width(dtype: np.dtype[Any]) -> int:
    return dtype.itemsize // np.dtype(f"{dtype.kind}1").itemsize


class ParquetFile:
    """An Apache Parquet file or some of its row groups, read with pyarrow (extra `parquet`)."""

    def __init__(
        self,
        path: Path,
        limits: Limits = DEFAULT_LIMITS,
        groups: Sequence[int] | None = None,  # all by default
    ) -> None:
        self.path, self.limits = path, limits
        try:
            import pyarrow.parquet
        except ModuleNotFoundError:
            raise CasterError(
                f"reading {path} needs pyarrow: pip install 'caster-tta[parquet]'"
            ) from None
        with self._damage():
            metadata = pyarrow.parquet.read_metadata(path)
            schema = metadata.schema.to_arrow_schema()
            self.names = tuple(schema.names)
            self._file = pyarrow.parquet.ParquetFile(
                path,
                metadata=metadata,
                read_dictionary=[field.name for field in schema if _is_text(field.type)],
                page_checksum_verification=True,  # for pages that have a checksum
            )
            found = range(metadata.num_row_groups)
            self.group_rows = [int(metadata.row_group(group).num_rows) for group in found]
            self._groups = list(found if groups is None else groups)
            self.rows = sum(self.group_rows[group] for group in self._groups)
        repeated = [name for name in self.names if self.names.count(name) > 1]
        if repeated:
            raise CasterError(f"{path} has two columns named `{repeated[0]}`")

    def read(self, name: str) -> NDArray[Any]:
        """Read a whole column."""
        size = self.rows * max(OBJECT_BYTES, 8 * self.width(name))
        _check_bytes(self.limits, name, self.path, size)
        with self._damage():
            return self._array(name, self._file.read_row_groups(self._groups, [name]).column(0))

    def chunks(self, names: tuple[str, ...], rows: int) -> Iterator[tuple[NDArray[Any], ...]]:
        """Read these columns side by side, `rows` at a time."""
        tables = self._tables(names, min(rows, self.rows))
        while True:
            with self._damage():  # not around the yield: the caller's errors are not damage
                table = next(tables, None)
                if table is None:
                    return
                chunk = tuple(self._array(name, table.column(name)) for name in names)
            yield chunk

    def width(self, name: str) -> int:
        """Return the number of values per row, taken from the first row.

        The metadata state it too, but some damage to them makes pyarrow end the process.
        """
        (first,) = next(self.chunks((name,), 1))
        return int(first[0].size)

    @contextmanager
    def _damage(self) -> Iterator[None]:
        """Report damage in one line, wherever in the file it is found."""
        from pyarrow import ArrowException

        try:
            yield
        except PermissionError:
            raise CasterError(f"cannot read {self.path}: no permission") from None
        except CasterError:
            raise
        except (ArrowException, OSError, UnicodeDecodeError, ValueError):
            raise CasterError(f"{self.path} is truncated, damaged or not a Parquet file") from None

    def _tables(self, names: tuple[str, ...], rows: int) -> Iterator[Any]:
        """Yield tables of exactly `rows` rows: Parquet's batches end with every row group."""
        import pyarrow

        pending = None
        for batch in self._file.iter_batches(rows, self._groups, list(names)):
            table = pyarrow.Table.from_batches([batch])
            pending = table if pending is None else pyarrow.concat_tables([pending, table])
            while pending.num_rows >= rows:
                yield pending.slice(0, rows).combine_chunks()
                pending = pending.slice(rows)
        if pending is not None and pending.num_rows:
            yield pending.combine_chunks()

    def _array(self, name: str, column: Any) -> NDArray[Any]:
        from pyarrow import ChunkedArray, types

        if isinstance(column, ChunkedArray):
            column = column.combine_chunks()
        self._check_complete(name, column)
        kind = column.type
        if types.is_dictionary(kind) and _is_text(kind.value_type):
            return self._texts(name, column)
        if not types.is_nested(kind):
            return np.asarray(column.to_pylist())
        lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        if not lists or types.is_nested(kind.value_type):
            raise CasterError(f"`{name}` in {self.path} must be numbers or lists of numbers")
        return self._matrix(name, column)

    def _texts(self, name: str, column: Any) -> NDArray[Any]:
        """Check the longest text before expanding: NumPy pads every row to it."""
        distinct = np.asarray(column.dictionary.to_pylist())
        longest = _text_width(distinct.dtype)
        what = f"`{name}` in {self.path} has a text of {longest:,} characters"
        self.limits.check("label_length", longest, what)
        _check_bytes(self.limits, name, self.path, len(column) * distinct.dtype.itemsize)
        texts: NDArray[Any] = distinct[column.indices.to_numpy(zero_copy_only=False)]
        return texts

    def _matrix(self, name: str, column: Any) -> NDArray[Any]:
        from pyarrow import compute

        lengths = compute.min_max(compute.list_value_length(column)).as_py()
        if lengths["min"] != lengths["max"]:
            raise CasterError(f"the rows of `{name}` in {self.path} differ in length")
        values = column.flatten()
        self._check_complete(name, values)
        return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(len(column), -1)

    def _check_complete(self, name: str, column: Any) -> None:
        if column.null_count:
            raise CasterError(f"`{name}` in {self.path} has missing values")


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return any(is_one(kind) for is_one in texts)
