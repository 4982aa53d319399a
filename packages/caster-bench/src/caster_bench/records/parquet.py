"""Columns as Parquet: the tables of one cell, and lists of columns for packs of many cells.

In a pack, a list that equals the one in the row above is null. The metadata hold a SHA-256 of the
file, computed with zeros in its place and checked before anything is decoded.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError
from caster.io.files import read_regular
from caster_bench.records.digest import FormatError, bytes_of
from caster_bench.records.schema import NULLS, Batches, Samples, batches_schema, samples_schema

if TYPE_CHECKING:
    import pyarrow as pa

Table = TypeVar("Table", Samples, Batches)
SORTED = ["index"]  # mostly consecutive, so deltas compress well
_CELL_OPTIONS = {"compression": "zstd", "write_statistics": False, "store_schema": False}
Column = NDArray[Any]
PACK_FORMAT = b"2"
MARK = b"caster-pack-sha256:"  # precedes the digest of the file's own bytes
ZEROS = b"0" * 64  # stands in for that digest while it is computed
CACHED_FILES = 8  # files kept in memory
_PACK_OPTIONS = {
    "compression": "zstd",
    "compression_level": 19,  # a pack is written rarely and read often
    "data_page_size": 2**30,  # repetition is only found within a page
    "write_statistics": False,
    "store_schema": False,
}


def as_samples(columns: dict[str, Any]) -> Samples:
    """Build samples from columns, sorted as records store them."""
    table = _columns(columns, Samples, samples_schema())
    order = np.lexsort((table.batch, table.index))
    return Samples(*(getattr(table, field.name)[order] for field in fields(Samples)))


def as_batches(columns: dict[str, Any]) -> Batches:
    """Build batches from columns; those in `NULLS` may hold None.

    >>> one = dict(batch=[0], size=[8], classes=[3], accepted=[True], reason=["frozen"])
    >>> none = dict(ratio=[None], confident=[None], confident_classes=[None])
    >>> as_batches(one | none | {"seconds": [0.1]}).confident
    array([-1], dtype=int32)
    """
    return _columns(columns, Batches, batches_schema())


def _columns(columns: dict[str, Any], kind: type[Table], schema: pa.Schema) -> Table:
    import pyarrow as pa

    if sorted(columns) != sorted(schema.names):
        raise CasterError(f"a record has the columns {', '.join(schema.names)}")
    try:
        # two steps: with the type given directly, Arrow silently truncates a half
        inferred = [pa.array(columns[name], from_pandas=True) for name in schema.names]
        arrays = [column.cast(own) for column, own in zip(inferred, schema.types, strict=True)]
        table = pa.Table.from_arrays(arrays, schema=schema)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise CasterError(f"these columns are not a record: {str(error).splitlines()[0]}") from None
    return from_arrow(table, kind)


def from_arrow(table: pa.Table, kind: type[Table]) -> Table:
    """Columns of a table whose schema has been checked."""
    return kind(**{name: to_numpy(table.column(name), name) for name in table.column_names})


def to_numpy(column: pa.ChunkedArray, name: str) -> Any:
    """Convert a column to NumPy; nulls are only allowed in `NULLS`."""
    if column.null_count and name not in NULLS:
        raise CasterError(f"{name!r} is missing in some rows")
    dtype = column.type.to_pandas_dtype()
    if column.null_count and dtype is not np.float64:
        column = column.fill_null(-1)
    return column.to_numpy().astype(dtype, copy=False)


def write_samples(samples: Samples, path: Any) -> None:
    """Write samples, in the order of `as_samples`, to a Parquet file."""
    _write(samples, samples_schema(), path, column_encoding={"index": "DELTA_BINARY_PACKED"})


def write_batches(batches: Batches, path: Any) -> None:
    """Write batches to a Parquet file."""
    _write(batches, batches_schema(), path)


def _write(table: Samples | Batches, schema: pa.Schema, path: Any, **options: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays = [to_arrow(getattr(table, field.name), field) for field in schema]
    dictionary = [name for name in schema.names if name not in (*SORTED, "ratio", "seconds")]
    pq.write_table(
        pa.Table.from_arrays(arrays, schema=schema),
        path,
        use_dictionary=dictionary,
        **_CELL_OPTIONS,
        **options,
    )


def to_arrow(column: Any, field: pa.Field) -> pa.Array:
    """Convert a column to Arrow; what was not measured becomes null."""
    import pyarrow as pa

    absent = None
    if field.name in NULLS:
        absent = np.isnan(column) if column.dtype.kind == "f" else column < 0
    return pa.array(column, type=field.type, mask=absent)


def read_table(content: bytes, kind: type[Table]) -> Table:
    """Read the columns from a Parquet file's bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = samples_schema() if kind is Samples else batches_schema()
    try:
        table = pq.ParquetFile(pa.BufferReader(content)).read(use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise CasterError(f"it cannot be read: {str(error).splitlines()[0]}") from None
    if not table.schema.equals(schema):
        raise CasterError("its columns are not those of a record")
    return from_arrow(table, kind)


def delta_encode(
    column: Column, reference: Column
) -> tuple[NDArray[np.int32], Column]:  # (n,), (n,)
    """Delta-encode a column against a reference: gaps between differing rows, and their values.

    >>> delta_encode(np.array([7, 7, 3, 7, 5]), np.array([7, 7, 7, 7, 7]))
    (array([2, 1], dtype=int32), array([3, 5]))
    """
    rows = np.flatnonzero(column != reference)
    return (np.diff(rows, prepend=-1) - 1).astype(np.int32), column[rows]


def delta_decode(reference: Column, gaps: Column, values: Column) -> Column:
    """Restore a column from its delta encoding against a reference.

    >>> delta_decode(np.array([7, 7, 7, 7, 7]), np.array([2, 1]), np.array([3, 5]))
    array([7, 7, 3, 7, 5])
    """
    rows = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if len(gaps) != len(values) or np.any(gaps < 0) or np.any(rows >= len(reference)):
        raise CasterError("its columns are of different lengths")
    column = reference.copy()
    column[rows] = values
    return column


class Lists:
    """A column of lists: concatenated values, and each row's slice of them."""

    def __init__(self, column: pa.ChunkedArray, name: str) -> None:
        import pyarrow as pa

        lists = column.combine_chunks()
        self.values: Column = to_numpy(pa.chunked_array([lists.values]), name)
        self.ends = lists.offsets.to_numpy()
        own = np.where(lists.is_valid(), np.arange(len(lists)), -1)
        self.source = np.maximum.accumulate(own)  # the row itself, or the last one with a list

    def at(self, number: int) -> Column:
        """Return the list of a row."""
        source = self.source[number]
        if source < 0:
            raise CasterError("a column is missing")
        return self.values[self.ends[source] : self.ends[source + 1]]


class ListFile:
    """A Parquet file of lists, decoded column by column on demand."""

    def __init__(self, path: Path, texts: Collection[str], lists: Mapping[str, pa.Field]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        with _reading(path):
            content = read_regular(path)
            if not _unchanged(content):
                raise CasterError(f"{path} was changed or cut off after it was written")
            self._file = pq.ParquetFile(pa.BufferReader(content))
            schema = self._file.schema_arrow
        self.metadata: dict[bytes, bytes] = self._file.metadata.metadata or {}
        if self.metadata.get(b"format") != PACK_FORMAT:
            raise FormatError(
                f"{path} was packed by another version of caster: use that version to read it"
            )
        wanted = [(name, pa.string()) for name in texts]
        wanted += [(name, pa.list_(field.type)) for name, field in lists.items()]
        if [(field.name, field.type) for field in schema] != wanted:
            raise CasterError(f"{path}: its columns are not those of a pack")
        self.rows = int(self._file.metadata.num_rows)
        self._fields = lists

    def texts(self, name: str) -> list[str]:
        """Return a column of strings; missing ones are empty."""
        return [text or "" for text in self._column(name).to_pylist()]

    def lists(self) -> dict[str, Lists]:
        """Return all columns of lists."""
        return {name: Lists(self._column(name), field.name) for name, field in self._fields.items()}

    def _column(self, name: str) -> pa.ChunkedArray:
        with _reading(self.path):
            return self._file.read(columns=[name], use_threads=False).column(0)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn errors of Arrow and the operating system into a CasterError."""
    import pyarrow as pa

    try:
        yield
    except FileNotFoundError:
        raise CasterError(f"{path} is missing") from None
    except (pa.ArrowException, OSError) as error:
        raise CasterError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None


def file_stamp(path: Path) -> tuple[int, int, int]:
    """Cache key of a file, which changes when the file does."""
    with _reading(path):
        now = os.stat(path)
    return now.st_ino, now.st_size, now.st_mtime_ns


def write_lists(
    path: Path,
    texts: Mapping[str, Sequence[str]],
    lists: Mapping[str, Sequence[Column | None]],
    fields: Mapping[str, pa.Field],  # element types
    split: Collection[str],  # lists of numbers with similar high bytes
    metadata: Mapping[bytes, bytes],
) -> None:
    """Write a file of strings and lists that carries its own digest."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {name: pa.array(column, pa.string()) for name, column in texts.items()}
        | {name: _lists(lists[name], field) for name, field in fields.items()}
    )
    with pq.ParquetWriter(
        path,
        table.schema,
        use_dictionary=[_leaf(name) for name in fields if name not in split],
        column_encoding={_leaf(name): "BYTE_STREAM_SPLIT" for name in split},
        **_PACK_OPTIONS,
    ) as file:
        file.write_table(table, row_group_size=len(table))  # one row group, or pages would be small
        file.add_key_value_metadata({**metadata, b"format": PACK_FORMAT, b"sha256": MARK + ZEROS})
    with open(path, "r+b") as handle:
        content = handle.read()
        handle.seek(_own_digest(content))
        handle.write(hashlib.sha256(content).hexdigest().encode())


def _leaf(name: str) -> str:
    """Parquet's name for the values of a list column."""
    return f"{name}.list.element"


def _own_digest(content: bytes) -> int:
    """Offset of the file's own digest."""
    return content.rindex(MARK) + len(MARK)


def _unchanged(content: bytes) -> bool:
    """Whether a file's bytes match its digest."""
    if MARK not in content:
        return False
    start = _own_digest(content)
    stop = start + len(ZEROS)
    blank = hashlib.sha256(content[:start] + ZEROS + content[stop:])
    return blank.hexdigest().encode() == content[start:stop]


def _lists(found: Sequence[Column | None], field: pa.Field) -> pa.Array:
    """Build one column of lists from one column per row; null if missing or unchanged."""
    import pyarrow as pa

    kept: list[Column] = []
    lengths, absent = [0], []
    above: bytes | None = None
    for column in found:
        now = None if column is None else bytes_of(column)
        again = column is None or now == above
        if column is not None and not again:
            kept.append(column)
            above = now
        lengths.append(0 if again else len(kept[-1]))
        absent.append(again)
    flat = np.concatenate(kept) if kept else np.empty(0, field.type.to_pandas_dtype())
    values = to_arrow(flat, field)
    ends = pa.array(np.cumsum(lengths), pa.int32())
    return pa.ListArray.from_arrays(ends, values, mask=pa.array(absent))
