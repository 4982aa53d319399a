"""Columns in memory to Parquet and back, with nothing in between that could be guessed."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from caster.errors import CasterError
from caster_bench.records.schema import NULLS, Batches, Samples, batches_schema, samples_schema

if TYPE_CHECKING:
    import pyarrow as pa

Table = TypeVar("Table", Samples, Batches)
SORTED = ["index"]  # rises by ones, mostly: deltas take no room
_WRITING = {"compression": "zstd", "write_statistics": False, "store_schema": False}


def as_samples(columns: dict[str, Any]) -> Samples:
    """Samples of columns in any order of rows, as they are kept."""
    table = _columns(columns, Samples, samples_schema())
    order = np.lexsort((table.batch, table.index))
    return Samples(*(getattr(table, field.name)[order] for field in fields(Samples)))


def as_batches(columns: dict[str, Any]) -> Batches:
    """Batches of columns, which may hold None where `NULLS` allows it.

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
        # in two steps: told the type at once, Arrow cuts a half off without a word
        given = [pa.array(columns[name], from_pandas=True) for name in schema.names]
        arrays = [column.cast(own) for column, own in zip(given, schema.types, strict=True)]
        table = pa.Table.from_arrays(arrays, schema=schema)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise CasterError(f"these columns are no record: {str(error).splitlines()[0]}") from None
    return from_arrow(table, kind)


def from_arrow(table: pa.Table, kind: type[Table]) -> Table:
    """Columns of a table whose schema is known to be right."""
    return kind(**{name: to_numpy(table.column(name), name) for name in table.column_names})


def to_numpy(column: pa.ChunkedArray, name: str) -> Any:
    """A column as records hold it in memory, if it is nowhere empty that must not be."""
    if column.null_count and name not in NULLS:
        raise CasterError(f"{name!r} is missing in some rows")
    dtype = column.type.to_pandas_dtype()
    if column.null_count and dtype is not np.float64:
        column = column.fill_null(-1)
    return column.to_numpy().astype(dtype, copy=False)


def write_samples(samples: Samples, path: Any) -> None:
    """A Parquet file of samples, which must be in the order of `as_samples`."""
    _write(samples, samples_schema(), path, column_encoding={"index": "DELTA_BINARY_PACKED"})


def write_batches(batches: Batches, path: Any) -> None:
    """A Parquet file of batches."""
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
        **_WRITING,
        **options,
    )


def to_arrow(column: Any, field: pa.Field) -> pa.Array:
    """A column as files hold it: what was not measured is null."""
    import pyarrow as pa

    absent = None
    if field.name in NULLS:
        absent = np.isnan(column) if column.dtype.kind == "f" else column < 0
    return pa.array(column, type=field.type, mask=absent)


def read_table(content: bytes, kind: type[Table]) -> Table:
    """The columns of a Parquet file's bytes."""
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
