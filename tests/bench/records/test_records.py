"""Records on disk: whole or not there, equal or refused, never half believed."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caster.errors import CasterError
from caster_bench.records.digest import FormatError, canonical, content, key_of, same, to_json
from caster_bench.records.parquet import as_batches, as_samples
from caster_bench.records.schema import DONE, Batches, Samples
from caster_bench.records.store import (
    cells_of,
    is_whole,
    read,
    read_admission,
    read_cell,
    remove_leftovers,
    scan,
    write,
)
from tests.support.messages import error_line
from tests.support.record_maker import Maker, of_format
from tests.support.sweep_files import sweep_of


@pytest.fixture
def maker(tmp_path) -> Maker:
    return Maker(sweep_of(tmp_path))


@pytest.fixture
def folder(maker, tmp_path) -> Path:
    """One record, of gated caster."""
    return maker.cell(tmp_path / "out", next(s for s in maker.sweep.cells if s.method == "caster"))


def parts(folder: Path):
    record = read(folder)
    return record.cell, record.samples, record.batches


def test_what_was_written_is_what_is_read(maker, folder):
    record = read(folder)
    samples, batches = maker.columns(record.spec)
    order = np.lexsort((samples["batch"], samples["index"]))
    for name, column in samples.items():
        np.testing.assert_array_equal(getattr(record.samples, name), np.asarray(column)[order])
    for name, column in batches.items():
        np.testing.assert_array_equal(getattr(record.batches, name), column)
    assert record.cell.counts == {"samples": 96, "batches": 5}
    assert record.cell.identity == maker.identity(record.spec)
    assert record.cell == read_cell(folder)
    assert not record.batches.accepted.all()  # or the tests of verdicts test nothing
    assert record.batches.accepted.any()


def test_the_files_have_the_columns_of_the_design(folder):
    names = {
        name: pq.read_schema(folder / f"{name}.parquet").names for name in ("samples", "batches")
    }
    assert names["samples"] == ["index", "label", "frozen", "prediction", "batch"]
    assert names["batches"] == [field.name for field in fields(Batches)]
    assert names["samples"] == [field.name for field in fields(Samples)]


def test_the_key_is_the_digest_of_the_identity(folder):
    identity = json.loads((folder / "cell.json").read_text())["identity"]
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert folder.name == hashlib.sha256(text.encode()).hexdigest()[:32]


def test_nothing_measured_is_null_on_disk(tmp_path, maker):
    spec = next(s for s in maker.sweep.cells if s.method == "frozen")
    folder = maker.cell(tmp_path / "out", spec)
    table = pq.read_table(folder / "batches.parquet")
    for name in ("ratio", "confident", "confident_classes"):
        assert table.column(name).null_count == len(table)
    batches = read(folder).batches
    assert np.isnan(batches.ratio).all()
    assert (batches.confident == -1).all()


def test_an_infinite_ratio_is_kept(folder):
    cell, samples, batches = parts(folder)
    ratio = batches.ratio.copy()
    ratio[0] = np.inf
    shutil.rmtree(folder)
    write(folder.parent, cell, samples, replace(batches, ratio=ratio))
    assert read(folder).batches.ratio[0] == np.inf


def test_a_rejected_cell_has_one_file(tmp_path, maker):
    spec = next(iter(maker.sweep.cells))
    refusing = replace(maker, refused=((spec.backbone, spec.data),))
    folder = refusing.cell(tmp_path / "out", spec)
    assert [path.name for path in folder.iterdir()] == ["cell.json"]
    record = read(folder)
    assert (record.samples, record.batches) == (None, None)
    assert "threshold" in record.cell.reason


def test_done_goes_with_samples(folder):
    cell, samples, batches = parts(folder)
    for some in ((None, None), (samples, None), (None, batches)):
        with pytest.raises(CasterError, match="a finished cell"):
            write(folder.parent, cell, *some)
    with pytest.raises(CasterError, match="a finished cell"):
        write(folder.parent, replace(cell, status="refused"), samples, batches)


def test_times_and_machines_may_differ(folder):
    cell, samples, batches = parts(folder)
    later = replace(batches, seconds=batches.seconds * 2)
    elsewhere = replace(
        cell, hardware={"device": "another"}, software={"python": "4"}, memory={"peak": 3.0}
    )
    assert same((cell, samples, batches), (elsewhere, samples, later))
    before = (folder / "batches.parquet").read_bytes()
    assert write(folder.parent, elsewhere, samples, later) == folder
    assert (folder / "batches.parquet").read_bytes() == before  # the first stays
    assert not scan(folder.parents[1]).leftovers


@pytest.mark.parametrize("name", [f.name for f in fields(Samples)])
def test_samples_may_not_differ(folder, name):
    cell, samples, batches = parts(folder)
    column = getattr(samples, name).copy()
    column[3] += 1
    changed = replace(samples, **{name: column})
    assert content(cell, samples, batches) != content(cell, changed, batches)
    with pytest.raises(CasterError, match="another result of the same cell"):
        write(folder.parent, cell, changed, batches)
    assert not scan(folder.parents[1]).leftovers


@pytest.mark.parametrize(
    "name", [f.name for f in fields(Batches) if f.name not in ("seconds", "reason", "accepted")]
)
def test_batches_may_not_differ(folder, name):
    cell, samples, batches = parts(folder)
    column = getattr(batches, name).copy()
    column[1] += 1
    assert not same((cell, samples, batches), (cell, samples, replace(batches, **{name: column})))


def test_verdicts_and_descriptions_may_not_differ(folder):
    cell, samples, batches = parts(folder)
    flipped = replace(batches, accepted=~batches.accepted)
    reworded = replace(batches, reason=np.array(["else"] * len(batches.reason), dtype=object))
    inert = replace(cell, method=cell.method | {"inert": True})
    for other in ((cell, samples, flipped), (cell, samples, reworded), (inert, samples, batches)):
        assert not same((cell, samples, batches), other)


def test_two_writes_give_the_same_bytes(tmp_path, maker, folder):
    again = maker.cell(tmp_path / "second", read(folder).spec)
    for name in ("samples.parquet", "batches.parquet", "cell.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def _die_before_the_end(out: Path, folder: Path) -> None:
    os.replace = lambda *_: os._exit(9)  # type: ignore[assignment]
    cell, samples, batches = parts(folder)
    write(cells_of(out), cell, samples, batches)


def test_a_killed_writer_leaves_no_record(tmp_path, folder):
    out = tmp_path / "killed"
    process = multiprocessing.get_context("spawn").Process(
        target=_die_before_the_end, args=(out, folder)
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    found = scan(out)
    assert (len(found.cells), len(found.leftovers), found.foreign) == (0, 1, ())
    assert remove_leftovers(out) == 1
    assert not list(cells_of(out).iterdir())


def test_an_error_leaves_nothing(tmp_path, folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("caster_bench.records.store.write_batches", full)
    out = tmp_path / "full"
    with pytest.raises(CasterError, match="No space left"):
        write(cells_of(out), *parts(folder))
    assert not list(cells_of(out).iterdir())


def test_damage_is_one_line(folder):
    def broken(change) -> str:
        copy = folder.parent.parent / "copy" / folder.name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        change(copy)
        return error_line(read, copy)

    assert "is missing" in broken(lambda at: (at / "samples.parquet").unlink())
    assert "is missing" in broken(lambda at: (at / "cell.json").unlink())
    assert "foreign files: notes.txt" in broken(lambda at: (at / "notes.txt").write_text("!"))
    assert "not a record of caster" in broken(lambda at: (at / "cell.json").write_text("[]"))
    assert "not a record of caster" in broken(lambda at: (at / "cell.json").write_text("[" * 9999))
    assert "cut off" in broken(lambda at: os.truncate(at / "batches.parquet", 100))

    def reformat(at: Path) -> None:
        path = at / "cell.json"
        path.write_text(json.dumps(json.loads(path.read_text())))

    assert "changed after it was written" in broken(reformat)


def test_a_moved_record_is_noticed(folder):
    moved = folder.with_name("0" * 32)
    folder.rename(moved)
    with pytest.raises(CasterError, match="moved or copied"):
        read(moved)


def test_admissions_are_checked_with_their_state(tmp_path, maker):
    out = tmp_path / "out"
    maker.admit(out, "r18", "digits")
    (path,) = scan(out).admissions
    assert read_admission(path) == maker.admission("r18", "digits")
    state = path.with_suffix(".caster")
    state.write_bytes(b"another state")
    assert "changed or cut off" in error_line(read_admission, path)
    state.unlink()
    assert "its folder has nothing" in error_line(read_admission, path)
    other = path.with_name("vit--digits.json")
    path.rename(other)
    assert "belongs to r18--digits" in error_line(read_admission, other)


def test_scan_sorts_what_it_finds(tmp_path, folder):
    out = tmp_path / "out"
    (cells_of(out) / "notes.txt").write_text("!")
    (cells_of(out) / ("0" * 32)).write_text("a file where a folder belongs")
    (cells_of(out) / f".{'0' * 32}.x.tmp").mkdir()
    (out / "sources").mkdir()
    (out / "sources" / "alone.caster").write_text("!")
    found = scan(out)
    assert found.cells == (folder,)
    assert [path.name for path in found.foreign] == ["0" * 32, "notes.txt", "alone.caster"]
    assert len(found.leftovers) == 1
    assert scan(tmp_path / "nowhere").cells == ()


def test_columns_that_are_no_record():
    good = {"index": [0], "label": [1], "frozen": [1], "prediction": [1], "batch": [0]}
    assert as_samples(good).label.dtype == np.int16
    for wrong in (
        {"index": [None]},
        {"label": [40_000]},
        {"label": [0.5]},
        {"batch": [0, 1]},
        {"batch": ["x"]},
        {"extra": [0]},
    ):
        with pytest.raises(CasterError):
            as_samples(good | wrong)


def test_a_table_of_other_columns_is_rejected(folder):
    cell, _, _ = parts(folder)
    pq.write_table(pa.table({"index": [1]}), folder / "samples.parquet")
    sha256 = hashlib.sha256((folder / "samples.parquet").read_bytes()).hexdigest()
    forged = replace(cell, files=cell.files | {"samples.parquet": sha256})
    (folder / "cell.json").write_text(to_json(forged))
    assert read_cell(folder).status == DONE
    with pytest.raises(CasterError, match="not those of a record"):
        read(folder)


@given(
    st.dictionaries(
        st.text(max_size=3), st.integers() | st.text() | st.floats(allow_nan=False), max_size=4
    ).filter(lambda table: all(abs(v) < np.inf for v in table.values() if isinstance(v, float)))
)
def test_canonical_json_does_not_depend_on_order(table):
    backwards = dict(reversed(table.items()))
    assert canonical(table) == canonical(backwards)
    assert key_of(json.loads(canonical(table))) == key_of(table)


@given(st.permutations(range(12)))
def test_the_order_of_rows_does_not_matter(order):
    rng = np.random.default_rng(0)
    columns = {name: rng.integers(5, size=12) for name in ("label", "frozen", "prediction")}
    columns |= {"index": np.arange(12), "batch": rng.integers(3, size=12)}
    shuffled = as_samples({name: column[list(order)] for name, column in columns.items()})
    for name, column in columns.items():
        np.testing.assert_array_equal(getattr(shuffled, name), column)


def test_as_batches_takes_none_and_nan():
    columns = {
        "batch": [0, 1],
        "size": [3, 3],
        "classes": [2, 2],
        "accepted": [True, False],
        "reason": ["a", "b"],
        "ratio": [0.5, None],
        "confident": [None, 2],
        "confident_classes": [None, 1],
        "seconds": [0.1, 0.2],
    }
    found = as_batches(columns)
    np.testing.assert_array_equal(found.ratio, [0.5, np.nan])
    np.testing.assert_array_equal(found.confident, [-1, 2])
    with pytest.raises(CasterError, match="'reason' is missing"):
        as_batches(columns | {"reason": ["a", None]})


def test_a_quick_look_tells_a_record_that_was_cut_short(tmp_path):
    sweep = sweep_of(tmp_path)
    folder = Maker(sweep).cell(tmp_path / "out", next(iter(sweep.cells)))
    assert is_whole(folder)
    for path in sorted(folder.iterdir()):
        before = path.read_bytes()
        for size in (0, 3, len(before) // 2, len(before) - 1):
            path.write_bytes(before[:size])
            assert not is_whole(folder)
        path.unlink()
        assert not is_whole(folder)
        path.write_bytes(before)
    assert is_whole(folder)


def test_a_seal_is_that_of_the_text(folder):
    """Taken here by hand: of all fields but itself, as one line."""
    path = folder / "cell.json"
    before = path.read_bytes()
    of_format(path, 2)
    assert path.read_bytes() == before
    nested = before.replace(b',"n":', b',\n"n":', 1)
    assert nested != before
    for changed in (nested, before.replace(b"\n", b"\n ", 1), before + b"\n", before[:-1]):
        path.write_bytes(changed)
        assert "changed after it was written" in error_line(read_cell, folder)
    path.write_bytes(before)
    of_format(path, 2, memory={"peak": 1.5})
    assert read_cell(folder).memory == {"peak": 1.5}
    path.write_bytes(path.read_bytes().replace(b'"peak":1.5', b'"peak":NaN'))
    assert "not a record of caster" in error_line(read_cell, folder)


def test_records_of_another_format_are_no_damage(folder):
    of_format(folder / "cell.json", 1, software={"caster": "0.0.9"})
    said = "written by caster 0.0.9 in format 1, and this version reads format 2"
    for attempt in (read, read_cell, is_whole):
        with pytest.raises(FormatError, match=said):
            attempt(folder)
    of_format(folder / "cell.json", 3, something="new")
    with pytest.raises(FormatError, match="format 3"):
        is_whole(folder)
