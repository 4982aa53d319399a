"""Atomic writes: content synced before the rename, the folder after it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

import caster
import caster_bench
from caster.io.feature_cache import write_entry
from caster.io.files import move_into_place, replacing
from caster.io.prediction_table import open_table
from caster.io.signed_tensors import write as write_tensors
from caster.report.html import write as write_page
from tests.conftest import problem
from tests.support.record_maker import Maker
from tests.support.sweep_files import sweep_of

SOURCES = [Path(package.__file__).parent for package in (caster, caster_bench)]
RENAMES = re.compile(r"\bos\.(replace|rename|renames)\(|\.rename\(|\bshutil\.move\(")


def state(folder):
    caster.Caster().fit(*problem()).save(folder / "s.caster")


def checkpoint(folder):
    write_tensors({"weight": np.zeros(3)}, {"format": "x"}, folder / "c.safetensors")


def csv(folder):
    with open_table(folder / "t.csv") as table:
        table.write({"label": ["a", "b"]})


def parquet(folder):
    with open_table(folder / "t.parquet") as table:
        table.write({"label": ["a", "b"]})


def page(folder):
    write_page("<p>", folder / "p.html")


def cache_entry(folder):
    with write_entry(folder, "k", 2) as entry:
        entry.append({"rows": np.arange(2), "features": np.zeros((2, 3))}, {})


def record(folder):
    maker = Maker(sweep_of(folder))
    maker.cell(folder, next(iter(maker.sweep.cells)))


def folder_of_files(folder):
    (folder / "made" / "deep").mkdir(parents=True)
    (folder / "made" / "deep" / "figure.svg").write_text("<svg>")
    (folder / "made" / "table.csv").write_text("a,b")
    move_into_place(folder / "made", folder / "report")


@pytest.mark.parametrize(
    "write", [state, checkpoint, csv, parquet, page, cache_entry, record, folder_of_files]
)
def test_content_is_synced_before_the_rename_and_the_folder_after(tmp_path, write, monkeypatch):
    synced: list[tuple[int, int]] = []  # inode and size
    renames = []
    fsync, replace = os.fsync, os.replace

    def recording_fsync(handle):
        fsync(handle)
        synced.append((os.fstat(handle).st_ino, os.fstat(handle).st_size))

    def recording_replace(made, target):
        found = [Path(made), *Path(made).rglob("*")]
        for path in found:
            entry = path.stat()
            sizes = [size for inode, size in synced if inode == entry.st_ino]
            assert sizes, f"{path} is not on the disk"
            assert path.is_dir() or sizes[-1] == entry.st_size, f"{path} was changed since"
        replace(made, target)
        renames.append((Path(target).parent.stat().st_ino, len(synced)))

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", recording_replace)
    write(tmp_path)
    assert renames
    for parent, before in renames:
        assert synced[before][0] == parent


def test_nothing_else_renames():
    """Files are only replaced by `move_into_place`."""
    found = [
        str(path.relative_to(source))
        for source in SOURCES
        for path in source.rglob("*.py")
        for _ in RENAMES.findall(path.read_text())
    ]
    assert found == ["io/files.py"]


def test_a_disk_that_fails_to_sync_leaves_the_old_file(tmp_path, monkeypatch):
    def fail(handle):
        raise OSError(5, "Input/output error")

    path = tmp_path / "page.html"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", fail)
    with (
        pytest.raises(caster.CasterError, match="Input/output error"),
        replacing(path) as temporary,
    ):
        temporary.write_text("new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
