"""A pack is refused for whatever a run is refused for, and for what only a pack can have."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caster.errors import CasterError
from caster.io.files import locked, move_into_place
from caster_bench.engine.pack import pack
from caster_bench.records.digest import Parts, to_json
from caster_bench.records.shard import open_streams, write_shard, write_streams
from caster_bench.records.store import Pack, Record, cells_of, read, read_admission, scan
from caster_bench.studies.verify import verify
from caster_bench.sweeps import Spec, Sweep
from tests.support.command_line import cli
from tests.support.forge import Run, column, flipped_byte, other_class
from tests.support.record_maker import Maker
from tests.support.sweep_files import ONE, sweep_of

NAME, STREAMS = "r18--digits.parquet", "digits.parquet"
Rows = list[Parts]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Sweep, Path]:
    folder = tmp_path_factory.mktemp("packed")
    sweep = sweep_of(folder, ONE)
    return sweep, Maker(sweep).make(folder / "out")


@pytest.fixture(scope="module")
def packed(made) -> Pack:
    sweep, out = made
    into = Pack(out.parent / "pack")
    done, problems = pack(sweep, out, into)
    assert problems == []
    assert (done.cells, done.new, done.missing, done.files) == (16, 16, 0, 3)
    assert done.size == sum(path.stat().st_size for path in into.folder.iterdir())
    return into


@pytest.fixture
def copy(packed, tmp_path) -> Pack:
    return Pack(Path(shutil.copytree(packed.folder, tmp_path / "pack")))


def kinds(sweep: Sweep, where: Pack) -> set[str]:
    return {problem.kind for problem in verify(sweep, where)}


def rewritten(where: Pack, change: Callable[[Rows], Rows]) -> None:
    """A file of cells changed with the library's own means, its digest made anew."""
    path = where.folder / NAME
    records = [read(row) for row in scan(where).rows if row.path == path]
    rows = change([(r.cell, r.samples, r.batches) for r in records])
    admission = to_json(read_admission(path))
    streams = open_streams(path.with_name(STREAMS))
    held = {key: streams.at(key) for key in streams.rows}
    write_streams(path.with_name(STREAMS), held | write_shard(path, admission, rows))


def edited(change: Callable[[Record], Record], method: str) -> Callable[[Rows], Rows]:
    """A change of one record, which keeps the digests that it was recorded with."""

    def edit(rows: Rows) -> Rows:
        number, row = next(
            (n, row) for n, row in enumerate(rows) if row[0].identity["spec"]["method"] == method
        )
        record = change(Record(row[0], Spec.of(row[0].identity["spec"]), row[1], row[2]))
        rows[number] = record.cell, record.samples, record.batches
        return rows

    return edit


def test_a_good_pack_has_no_problem(made, packed):
    assert verify(made[0], packed) == []


@given(data=st.data())
def test_any_flipped_byte_is_found(made, packed, data):
    with flipped_byte(data, sorted(packed.folder.iterdir())):
        assert "changed or damaged" in kinds(made[0], packed)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_file(made, copy, share):
    path = copy.folder / NAME
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    found = kinds(made[0], copy)
    assert found == {"changed or damaged", "admission changed or damaged", "missing"}


@pytest.mark.parametrize("method", ["frozen", "source-gda", "caster", "tent"])
@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("samples", "prediction", other_class),
        ("samples", "label", other_class),
        ("samples", "frozen", other_class),
        ("batches", "seconds", lambda seconds: seconds * 2),
    ],
)
def test_an_edited_table_is_not_the_one_that_was_recorded(made, copy, method, part, name, value):
    rewritten(copy, edited(column(part, name, 2, value), method))
    assert "changed or damaged" in kinds(made[0], copy)


def resigned(path: Path, change: Callable[[pa.Table], pa.Table], admission=lambda text: text):
    """A file changed as a script with pyarrow would, and the digest of its bytes made anew."""
    table, metadata = change(pq.read_table(path)), pq.read_metadata(path).metadata
    mark = b"caster-pack-sha256:"
    stated = {b"format": metadata[b"format"], b"sha256": mark + b"0" * 64}
    if b"admission" in metadata:
        stated[b"admission"] = admission(metadata[b"admission"])
    with pq.ParquetWriter(path, table.schema, store_schema=False) as file:
        file.write_table(table)
        file.add_key_value_metadata(stated)
    content = path.read_bytes()
    own = mark + hashlib.sha256(content).hexdigest().encode()
    path.write_bytes(content.replace(mark + b"0" * 64, own))


def with_column(name: str, change: Callable[[list], None]) -> Callable[[pa.Table], pa.Table]:
    def changed(table: pa.Table) -> pa.Table:
        at = table.column_names.index(name)
        values = table.column(at).to_pylist()
        change(values)
        return table.set_column(at, name, pa.array(values, table.schema.field(at).type))

    return changed


def one_prediction(lists: list) -> None:
    lists[-1][5] = (lists[-1][5] + 1) % 4


def one_description(texts: list) -> None:
    assert '"inert":false' in texts[3]
    texts[3] = texts[3].replace('"inert":false', '"inert":true')


def other_row(column: list) -> None:
    assert column[0] != column[-1]
    column[0] = column[-1]


def test_a_file_that_was_written_again_is_read(made, copy):
    for name in (NAME, STREAMS):
        resigned(copy.folder / name, lambda table: table)
    assert verify(made[0], copy) == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (NAME, with_column("prediction", one_prediction)),
        (NAME, with_column("prediction", lambda lists: lists[-1].pop())),
        (NAME, with_column("prediction_gaps", lambda lists: lists[-1].__setitem__(0, 96))),
        (NAME, with_column("frozen", lambda lists: lists[0].pop())),
        (NAME, with_column("frozen", lambda lists: lists.__setitem__(0, None))),
        (NAME, with_column("batches_size", lambda lists: lists[0].pop())),
        (NAME, with_column("cell", one_description)),
        (NAME, with_column("cell", lambda texts: texts.__setitem__(0, None))),
        (NAME, with_column("stream", lambda keys: keys.__setitem__(0, None))),
        (NAME, with_column("stream", other_row)),
        (STREAMS, with_column("index", lambda lists: lists.__setitem__(0, None))),
        (STREAMS, with_column("label", lambda lists: lists[0].pop())),
        (STREAMS, with_column("batch", lambda lists: lists[0].pop())),
        (STREAMS, with_column("batch", other_row)),
        (STREAMS, with_column("stream", other_row)),
    ],
)
def test_a_hand_in_a_file_that_knows_of_its_digest(made, copy, name, change):
    resigned(copy.folder / name, change)
    assert "changed or damaged" in kinds(made[0], copy)


def test_other_columns(made, copy):
    resigned(copy.folder / NAME, lambda table: table.drop_columns(["batches_seconds"]))
    assert "changed or damaged" in kinds(made[0], copy)


def test_a_hand_in_an_admission(made, copy):
    def better(text: bytes) -> bytes:
        assert b"0.91" in text
        return text.replace(b"0.91", b"0.99")

    resigned(copy.folder / NAME, lambda table: table, better)
    assert kinds(made[0], copy) == {"admission changed or damaged"}


def test_a_removed_cell(made, copy):
    rewritten(copy, lambda rows: rows[:-1])
    (problem,) = verify(made[0], copy)
    assert problem.kind == "missing"


def test_a_removed_file(made, copy):
    (copy.folder / NAME).unlink()
    assert kinds(made[0], copy) == {"missing", "admission missing"}


def test_streams_that_are_gone(made, copy):
    (copy.folder / STREAMS).unlink()
    found = verify(made[0], copy)
    assert [problem.kind for problem in found] == ["changed or damaged"]
    assert found[0].where == f"{copy.folder / STREAMS} is missing"


def test_streams_of_other_data(made, copy):
    shutil.copy(copy.folder / STREAMS, copy.folder / "pets.parquet")
    assert kinds(made[0], copy) == {"not of this sweep"}
    assert [problem.kind for problem in pack(*made, copy)[1]] == ["not of this sweep"]


def test_a_duplicated_cell(made, copy, tmp_path):
    rewritten(copy, lambda rows: [rows[0], *rows])
    assert kinds(made[0], copy) == {"twice"}
    with pytest.raises(CasterError, match="twice"):
        pack(made[0], made[1], copy)


def test_a_cell_in_the_file_of_another_backbone(made, copy):
    path = copy.folder / "vit--digits.parquet"
    row = read(next(row for row in scan(copy).rows if row.path == path))
    rewritten(copy, lambda rows: [*rows, (row.cell, row.samples, row.batches)])
    assert kinds(made[0], copy) == {"changed or damaged"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("notes.txt", "foreign"), (".x.tmp", "left by a killed run"), ("cells", "foreign")],
)
def test_a_foreign_file(made, copy, name, kind):
    (copy.folder / name).write_text("!")
    assert kinds(made[0], copy) == {kind}
    done, problems = pack(*made, copy)
    if kind == "foreign":
        assert done is None
        assert [problem.kind for problem in problems] == ["foreign"]
    else:  # it takes away what one that was killed left
        assert (done.cells, problems, kinds(made[0], copy)) == (16, [], set())


def test_a_foreign_file_in_the_run(made, tmp_path):
    sweep, out = made
    run = Path(shutil.copytree(out, tmp_path / "out"))
    (cells_of(run) / "notes.txt").write_text("!")
    done, problems = pack(sweep, run, Pack(tmp_path / "records"))
    assert done is None
    assert [problem.kind for problem in problems] == ["foreign"]
    assert not (tmp_path / "records").exists()


def test_the_file_of_another_backbone(made, copy):
    shutil.copy(copy.folder / NAME, copy.folder / "r50--digits.parquet")
    assert {"changed or damaged", "not of this sweep"} <= kinds(made[0], copy)


def parts_of(out: Path, tmp_path: Path) -> list[Path]:
    """A run as two machines would have made it, a backbone each."""
    parts = []
    for backbone in ("r18", "vit"):
        part = Path(shutil.copytree(out, tmp_path / backbone))
        for folder in scan(part).cells:
            if read(folder).spec.backbone != backbone:
                shutil.rmtree(folder)
        parts.append(part)
    return parts


def test_parts_are_added_to_one_another(made, packed, tmp_path):
    sweep, out = made
    into = Pack(tmp_path / "records")
    first, second = parts_of(out, tmp_path)
    done, _ = pack(sweep, first, into)
    assert (done.cells, done.new, done.missing) == (8, 8, 8)
    assert kinds(sweep, into) == {"missing", "admission missing"}
    before = {path.name: path.stat().st_mtime_ns for path in into.folder.iterdir()}
    done, _ = pack(sweep, second, into)
    assert (done.cells, done.new, done.missing) == (16, 8, 0)
    for name in (NAME, STREAMS):  # which nothing was added to
        assert (into.folder / name).stat().st_mtime_ns == before[name]
    done, _ = pack(sweep, second, into)
    assert (done.cells, done.new, done.missing) == (16, 0, 0)
    for path in packed.folder.iterdir():
        assert (into.folder / path.name).read_bytes() == path.read_bytes()
    assert not [path for path in tmp_path.rglob(".*") if path.name.startswith(".")]


def test_packs_of_two_machines_are_added_to_one_another(made, packed, tmp_path):
    sweep, out = made
    apart = [Pack(tmp_path / f"pack-{part.name}") for part in parts_of(out, tmp_path)]
    for part, own in zip(("r18", "vit"), apart, strict=True):
        pack(sweep, tmp_path / part, own)
    into = Pack(tmp_path / "records")
    assert [pack(sweep, own, into)[0].new for own in (*apart, *apart, into)] == [8, 8, 0, 0, 0]
    for path in packed.folder.iterdir():
        assert (into.folder / path.name).read_bytes() == path.read_bytes()
    with pytest.raises(CasterError, match="no records in"):
        pack(sweep, Pack(tmp_path / "nothing"), into)


def test_the_command_adds_a_pack_to_a_pack(made, packed, tmp_path):
    sweep_file = made[1].parent / "sweep.toml"
    words = ["bench", "pack", sweep_file, "--records", packed, "-o", tmp_path / "records"]
    done = cli(*words)
    assert done.exit_code == 0, done.output
    assert "16 cells in" in done.output
    done = cli(*words, "--out", made[1])
    assert done.exit_code == 1
    assert "use --out or --records, not both" in " ".join(done.output.split())


def test_what_does_not_verify_is_not_packed(made, tmp_path):
    sweep, out = made
    run = Run(sweep, Path(shutil.copytree(out, tmp_path / "out")))
    run.forge(run.folder("frozen"), column("samples", "prediction", 5, other_class))
    into = Pack(tmp_path / "records")
    done, problems = pack(sweep, run.out, into)
    assert done is None
    assert "the frozen method differs from the frozen model" in {p.kind for p in problems}
    assert not into.folder.exists()
    damaged = next(iter(cells_of(run.out).iterdir())) / "samples.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(CasterError, match="changed or cut off"):
        pack(sweep, run.out, into)
    assert not into.folder.exists()


def test_a_part_that_contradicts_the_pack_leaves_it_as_it_was(made, copy, tmp_path):
    sweep, out = made
    run = Run(sweep, Path(shutil.copytree(out, tmp_path / "out")))
    before = {path.name: path.read_bytes() for path in copy.folder.iterdir()}
    folder = run.folder("tent")
    run.forge(
        folder, lambda r: replace(r, cell=replace(r.cell, identity=r.cell.identity | {"note": 1}))
    )
    with pytest.raises(CasterError, match="was run with other settings or inputs"):
        pack(sweep, run.out, copy)
    assert {path.name: path.read_bytes() for path in copy.folder.iterdir()} == before


@pytest.fixture
def no_work(monkeypatch):
    """What is told early is told before a file is written."""
    monkeypatch.delattr("caster_bench.engine.pack.write_parts")


def test_packed_cells_that_the_sweep_no_longer_has_are_named_at_once(made, copy, tmp_path, no_work):
    _, out = made
    before = {path.name: path.read_bytes() for path in copy.folder.iterdir()}
    changed = sweep_of(tmp_path, ONE.replace('"tent"', '{method = "tent", lr = 0.5}'))
    with pytest.raises(CasterError) as caught:
        pack(changed, out, copy)
    said = str(caught.value)
    gone = [spec for spec in made[0].cells if spec.method == "tent"]
    assert said.startswith(f"the sweep does not have {len(gone)} of the recorded cells, such as ")
    assert all(spec.title in said for spec in gone)
    assert said.endswith(": leave them out with prune=")
    assert "\n" not in said
    assert {path.name: path.read_bytes() for path in copy.folder.iterdir()} == before


FEWER = ONE.replace(', "tent"', "")


def contents(pack: Pack) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in pack.folder.iterdir()}


@pytest.mark.parametrize("text", [FEWER, ONE.replace("[0, 1]", "[1]"), "without vit"])
@pytest.mark.parametrize("where", ["another folder", "in place"])
def test_a_pruned_pack_is_what_a_run_of_the_sweep_gives(copy, tmp_path, text, where):
    """Byte for byte: cells that the sweep has stay, the others and their streams go."""
    if text == "without vit":
        start = ONE.index("[backbones.vit]")
        text = ONE[:start] + ONE[ONE.index("[data.digits]") :]
    sweep = sweep_of(tmp_path, text)
    expected = Pack(tmp_path / "expected")
    pack(sweep, Maker(sweep).make(tmp_path / "run"), expected)
    into = copy if where == "in place" else Pack(tmp_path / "new")
    done, problems = pack(sweep, copy, into, prune=True)
    assert problems == []
    assert (done.cells, len(done.dropped), done.missing) == (len(sweep.cells), 16 - done.cells, 0)
    assert {read(row).spec for row in scan(into).rows} == sweep.cells.keys()
    assert contents(into) == contents(expected)
    assert verify(sweep, into) == []


def test_pruning_adds_what_a_run_has_and_keeps_the_rest(made, copy, tmp_path):
    """The run of one backbone is gone, and the sweep has a new seed."""
    text = ONE.replace(', "tent"', "").replace("[0, 1]", "[1, 2]")
    sweep = sweep_of(tmp_path, text)
    run = Maker(sweep).make(tmp_path / "run")
    for folder in scan(run).cells:
        if read(folder).spec.backbone == "vit":
            shutil.rmtree(folder)
    done, problems = pack(sweep, run, copy, prune=True)
    assert problems == []
    assert (done.cells, done.new, len(done.dropped), done.missing) == (9, 3, 10, 3)
    found = {read(row).spec for row in scan(copy).rows}
    assert found == {s for s in sweep.cells if s.backbone == "r18" or s.seed == 1}


def test_pruning_keeps_a_rejected_backbone_of_which_a_run_has_only_other_cells(tmp_path):
    """What the sweep does not have replaces nothing."""
    whole, sweep = sweep_of(tmp_path, ONE), sweep_of(tmp_path, FEWER)
    into, run = Pack(tmp_path / "pack"), tmp_path / "run"
    rejected = Maker(sweep, refused=(("vit", "digits"),))
    pack(sweep, rejected.make(tmp_path / "before"), into)
    Maker(whole).make(run)
    for folder in scan(run).cells:
        if read(folder).spec in sweep.cells:
            shutil.rmtree(folder)
    before = contents(into)
    done, problems = pack(sweep, run, into, prune=True)
    assert (problems, done.cells, done.new, len(done.dropped)) == ([], 12, 0, 4)
    assert contents(into) == before


def test_streams_of_data_that_the_sweep_lost_are_pruned(made, copy):
    shutil.copy(copy.folder / STREAMS, copy.folder / "pets.parquet")
    done, problems = pack(made[0], copy, copy, prune=True)
    assert (done.cells, done.dropped, problems) == (16, [], [])
    assert kinds(made[0], copy) == set()


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_pruning_that_was_interrupted_can_be_repeated(copy, tmp_path, monkeypatch, moved):
    sweep = sweep_of(tmp_path, ONE.replace("[0, 1]", "[1]"))
    expected = Pack(tmp_path / "expected")
    pack(sweep, copy, expected, prune=True)
    left = iter(range(moved))

    def move(path, to):
        if next(left, None) is None:
            raise OSError(28, "No space left on device")
        move_into_place(path, to)

    with monkeypatch.context() as patch:
        patch.setattr("caster_bench.engine.pack.move_into_place", move)
        with pytest.raises(CasterError, match="No space left"):
            pack(sweep, copy, copy, prune=True)
    pack(sweep, copy, copy, prune=True)
    assert contents(copy) == contents(expected)


def test_pruning_verifies_what_it_keeps(made, copy, tmp_path):
    sweep = sweep_of(tmp_path, FEWER)

    def forged(rows: Rows) -> Rows:
        (cell, samples, batches), *rest = rows
        return [(cell, replace(samples, frozen=samples.frozen[::-1].copy()), batches), *rest]

    rewritten(copy, forged)
    before = contents(copy)
    with pytest.raises(CasterError, match="changed after they were recorded"):
        pack(sweep, copy, copy, prune=True)
    assert contents(copy) == before


def test_nothing_is_pruned_with_the_sweep_of_something_else(copy, tmp_path):
    other = sweep_of(tmp_path, ONE.replace("r18", "r50").replace("vit", "swin"))
    before = contents(copy)
    with pytest.raises(CasterError, match="the sweep small has none of the recorded cells"):
        pack(other, copy, copy, prune=True)
    assert contents(copy) == before


def test_the_command_prunes(packed, tmp_path):
    sweep_of(tmp_path, FEWER)
    words = ["bench", "pack", tmp_path / "sweep.toml", "--records", packed.folder]
    words += ["-o", tmp_path / "new"]
    told = cli(*words)
    assert told.exit_code == 1
    assert "leave them out with --prune" in " ".join(told.output.split())
    assert not (tmp_path / "new").exists()
    told = cli(*words, "--prune")
    said = " ".join(told.output.split())
    assert told.exit_code == 0
    named = "r18 on digits, fog-1: tent; vit on digits, fog-1: tent"
    assert f"left out 4 cells that the sweep does not have, such as {named} 12 cells in" in said
    assert "12 cells in" in said


def test_a_run_of_another_version_is_told_at_once(made, tmp_path, no_work):
    sweep, out = made
    run = Run(sweep, Path(shutil.copytree(out, tmp_path / "out")))
    software = read(run.folder("tent")).cell.software | {"caster": "0.9.9"}
    run.forge(run.folder("tent"), lambda r: replace(r, cell=replace(r.cell, software=software)))
    done, problems = pack(sweep, run.out, Pack(tmp_path / "records"))
    assert done is None
    assert {problem.kind for problem in problems} == {"the version of caster differs between cells"}


def test_a_cell_of_the_run_that_is_not_of_the_sweep_is_told_at_once(made, tmp_path, no_work):
    fewer = sweep_of(tmp_path, ONE.replace(', "tent"', ""))
    with pytest.raises(CasterError, match="the sweep does not have 4 of the recorded cells"):
        pack(fewer, made[1], Pack(tmp_path / "records"))
    assert not (tmp_path / "records").exists()


def test_a_rejected_backbone_is_admitted_later(made, packed, tmp_path):
    """Its refusals go, all of them: a mixture would not verify."""
    sweep, out = made
    first = Maker(sweep, refused=(("vit", "digits"),)).make(tmp_path / "first")
    into = Pack(tmp_path / "records")
    done, _ = pack(sweep, first, into)
    assert (done.cells, done.new, verify(sweep, into)) == (16, 16, [])
    _, second = parts_of(out, tmp_path)
    shutil.rmtree(next(path for path in scan(second).cells))
    done, problems = pack(sweep, second, into)
    assert (problems, done.cells, done.new, done.missing) == ([], 15, 7, 1)
    assert kinds(sweep, into) == {"missing"}
    done, _ = pack(sweep, out, into)
    assert (done.cells, done.new, done.missing) == (16, 1, 0)
    for path in packed.folder.iterdir():
        assert (into.folder / path.name).read_bytes() == path.read_bytes()


def test_two_at_once(made, copy):
    with locked(copy.folder / ".lock.tmp", ""):
        with pytest.raises(CasterError, match="another `caster bench pack` is writing to"):
            pack(*made, copy)
        assert verify(made[0], copy) != []  # it is not to be read meanwhile
    assert verify(made[0], copy) == []


def test_what_a_killed_one_left_is_in_nobodys_way(made, packed, copy):
    (copy.folder / ".lock.tmp").touch()
    (copy.folder / ".new.tmp").mkdir()
    (copy.folder / ".new.tmp" / NAME).write_bytes(b"half")
    done, problems = pack(*made, copy)
    assert (done.new, problems) == (0, [])
    assert {path.name for path in copy.folder.iterdir()} == {
        path.name for path in packed.folder.iterdir()
    }


def test_the_folder_may_be_a_link(made, packed, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    done, _ = pack(*made, Pack(tmp_path / "link"))
    assert done.cells == 16
    assert (tmp_path / "there" / NAME).read_bytes() == (packed.folder / NAME).read_bytes()


def test_nothing_to_pack(made, tmp_path):
    with pytest.raises(CasterError, match="no records in"):
        pack(made[0], tmp_path / "nowhere", Pack(tmp_path / "records"))
    with pytest.raises(CasterError, match="no records in"):
        pack(made[0], tmp_path / "nowhere", Pack(tmp_path / "new" / "folder"))
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("!")
    with pytest.raises(CasterError, match="not a folder"):
        pack(*made, Pack(tmp_path / "file"))
