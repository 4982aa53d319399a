"""Predictions written row by row: CSV or Parquet, by the suffix of the file."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from caster.errors import CasterError
from caster.files import check_writable, replacing

Columns = dict[str, list[Any]]


class Table(Protocol):
    """Something that takes columns of equal length, a few rows at a time."""

    def write(self, columns: Columns) -> None:
        """Append rows."""
        ...


def check_table(path: Path, *inputs: Path) -> None:
    """Refuse an output of another kind, or one that cannot be written."""
    check_writable(path, *inputs)
    if path.suffix not in (".csv", ".parquet"):
        raise CasterError(f"{path} must end in .csv or .parquet")
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ModuleNotFoundError:
            raise CasterError(
                f"writing {path} needs pyarrow: pip install 'caster-tta[parquet]'"
            ) from None


@contextmanager
def open_table(path: Path) -> Iterator[Table]:
    """A table that takes the place of `path` when the block ends, and not before."""
    with replacing(path) as temporary:
        if path.suffix == ".csv":
            with temporary.open("w", newline="", encoding="utf-8") as stream:
                yield _CsvTable(stream)
        else:
            table = _ParquetTable(temporary)
            try:
                yield table
            finally:
                table.close()


class _CsvTable:
    def __init__(self, stream: Any) -> None:
        self.writer = csv.writer(stream)
        self.started = False

    def write(self, columns: Columns) -> None:
        if not self.started:
            self.writer.writerow(columns)
            self.started = True
        self.writer.writerows(zip(*columns.values(), strict=True))


class _ParquetTable:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer: Any = None

    def write(self, columns: Columns) -> None:
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table(columns)
        if self.writer is None:
            self.writer = parquet.ParquetWriter(self.path, table.schema)
        self.writer.write_table(table)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
