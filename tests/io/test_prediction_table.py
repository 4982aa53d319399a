"""Tables of predictions: the contents of cells in CSV and Parquet files."""

from __future__ import annotations

import csv
import os
import re

import pyarrow.parquet as pq
import pytest

from caster import CasterError
from caster.io.prediction_table import check_table, open_table

NAMES = [os.fsdecode(b"caf\xe9.png"), "café.png", "a\\b.png", "a\\udce9.png", "\\x41.png"]
NAMES += [os.fsdecode(b"\\\xff.png"), "lone \ud800.png", "\\\\udce9"]


def original(cell: str) -> str:
    """The inverse given in docs/command-line.md."""
    if not re.search(r"\\ud[89a-f][0-9a-f]{2}", cell):
        return cell
    return re.sub(
        r"\\(\\|u[0-9a-f]{4})",
        lambda found: "\\" if found[1] == "\\" else chr(int(found[1][1:], 16)),
        cell,
    )


def written(path, values, **options):
    with open_table(path, **options) as table:
        table.write({"row": list(range(len(values))), "image": values})
    if path.suffix == ".parquet":
        return pq.read_table(path)["image"].to_pylist()
    with path.open(encoding="utf-8", newline="") as file:
        return [row[1] for row in csv.reader(file)][1:]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_names_that_are_not_utf8_can_be_restored(tmp_path, suffix):
    cells = written(tmp_path / f"o{suffix}", NAMES)
    assert [original(cell) for cell in cells] == NAMES
    assert cells[:3] == ["caf\\udce9.png", "café.png", "a\\b.png"]


def test_formulas_are_escaped_only_on_request(tmp_path):
    cells = ["=1+1", "+1", "-1", "@A1", "\tx", "\rx", "'=", "cat", "a=b", ""]
    assert written(tmp_path / "a.csv", cells) == cells
    safe = written(tmp_path / "b.csv", cells, spreadsheet_safe=True)
    assert safe == [f"'{cell}" for cell in cells[:7]] + cells[7:]


def test_numbers_stay_numbers(tmp_path):
    assert written(tmp_path / "a.csv", [-1, 2.5], spreadsheet_safe=True) == ["-1", "2.5"]


def test_a_column_may_be_empty_in_a_later_batch(tmp_path):
    path = tmp_path / "o.parquet"
    with open_table(path) as table:
        for frozen in (["cat", "dog"], [None, None], ["dog", "cat"]):
            table.write({"row": [0, 1], "frozen": frozen})
    assert pq.read_table(path)["frozen"].to_pylist() == ["cat", "dog", None, None, "dog", "cat"]


def test_parquet_needs_no_escaping(tmp_path):
    with pytest.raises(CasterError, match=r"is for \.csv"):
        check_table(tmp_path / "a.parquet", True)


def test_a_flipped_bit_in_a_table_is_detected(tmp_path):
    path = tmp_path / "o.parquet"
    written(path, [f"{i}.png" for i in range(200)])
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 1
    path.write_bytes(content)
    with pytest.raises(OSError, match="CRC"):
        pq.ParquetFile(path, page_checksum_verification=True).read()
