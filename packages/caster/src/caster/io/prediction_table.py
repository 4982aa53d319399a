"""Prediction tables, written batch by batch as CSV or Parquet."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from caster.errors import CasterError
from caster.io.files import as_utf8, check_writable, replacing

# Prefixes of formulas in a spreadsheet, and ', so that removing one ' always restores the text.
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "'")
Columns = dict[str, list[Any]]


class Table(Protocol):
    """A table that rows are appended to."""

    def write(self, columns: Columns) -> None:
        """Append rows, as columns of equal length."""


def check_table(path: Path, spreadsheet_safe: bool = False, *inputs: Path) -> None:
    """Raise for an output that is not .csv or .parquet, or that cannot be written."""
    check_writable(path, *inputs)
    if path.suffix not in (".csv", ".parquet"):
        raise CasterError(f"{path} must end in .csv or .parquet")
    if path.suffix != ".csv" and spreadsheet_safe:
        raise CasterError(
            f"{{argument}} is for .csv files, and {path} is not one", argument="spreadsheet_safe"
        )
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ModuleNotFoundError:
            raise CasterError(
                f"writing {path} needs pyarrow: pip install 'caster-tta[parquet]'"
            ) from None


@contextmanager
def open_table(path: Path, spreadsheet_safe: bool = False) -> Iterator[Table]:
    """Open a table that replaces `path` when the block ends without an error.

    Text that is not UTF-8 is escaped by `as_utf8`. `spreadsheet_safe` puts an apostrophe before
    CSV text that starts like a formula.
    """
    with replacing(path) as temporary:
        if path.suffix == ".csv":
            with temporary.open("w", newline="", encoding="utf-8") as stream:
                yield CsvTable(stream, spreadsheet_safe)
        else:
            table = _ParquetTable(temporary)
            try:
                yield table
            finally:
                table.close()


class CsvTable:
    """A table in an open CSV file; `started` if the file already has a header."""

    def __init__(self, stream: Any, spreadsheet_safe: bool, started: bool = False) -> None:
        self.writer = csv.writer(stream)
        self.safe = spreadsheet_safe
        self.started = started

    def write(self, columns: Columns) -> None:
        """Append rows, below a header if they are the first."""
        if not self.started:
            self.writer.writerow([as_utf8(name) for name in columns])
            self.started = True
        cells = [[self._cell(value) for value in column] for column in columns.values()]
        self.writer.writerows(zip(*cells, strict=True))

    def _cell(self, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        plain = value.isascii() and "\\" not in value
        text = value if plain else as_utf8(value)
        return f"'{text}" if self.safe and text.startswith(FORMULA) else text


class _ParquetTable:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer: Any = None

    def write(self, columns: Columns) -> None:
        import pyarrow
        from pyarrow import parquet

        texts = {
            as_utf8(name): [as_utf8(value) if isinstance(value, str) else value for value in column]
            for name, column in columns.items()
        }
        table = pyarrow.table(texts, schema=self.writer and self.writer.schema)
        if self.writer is None:
            self.writer = parquet.ParquetWriter(self.path, table.schema, write_page_checksum=True)
        self.writer.write_table(table)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
