"""Packed records: what was packed is what is read, and nothing is packed over something else."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caster.errors import CasterError
from caster_bench.engine.pack import Part, differences, plan_parts, read_cells, write_parts
from caster_bench.engine.pack import pack as pack_run
from caster_bench.records import parquet
from caster_bench.records.digest import FormatError, key_of
from caster_bench.records.parquet import as_batches, as_samples, delta_decode
from caster_bench.records.schema import DONE, REJECTED, Cell
from caster_bench.records.shard import Row
from caster_bench.records.store import (
    Pack,
    cells_of,
    read,
    read_admission,
    read_cell,
    scan,
    write,
    write_admission,
)
from caster_bench.studies.check_cells import check_cells, read_admissions
from caster_bench.studies.provenance import mixed_revisions
from caster_bench.studies.results import load
from caster_bench.sweeps import Spec
from tests.support.consistent_records import Consistent
from tests.support.consistent_records import sweep_of as every_study
from tests.support.messages import error_line
from tests.support.record_maker import Maker
from tests.support.sweep_files import sweep_of

WORDS = st.text(st.characters(codec="utf-8"), max_size=4)
INT16, INT32 = st.integers(-(2**15), 2**15 - 1), st.integers(-(2**31), 2**31 - 1)
BLANK: dict[str, Any] = {"admission": {}, "method": {}, "frozen": {}, "stream": {}, "memory": {}}


def column(values: st.SearchStrategy, n: int) -> st.SearchStrategy:
    return st.lists(values, min_size=n, max_size=n)


@st.composite
def tables(draw: st.DrawFn) -> tuple[Any, Any]:
    """Any columns that a record can hold, sensible or not."""
    n, batches = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    samples = {"index": draw(column(INT32, n)), "batch": draw(column(INT32, n))}
    samples |= {name: draw(column(INT16, n)) for name in ("label", "frozen", "prediction")}
    count = st.none() | st.integers(0, 2**15 - 1)
    rows = {
        "batch": draw(column(INT32, batches)),
        "size": draw(column(INT32, batches)),
        "classes": draw(column(INT16, batches)),
        "accepted": draw(column(st.booleans(), batches)),
        "reason": draw(column(WORDS, batches)),
        "ratio": draw(column(st.none() | st.floats(), batches)),
        "confident": draw(column(count, batches)),
        "confident_classes": draw(column(count, batches)),
        "seconds": draw(column(st.floats(allow_nan=False), batches)),
    }
    return as_samples(samples), as_batches(rows)


def parts_of(pack: Pack, out: Path | Pack) -> list[Part]:
    return plan_parts(pack, out, read_cells(pack), read_cells(out))


def cell_of(number: int, note: str, status: str) -> Cell:
    spec = Spec("r18", "digits", "tent", seed=number // 2, conditions=(("fog", 1 + number % 2),))
    identity = {"spec": spec.plain(), "note": note}
    described = BLANK | {"software": {"python": note}, "hardware": {"device": note}}
    return Cell(identity=identity, status=status, reason=None, **described)


def equal(one: Any, other: Any) -> None:
    """Two tables, bit by bit."""
    assert type(one) is type(other)
    for field in fields(one) if one is not None else ():
        a, b = getattr(one, field.name), getattr(other, field.name)
        assert a.dtype == b.dtype
        assert a.tolist() == b.tolist() if a.dtype == object else a.tobytes() == b.tobytes()


@settings(max_examples=40)
@given(
    st.lists(st.none() | tables(), min_size=1, max_size=5), st.lists(WORDS, min_size=5, max_size=5)
)
def test_what_was_packed_is_what_is_read(sweep, records, notes):
    with tempfile.TemporaryDirectory() as folder:
        out, into = Path(folder) / "out", Path(folder) / "pack"
        into.mkdir()
        Maker(sweep).admit(out, "r18", "digits")
        for number, held in enumerate(records):
            status = REJECTED if held is None else DONE
            write(cells_of(out), cell_of(number, notes[number], status), *(held or ()))
        (part,) = parts_of(Pack(Path(folder) / "none"), out)
        assert len(part.added) == len(records)
        write_parts([part], into)
        found = {key_of((r := read(row)).cell.identity): r for row in scan(Pack(into)).rows}
        assert found.keys() == {path.name for path in scan(out).cells}
        for path in scan(out).cells:
            there, packed = read(path), found[path.name]
            assert (packed.cell, packed.spec) == (there.cell, there.spec)
            equal(packed.samples, there.samples)
            equal(packed.batches, there.batches)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return sweep_of(tmp_path_factory.mktemp("sweep"))


@pytest.fixture
def out(sweep, tmp_path) -> Path:
    return Maker(sweep, refused=(("vit", "digits"),)).make(tmp_path / "out")


@pytest.fixture
def pack(out, tmp_path) -> Pack:
    return merged(Pack(tmp_path / "nothing"), out, tmp_path / "pack")


def merged(pack: Pack, out: Path, into: Path) -> Pack:
    into.mkdir()
    write_parts(parts_of(pack, out), into)
    return Pack(into)


def names(paths) -> list[str]:
    return sorted(path.name for path in paths)


def test_a_file_a_backbone_on_data_and_one_of_streams_which_any_program_can_read(pack, out):
    found = scan(pack)
    assert names(found.admissions) == ["r18--digits.parquet", "vit--digits.parquet"]
    assert names(found.streams) == ["digits.parquet"]
    path = found.admissions[0]
    assert read_admission(path) == read_admission(out / "sources" / "r18--digits.json")
    table, streams = pq.read_table(path), pq.read_table(found.streams[0])
    assert (len(table), len(streams)) == (16, 4)
    assert streams.column("index").null_count == 3  # once for all, as are the labels
    assert streams.column("label").null_count == 3
    assert streams.column("batch").null_count == 0
    assert table.column("frozen").null_count == 16 - 4  # once a stream
    assert len(set(table.column("stream").to_pylist())) == 4


def test_predictions_are_told_by_where_they_are_not_the_frozen_models(pack):
    """Read as the documentation says, with nothing of ours."""
    path = scan(pack).admissions[0]
    table = pq.read_table(path).to_pylist()
    met = pq.read_table(path.with_name("digits.parquet")).to_pylist()
    streams = {row["stream"]: row for row in met}
    label = next(row["label"] for row in streams.values() if row["label"])
    above: dict[str, list[int]] = {}
    for number, row in enumerate(table):
        above |= {name: value for name, value in row.items() if value is not None}
        record = read(Row(path, number))
        frozen, prediction = list(label), []
        for column, name in ((frozen, "frozen"), (prediction, "prediction")):
            if name == "prediction":
                column += frozen
            at = -1
            for gap, value in zip(above[f"{name}_gaps"], above[name], strict=True):
                at += gap + 1
                column[at] = value
        assert record.samples.frozen.tolist() == frozen
        assert record.samples.prediction.tolist() == prediction
        assert record.samples.batch.tolist() == streams[row["stream"]]["batch"]


def test_the_same_records_give_the_same_bytes_whatever_the_parts(sweep, out, pack, tmp_path):
    parts = [tmp_path / "one", tmp_path / "other"]
    for number, part in enumerate(parts):
        shutil.copytree(out, part)
        for folder in scan(out).cells[number::2]:
            shutil.rmtree(cells_of(part) / folder.name)
    first = merged(Pack(tmp_path / "nothing"), parts[0], tmp_path / "first")
    both = merged(first, parts[1], tmp_path / "both")
    assert names(both.folder.iterdir()) == names(pack.folder.iterdir())
    for path in pack.folder.iterdir():
        assert (both.folder / path.name).read_bytes() == path.read_bytes()
    assert len(scan(first).rows) == 16


def test_what_is_packed_already_stays(out, pack, tmp_path):
    for folder in scan(out).cells[::3]:
        record = read(folder)
        if record.batches is not None:
            later = replace(record.batches, seconds=record.batches.seconds + 1)
            shutil.rmtree(folder)
            write(cells_of(out), record.cell, record.samples, later)
    again = tmp_path / "again"
    again.mkdir()
    parts = parts_of(pack, out)
    assert sum(len(part.both) for part in parts) == 32
    assert not any(part.added for part in parts)
    assert write_parts(parts, again) == []
    for path in pack.folder.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()


def test_only_files_that_change_are_written(out, pack, tmp_path):
    """A cell more of one backbone leaves the other's file and the streams alone."""
    folder = next(path for path in scan(out).cells if read(path).spec.backbone == "r18")
    part = Path(shutil.copytree(out, tmp_path / "part"))
    shutil.rmtree(cells_of(part) / folder.name)
    first = merged(Pack(tmp_path / "nothing"), part, tmp_path / "first")
    (tmp_path / "second").mkdir()
    changed = write_parts(parts_of(first, out), tmp_path / "second")
    assert names(changed) == ["r18--digits.parquet"]
    for path in pack.folder.iterdir():
        assert (tmp_path / "second" / path.name).read_bytes() == path.read_bytes()


def test_streams_that_no_cell_meets_any_more_go(sweep, out, tmp_path):
    maker = Maker(sweep)
    one, all_of = tmp_path / "one", tmp_path / "all"
    maker.make(all_of)
    maker.admit(one, "vit", "digits")
    spec = next(spec for spec in sweep.cells if spec.backbone == "vit")
    maker.cell(one, spec)
    pack = merged(Pack(tmp_path / "nothing"), all_of, tmp_path / "pack")
    for path in scan(pack).admissions:
        path.unlink()
    again = merged(pack, one, tmp_path / "again")
    assert names(again.folder.iterdir()) == ["digits.parquet", "vit--digits.parquet"]
    assert len(pq.read_table(again.folder / "digits.parquet")) == 1
    assert read(scan(again).rows[0]).spec == spec


def test_a_rejected_backbone_gives_way_as_a_whole(sweep, out, pack, tmp_path):
    """To whatever a later run has of it, be it one cell of many."""
    later = tmp_path / "later"
    admitted = Maker(sweep)
    admitted.admit(later, "vit", "digits")
    spec = next(spec for spec in sweep.cells if spec.backbone == "vit")
    admitted.cell(later, spec)
    r18, vit = parts_of(pack, later)
    assert (len(r18.packed), r18.added) == (16, {})
    assert (vit.packed, list(vit.added), vit.admission.admitted) == ({}, [spec], True)
    both = merged(pack, later, tmp_path / "both")
    found = [read(row) for row in scan(both).rows]
    assert {r.spec for r in found if r.spec.backbone == "vit"} == {spec}
    assert {r.cell.status for r in found} == {DONE}
    with pytest.raises(CasterError, match="differ in moments, accuracy, admitted, reason"):
        parts_of(both, out)  # a checkpoint that was there and failed is no want of one


def test_a_refusal_for_want_of_a_checkpoint_takes_nothing_away(sweep, tmp_path):
    there = Maker(sweep).make(tmp_path / "there")
    pack = merged(Pack(tmp_path / "nothing"), there, tmp_path / "pack")
    bare = Consistent(sweep, missing=("vit",)).make(tmp_path / "bare")
    for folder in scan(bare).cells:  # a machine that has nothing but refusals
        if read(folder).samples is not None:
            shutil.rmtree(folder)
    assert len(scan(bare).cells) == 16
    parts = parts_of(pack, bare)
    assert [(len(part.packed), part.added, part.both) for part in parts] == [(16, {}, {})] * 2
    first = merged(Pack(tmp_path / "nothing"), bare, tmp_path / "refused")
    path = bare / "sources" / "vit--digits.json"
    write_admission(bare, replace(read_admission(path), reason="it is another"))
    (part,) = (part for part in parts_of(first, bare) if part.path.stem == "vit--digits")
    assert (part.packed, len(part.added)) == ({}, 16)  # of two refusals the later one tells


def test_another_result_of_a_cell_is_rejected(out, pack, tmp_path):
    folder = next(path for path in scan(out).cells if read(path).samples is not None)
    record = read(folder)
    prediction = record.samples.prediction.copy()
    prediction[3] += 1
    shutil.rmtree(folder)
    write(
        cells_of(out), record.cell, replace(record.samples, prediction=prediction), record.batches
    )
    with pytest.raises(CasterError, match="disagrees with the packed result of the same cell"):
        merged(pack, out, tmp_path / "again")


def test_a_later_revision_of_a_method_replaces_its_cells(out, pack, tmp_path):
    """The checkpoint's file may have other bytes, as long as its moments are the same."""
    admission = read_admission(out / "sources" / "r18--digits.json")
    write_admission(out, replace(admission, checkpoint="a" * 64))
    changed = set()
    for folder in scan(out).cells:
        record = read(folder)
        if record.spec.backbone != "r18":
            continue
        identity = record.cell.identity | {"checkpoint": "a" * 64}
        if record.spec.method == "caster":
            identity |= {"revision": 7}
            changed.add(record.spec)
        shutil.rmtree(folder)
        cell = replace(record.cell, identity=identity)
        write(cells_of(out), cell, record.samples, record.batches)
    part = parts_of(pack, out)[0]
    assert part.added.keys() == changed
    assert not part.both.keys() & changed
    later = merged(pack, out, tmp_path / "later")
    found = {read(row).spec: read(row).cell.identity for row in scan(later).rows}
    assert {spec for spec, identity in found.items() if identity.get("revision") == 7} == changed
    assert len(found) == len(scan(pack).rows)
    earlier = merged(later, pack, tmp_path / "earlier")  # an older revision changes nothing
    path = "r18--digits.parquet"
    assert (earlier.folder / path).read_bytes() == (later.folder / path).read_bytes()


def record_again(sweep, out, method, family=None):
    """Another revision beside the first, made with another file of the same weights."""
    found = [
        record
        for record in map(read, scan(out).cells)
        if record.spec.method == method
        and family in (None, sweep.backbones[record.spec.backbone].family)
    ]
    for record in found:
        identity = record.cell.identity | {"revision": 7, "checkpoint": "a" * 64}
        cell = replace(record.cell, identity=identity)
        write(cells_of(out), cell, record.samples, record.batches)
    return len(found)


def test_a_new_revision_is_packed_with_its_ungated_form(tmp_path):
    sweep = every_study(tmp_path)
    out = Consistent(sweep, n=64, classes=4).make(tmp_path / "out")
    packed = Pack(tmp_path / "pack")
    assert pack_run(sweep, out, packed)[1] == []
    gated = record_again(sweep, out, "caster")
    done, problems = pack_run(sweep, out, packed)
    assert done is None
    assert {problem.kind for problem in problems} == {
        "the revision of a method differs between cells"
    }
    ungated = record_again(sweep, out, "caster-ungated")
    done, problems = pack_run(sweep, out, packed)
    assert problems == []
    assert (done.cells, done.new, done.replaced) == (len(sweep.cells), 0, gated + ungated)


def test_families_of_backbones_may_have_different_revisions_and_the_report_lists_them(tmp_path):
    sweep = every_study(tmp_path)
    out = Consistent(sweep, n=64, classes=4).make(tmp_path / "out")
    packed = Pack(tmp_path / "pack")
    assert pack_run(sweep, out, packed)[1] == []
    again = sum(record_again(sweep, out, name, "layer") for name in ("caster", "caster-ungated"))
    done, problems = pack_run(sweep, out, packed)
    assert (problems, done.replaced) == ([], again)
    results, problems = load(sweep, packed)
    assert problems == []
    gated, ungated = mixed_revisions(results, "corruption")
    titles = {"batch": set(), "layer": set()}
    for spec in results.scores:
        backbone = sweep.backbones[spec.backbone]
        if spec.method == "caster" and "corruption" in sweep.cells[spec]:
            titles[backbone.family].add(backbone.title)
    batch, layer = ("; ".join(sorted(titles[family])) for family in ("batch", "layer"))
    assert gated.startswith(f"caster has revision 1 on {batch} and revision 7 on {layer}.")
    assert ungated.startswith("caster-ungated has")


def identities(sweep, out, change):
    """Cells of a run and their admissions, with changes to the identity by cell."""
    found = {}
    for record in map(read, scan(out).cells):
        identity = record.cell.identity | change(record)
        method = record.cell.method | {"settings": identity["settings"]}
        found[record.spec] = replace(record.cell, identity=identity, method=method)
    pairs = {(spec.backbone, spec.data) for spec in found}
    return found, read_admissions(out, pairs)[0]


def test_a_family_may_be_recorded_with_other_settings(tmp_path):
    """As if a later version had another default and a new revision."""
    sweep = every_study(tmp_path)
    out = Consistent(sweep, n=64, classes=4).make(tmp_path / "out")
    families = {name: backbone.family for name, backbone in sweep.backbones.items()}

    def kinds(old, revision=2):
        def change(record):
            if record.spec.backbone in old or not record.spec.method.startswith("tent"):
                return {}
            settings = record.cell.identity["settings"] | {"norms": ["other"]}
            return {"settings": settings, "revision": revision}

        return {problem.kind for problem in check_cells(*identities(sweep, out, change), sweep)}

    layer = {name for name, family in families.items() if family == "layer"}
    assert kinds(layer) == set()
    (kind,) = kinds(layer, revision=1)
    assert kind == "the choice of settings differs between cells"
    batch = families.keys() - layer
    assert len(batch) > 1
    assert "the revision of a method differs between cells" in kinds(layer | {min(batch)})


def test_a_cell_that_was_made_otherwise_is_rejected(out, pack, tmp_path):
    """The same cell of the sweep under another key: defaults changed, for one."""
    folder = next(path for path in scan(out).cells if read(path).samples is not None)
    record = read(folder)
    shutil.rmtree(folder)
    identity = record.cell.identity | {"settings": {"lr": 0.5}}
    other = write(
        cells_of(out), replace(record.cell, identity=identity), record.samples, record.batches
    )
    with pytest.raises(CasterError, match="with other settings or inputs than") as e:
        parts_of(pack, out)
    assert f"delete {pack.folder / 'r18--digits.parquet'}" in str(e.value)
    assert f"{record.spec.full} in {other}" in str(e.value)
    write(cells_of(out), record.cell, record.samples, record.batches)
    with pytest.raises(CasterError, match="is recorded twice"):
        parts_of(Pack(tmp_path / "nothing"), out)


def test_an_admission_of_something_else_is_rejected(out, pack, tmp_path):
    path = out / "sources" / "r18--digits.json"
    before = read_admission(path)
    write_admission(out, replace(before, seen={"files": "of another machine"}))
    assert scan(merged(pack, out, tmp_path / "again")).rows
    for name, value in (("moments", "0" * 64), ("accuracy", 0.95), ("constants", {})):
        other = replace(before, **{name: value})
        assert differences(before, other) == [name]
        write_admission(out, other)
        with pytest.raises(CasterError, match=f"differ in {name}:"):
            merged(pack, out, tmp_path / f"not-{name}")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_file_cut_short_is_one_line(pack, share):
    path = scan(pack).admissions[0]
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    rows = [row for row in scan(pack).rows if row.path == path]
    assert len(rows) == 1
    for attempt in (lambda: read_cell(rows[0]), lambda: read_admission(path)):
        assert error_line(attempt) == f"{path} was changed or cut off after it was written"


def test_a_file_that_is_none_of_ours(pack, tmp_path):
    path = scan(pack).admissions[0]
    path.rename(path.with_name("r50--digits.parquet"))
    with pytest.raises(CasterError, match="belongs to r18--digits"):
        read_admission(path.with_name("r50--digits.parquet"))
    assert "it belongs to r18 on digits" in error_line(read, scan(pack).rows[0])
    assert "is missing" in error_line(read_admission, path)
    (pack.folder / "digits.parquet").unlink()
    row = next(row for row in scan(pack).rows if row.path.stem == "r50--digits")
    path.with_name("r50--digits.parquet").rename(path)
    assert (
        error_line(read, Row(path, row.number)) == f"{path.with_name('digits.parquet')} is missing"
    )
    (pack.folder / "notes.txt").write_text("!")
    (pack.folder / ".x.parquet.tmp").write_text("!")
    found = scan(pack)
    assert [path.name for path in found.foreign] == ["notes.txt"]
    assert [path.name for path in found.leftovers] == [".x.parquet.tmp"]


@pytest.mark.parametrize(
    ("gaps", "values"), [([0], []), ([], [1]), ([4], [1]), ([1, 2], [1, 1]), ([-1], [1])]
)
def test_places_that_there_are_not(gaps, values):
    column = np.zeros(4, np.int16)
    with pytest.raises(CasterError, match="different lengths"):
        delta_decode(column, np.array(gaps, np.int32), np.array(values, np.int16))
    last = delta_decode(column, np.array([3], np.int32), np.array([5], np.int16))
    assert last.tolist() == [0, 0, 0, 5]


def test_a_pack_of_another_version_is_no_damage(pack, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "PACK_FORMAT", b"3")
    other = Pack(Path(shutil.copytree(pack.folder, tmp_path / "other")))
    path = scan(other).admissions[0]
    for attempt in (lambda: read_admission(path), lambda: read(Row(path, 0))):
        with pytest.raises(FormatError, match="packed by another version of caster"):
            attempt()
