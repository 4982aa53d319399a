"""Every fault that records can have is found, and none where there is none."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caster.errors import CasterError
from caster.io.files import file_digest
from caster_bench.records.store import (
    Pack,
    Record,
    cells_of,
    read,
    read_admission,
    scan,
    sources_of,
    write,
    write_admission,
)
from caster_bench.studies.check_cells import compared
from caster_bench.studies.results import load
from caster_bench.studies.verify import verify
from caster_bench.sweeps import Spec, Sweep
from tests.support.command_line import cli, refusal
from tests.support.forge import FOG, Run, column, flipped_byte, other_class
from tests.support.record_maker import Maker
from tests.support.sweep_files import ONE, SMALL, sweep_of


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Sweep, Path]:
    """A sweep of 16 cells and its records."""
    folder = tmp_path_factory.mktemp("made")
    sweep = sweep_of(folder, ONE)
    return sweep, Maker(sweep, checkpoints=True).make(folder / "out")


@pytest.fixture
def run(made, tmp_path) -> Run:
    sweep, out = made
    return Run(sweep, Path(shutil.copytree(out, tmp_path / "out")))


def described(**changes: Any) -> Callable[[Record], Record]:
    return lambda record: replace(record, cell=replace(record.cell, **changes))


def test_good_records_have_no_problem(made):
    sweep, out = made
    assert verify(sweep, out, out) == []


def test_records_of_another_sweep_are_rejected_in_one_line(run):
    path = run.out / "other.toml"
    path.write_text(ONE.replace("fog", "snow"))
    line = refusal(cli("bench", "verify", path, "--out", run.out))
    assert line.startswith(f"{run.out} has records of another sweep: none of its 16 cells")


def test_checkpoints_are_relative_to_the_current_folder(run, tmp_path, monkeypatch):
    (run.out / "checkpoints" / "r18.safetensors").write_bytes(b"other weights")
    monkeypatch.chdir(tmp_path)
    assert verify(run.sweep, run.out) == []
    both = run.sweep.backbones
    assert compared(run.sweep, both) == "0 of 2 checkpoint files compared"
    monkeypatch.chdir(run.out)
    assert compared(run.sweep, {"r18"}) == "1 of 2 checkpoint files compared"
    assert compared(run.sweep, both) == "2 of 2 checkpoint files compared"
    (problem,) = verify(run.sweep, run.out)
    assert problem.kind == "the checkpoint is not the one that was admitted"
    (run.out / "checkpoints" / "r18.safetensors").unlink()
    assert compared(run.sweep, both, run.out) == "1 of 2 checkpoint files compared"


def test_every_kind_of_stream_can_be_good(tmp_path):
    grid = """
    [[grid]]
    study = "coverage"
    corruptions = ["fog", "snow"]
    severities = [1, 3, 5]
    methods = ["frozen", "caster"]
    batch_sizes = [1, 20, 200]
    orders = ["shuffled", "file", "by-class", "dirichlet", {order = "long-tailed", imbalance = 4}]
    schedule = "SCHEDULE"
    backbones = ["r18"]
    [[grid]]
    study = "coverage"
    corruptions = ["fog", "snow"]
    severities = [1, 3]
    methods = ["caster"]
    batch_sizes = [20, 32]
    orders = ["shuffled", {order = "long-tailed", imbalance = 4}]
    schedule = "SCHEDULE"
    last = "drop"
    backbones = ["r18"]
    """
    head = SMALL.partition("[[grid]]")[0]
    schedules = ("continual", "gradual", "mixed")
    grids = "".join(grid.replace("SCHEDULE", schedule) for schedule in schedules)
    sweep = sweep_of(tmp_path, head + grids)
    assert verify(sweep, Maker(sweep).make(tmp_path / "out")) == []


def test_data_without_a_head(tmp_path):
    text = ONE.replace("threshold = 0.9", 'threshold = "none"')
    text = text.replace('["frozen", "source-gda", "caster", "tent"]', '["source-gda", "caster"]')
    sweep = sweep_of(tmp_path, text)
    out = Maker(sweep).make(tmp_path / "out")
    assert verify(sweep, out) == []
    folder = scan(out).cells[0]
    Run(sweep, out).forge(folder, column("samples", "frozen", 0, 1))
    assert "frozen prediction missing" in Run(sweep, out).kinds()


def test_frozen_predictions_left_out(run):
    for spec, folder in list(run.folders.items()):
        if (spec.backbone, spec.seed) == ("r18", 0):
            run.forge(folder, column("samples", "frozen", slice(None), -1))
    assert run.kinds() == {"frozen prediction missing"}


def test_no_rows_at_all(run):
    def emptied(record: Record) -> Record:
        columns = {name: values[:0] for name, values in vars(record.samples).items()}
        sizes = np.zeros_like(record.batches.size)
        return replace(
            record,
            samples=type(record.samples)(**columns),
            batches=replace(record.batches, size=sizes),
        )

    run.forge(run.folder("frozen"), emptied)
    assert run.kinds() == {"no samples"}


def test_rejected_cells_are_good_records(tmp_path):
    sweep = sweep_of(tmp_path, ONE)
    out = Maker(sweep, refused=(("vit", "digits"),)).make(tmp_path / "out")
    assert verify(sweep, out) == []
    path = sources_of(out) / "vit--digits.json"
    write_admission(out, replace(read_admission(path), reason="another"))
    kinds = {problem.kind for problem in verify(sweep, out)}
    assert kinds == {"rejected without the source's reason"}


def test_a_run_that_was_begun_and_has_no_cell_yet(run):
    shutil.rmtree(cells_of(run.out))
    problems = verify(run.sweep, run.out, run.out)
    assert [problem.kind for problem in problems] == ["missing"] * len(run.sweep.cells)


# The faults that the issue names


def test_a_deleted_cell(run):
    shutil.rmtree(run.folder("tent"))
    (problem,) = verify(run.sweep, run.out)
    assert problem.kind == "missing"
    assert problem.where == "r18 on digits, fog-1: tent; shuffled batches of 20, seed 0"


def edit_parquet(path: Path) -> None:
    """One prediction changed, as a script with pyarrow would."""
    table = pq.read_table(path)
    values = table.column("prediction").to_pylist()
    values[7] = other_class(values[7])
    at = table.column_names.index("prediction")
    column = pa.array(values, table.schema.field(at).type)
    pq.write_table(table.set_column(at, table.schema.field(at), column), path)


@pytest.mark.parametrize("method", ["frozen", "source-gda", "caster", "tent"])
def test_an_edited_prediction(run, method):
    edit_parquet(run.folder(method) / "samples.parquet")
    assert "changed or damaged" in run.kinds()


def as_written(cell: dict[str, Any]) -> str:
    """JSON laid out as caster does, with whatever digest is in it."""
    lines = (json.dumps({name: cell[name]}, separators=(",", ":"))[1:-1] for name in sort(cell))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def sort(cell: dict[str, Any]) -> list[str]:
    return [*sorted(cell.keys() - {"sha256"}), "sha256"]


@pytest.mark.parametrize("method", ["frozen", "source-gda", "caster", "tent"])
def test_an_edited_prediction_with_the_file_digest_made_again(run, method):
    folder = run.folder(method)
    edit_parquet(folder / "samples.parquet")
    cell = json.loads((folder / "cell.json").read_text())
    assert as_written(cell) == (folder / "cell.json").read_text()
    cell["files"]["samples.parquet"] = file_digest(folder / "samples.parquet")
    (folder / "cell.json").write_text(as_written(cell))
    assert "changed or damaged" in run.kinds()


def refused_row(record: Record) -> int:
    accepted = record.batches.accepted[record.samples.batch]
    return int(np.flatnonzero(~accepted)[0])


@pytest.mark.parametrize(
    ("method", "wanted", "kind"),
    [
        ("frozen", {}, "the frozen method differs from the frozen model"),
        ("tent", {"backbone": "vit"}, "an inert method differs from the frozen model"),
        ("caster", {}, "a rejected batch was not answered by the frozen model"),
    ],
)
def test_an_edited_prediction_with_every_digest_made_again(run, method, wanted, kind):
    folder = run.folder(method, **wanted)
    row = 7 if method == "frozen" else refused_row(read(folder))
    run.forge(folder, column("samples", "prediction", row, other_class))
    assert kind in run.kinds()


def test_a_swapped_checkpoint_file(run):
    (run.out / "checkpoints" / "r18.safetensors").write_bytes(b"other weights")
    assert run.kinds() == {"the checkpoint is not the one that was admitted"}


def test_a_checkpoint_unlike_the_one_the_sweep_pins(run, tmp_path):
    path = run.out / "checkpoints" / "r18.safetensors"
    right, wrong = file_digest(path), hashlib.sha256(b"another").hexdigest()
    for sha256, kinds in (
        (right, set()),
        (wrong, {"the checkpoint is not the one the sweep names"}),
    ):
        pinned = ONE.replace("r18.safetensors", f'r18.safetensors"\nsha256 = "{sha256}', 1)
        run.sweep = sweep_of(tmp_path, pinned)
        assert run.kinds() == kinds


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("digits:train", "cifar10:train", "the source data are not those the sweep names"),
        ("digits:test", "digits:train", "the target data are not those the sweep names"),
        ("[data.digits]", "[data.digits]\nsource_limit = 100", "the limit of the source data"),
        ("[data.digits]", "[data.digits]\ntarget_limit = 10", "the limit of the target data"),
        ('family = "batch"', 'family = "batch-plain"', "the family is not the one"),
    ],
)
@pytest.mark.parametrize("edited", [False, True])
def test_records_of_other_inputs_than_the_sweep_states(run, tmp_path, before, after, kind, edited):
    """What the run recorded of its sweep shows it, and the images that were read show an edit."""
    run.sweep = sweep_of(tmp_path, ONE.replace(before, after, 1))
    for path in scan(run.out).admissions if edited else ():
        admission = read_admission(path)
        stated = Maker(run.sweep).admission(admission.backbone, admission.data).seen
        write_admission(run.out, replace(admission, seen=stated))
    kinds = run.kinds()
    if edited and "family" in before:
        assert kinds == set()  # no image says it
    else:
        assert [found.startswith(kind) for found in kinds] == [True]


STATED = [("backbone", "family"), ("data", "source"), ("data", "target")]
STATED += [("data", "source_limit"), ("data", "target_limit")]


@pytest.mark.parametrize(("part", "name"), [*STATED, ("backbone", None), ("data", None)])
def test_an_admission_that_does_not_state_what_it_has_seen(run, part, name):
    for path in scan(run.out).admissions:
        admission = read_admission(path)
        stated = without(admission.seen[part], name) if name else {}
        write_admission(run.out, replace(admission, seen=admission.seen | {part: stated}))
    names = [name] if name else sorted(own for where, own in STATED if where == part)
    assert run.kinds() == {f"not stated: {', '.join(names)}"}


@pytest.mark.parametrize("part", ["source", "target"])
@pytest.mark.parametrize("name", ["name", "n", None])
def test_an_admission_that_does_not_state_its_images(run, part, name):
    for path in scan(run.out).admissions:
        admission = read_admission(path)
        images = without(getattr(admission, part), name) if name else None
        write_admission(run.out, replace(admission, **{part: images}))
    assert f"the {part} images are not stated" in run.kinds()


def test_a_limit_that_the_run_did_not_have(run, tmp_path):
    """A limit above the number of images changes none of them, but it was not the run's."""
    run.sweep = sweep_of(
        tmp_path, ONE.replace("[data.digits]", "[data.digits]\ntarget_limit = 999")
    )
    assert run.kinds() == {"the limit of the target data is not the sweep's"}


@pytest.mark.parametrize(
    ("weights", "kinds"),
    [({}, set()), ({"before": "a", "after": "a"}, {"the frozen model differs between cells"})],
)
def test_a_checkpoint_is_known_by_its_weights_not_by_its_file(run, weights, kinds):
    other = hashlib.sha256(b"other metadata").hexdigest()

    def forged(record):
        identity = record.cell.identity | {"checkpoint": other}
        return described(identity=identity, frozen=record.cell.frozen | weights)(record)

    run.forge(run.folder("tent"), forged)
    assert run.kinds() == kinds


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"moments": "0" * 64}, "moments differ from the source's"),
        ({"source": {"name": "x"}}, "the source data differs between cells"),
        ({"classes": 5}, "the number of classes differs between cells"),
        ({"target": {}}, "changed or damaged"),
        ({"settings": None}, "method settings not stated"),
        ({"settings": {"lr": 1.0}}, "the choice of settings differs between cells"),
        ({"revision": 2}, "the revision of a method differs between cells"),
        ({"settings": {"lr": 1.0}}, "method settings differ from the cell's identity"),
    ],
)
def test_a_cell_of_another_identity(run, change, kind):
    run.forge(
        run.folder("tent"),
        lambda record: described(identity=record.cell.identity | change)(record),
    )
    assert kind in run.kinds()


def without(constants: dict[str, Any], name: str) -> dict[str, Any]:
    return {own: value for own, value in constants.items() if own != name}


OTHER_CONSTANTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another value": lambda constants: constants | {"tau": 0.9},
    "an invalid value": lambda constants: constants | {"tau": "x"},
    "a value of another type": lambda constants: constants | {"safeguards": 1},
    "one more, which earlier versions had": lambda constants: constants | {"scatter_ridge": 1e-4},
    "one less, although at its default": lambda constants: without(constants, "eps"),
    "none": lambda constants: {},
    "no table": lambda constants: None,
    "names only": list,
}


@pytest.mark.parametrize("change", OTHER_CONSTANTS.values(), ids=OTHER_CONSTANTS.keys())
@pytest.mark.parametrize("alone", [True, False])
def test_cells_with_other_constants_than_the_sweeps(run, change, alone):
    """Alone or all alike; no result is read from them."""
    forged = {run.folder("tent")} if alone else set(run.folders.values())
    specs = {spec for spec, folder in run.folders.items() if folder in forged}
    for folder in forged:
        identity = read(folder).cell.identity
        changed = identity | {"constants": change(identity["constants"])}
        run.forge(folder, described(identity=changed))
    results, problems = load(run.sweep, run.out, run.out)
    assert results is None
    assert {problem.kind for problem in problems} == {"constants differ from the sweep's"}
    assert {problem.where for problem in problems} == {spec.full for spec in specs}


@pytest.mark.parametrize("file", ["samples.parquet", "batches.parquet", "cell.json"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_file(run, file, share):
    path = run.folder("caster") / file
    os.truncate(path, int(share * path.stat().st_size))
    assert {"changed or damaged"} <= run.kinds() <= {"changed or damaged", "missing"}


def test_rows_cut_off_and_signed_again(run):
    folder = run.folder("source-gda")

    def shorter(record: Record) -> Record:
        columns = {name: values[:-1] for name, values in vars(record.samples).items()}
        return replace(record, samples=type(record.samples)(**columns))

    run.forge(folder, shorter)
    assert "batch sizes differ from those stated" in run.kinds()


def test_a_record_of_another_seed_in_its_place(run):
    zero, one = run.folder("tent"), run.folder("tent", seed=1)
    shutil.rmtree(zero)
    one.rename(zero)
    kinds = run.kinds()
    assert {"changed or damaged", "missing"} <= kinds


def named(spec: Spec) -> Callable[[Record], Record]:
    """Give a record the name of another cell."""
    return lambda record: described(identity=record.cell.identity | {"spec": spec.plain()})(record)


SIGNED_AS_ANOTHER_SEED = {  # cells, and what gives them away
    "tent on r18": "different order from the stream's other cells",
    "vit": "another order than the same seed gives elsewhere",
    "": "the same order as another seed's",
}


@pytest.mark.parametrize(("which", "kind"), SIGNED_AS_ANOTHER_SEED.items())
def test_a_seed_signed_as_another(run, which, kind):
    for spec, folder in list(run.folders.items()):
        if spec.seed == 0 and which in f"{spec.method} on {spec.backbone}":
            shutil.rmtree(folder)
            forged = named(spec)(read(run.folders[replace(spec, seed=1)]))
            write(cells_of(run.out), forged.cell, forged.samples, forged.batches)
    kinds = run.kinds()
    assert kind in kinds
    assert which or kinds == {kind}


def test_a_duplicated_cell(run):
    folder = run.folder("tent")
    shutil.copytree(folder, folder.with_name("0" * 32))
    assert run.kinds() == {"changed or damaged"}


def test_a_cell_twice_under_two_keys(run):
    folder = run.folder("tent")
    record = read(folder)
    again = described(identity=record.cell.identity | {"note": 1})(record)
    write(folder.parent, again.cell, again.samples, again.batches)
    assert run.kinds() == {"twice"}


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("cells/notes.txt", "foreign"),
        ("cells/KEY/notes.txt", "changed or damaged"),
        ("sources/notes.txt", "foreign"),
        ("sources/r50--digits.json", "not of this sweep"),
        ("sources/r50--digits.caster", "foreign"),
        (f"cells/.{'0' * 32}.x.tmp", "left by a killed run"),
    ],
)
def test_a_foreign_file(run, place, kind):
    (run.out / place.replace("KEY", run.folder("tent").name)).write_text("!")
    assert kind in run.kinds()


def test_a_cell_that_is_not_in_the_sweep(run):
    spec = Spec("r18", "digits", "sar", conditions=FOG, batch_size=20)
    Maker(run.sweep).cell(run.out, spec)
    assert run.kinds() == {"not of this sweep"}


@pytest.mark.parametrize(
    ("before", "after"),
    [('"inert":false', '"inert":true'), ('"seed":0', '"seed":1'), ("\n", "\n ")],
)
def test_a_hand_in_cell_json(run, before, after):
    path = run.folder("tent") / "cell.json"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    assert "changed or damaged" in run.kinds()


def test_a_hand_in_an_admission(run):
    path = sources_of(run.out) / "r18--digits.json"
    path.write_text(path.read_text().replace("0.91", "0.99", 1))
    assert run.kinds() == {"admission changed or damaged"}


# What one digest of a cell's own cannot tell


@pytest.mark.parametrize(
    ("part", "name", "row", "value", "kind"),
    [
        ("samples", "label", 5, other_class, "different labels from the stream's other cells"),
        (
            "samples",
            "frozen",
            5,
            other_class,
            "different frozen predictions from the stream's other cells",
        ),
        ("samples", "index", 5, 6, "images missing or repeated"),
        ("samples", "index", 5, 96, "samples that are not in the target data"),
        ("samples", "index", 5, -1, "samples that are not in the target data"),
        ("samples", "prediction", 5, 4, "a prediction that is not a class"),
        ("samples", "prediction", 5, -1, "a prediction that is not a class"),
        ("samples", "batch", 5, 9, "samples of a missing batch"),
        ("batches", "size", 0, 19, "batch sizes differ from those stated"),
        ("batches", "batch", 0, 1, "batches missing"),
        ("batches", "classes", 0, 1, "classes in the batches differ from those stated"),
        ("batches", "reason", 0, "", "an unknown reason"),
        ("batches", "seconds", 0, -1.0, "an invalid time"),
        ("batches", "seconds", 0, np.inf, "an invalid time"),
    ],
)
@pytest.mark.parametrize("method", ["frozen", "tent"])  # the first of its stream, and a later one
def test_a_wrong_value_that_was_signed(run, method, part, name, row, value, kind):
    run.forge(run.folder(method), column(part, name, row, value))
    found = run.kinds()
    # which cell speaks for the stream is not said: the others then are the ones that differ
    assert kind in found


def test_the_same_wrong_label_in_all_cells_of_a_stream(run):
    for spec, folder in list(run.folders.items()):
        if (spec.backbone, spec.seed, spec.conditions) == ("r18", 0, FOG):
            run.forge(folder, column("samples", "label", 5, other_class))
    assert "other labels than in other streams of the data" in run.kinds()


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"frozen": {"before": "a", "after": "b"}}, "the frozen model changed while the cell ran"),
        ({"frozen": {}}, "the frozen model changed while the cell ran"),
        ({"frozen": {"before": "a", "after": "a"}}, "the frozen model differs between cells"),
        ({"software": {"python": "3"}}, "software not stated: torch"),
        ({"software": {"caster": "0.2.0"}}, "the version of caster differs between cells"),
        ({"hardware": {}}, "hardware not stated: device"),
        ({"hardware": ["a device"]}, "changed or damaged"),
        ({"method": {}}, "not stated whether the method is inert"),
        ({"stream": {}}, "not stated whether the stream is class-ordered"),
        (
            {"stream": {"relative_diversity": 1.0, "class_ordered": True}},
            "class-ordered stream without a class-ordered spec",
        ),
        (
            {"stream": {"relative_diversity": 0.9, "class_ordered": False}},
            "diversity differs from that stated",
        ),
        ({"admission": {}}, "admission differs from the source's"),
    ],
)
def test_a_wrong_description_that_was_signed(run, changes, kind):
    run.forge(run.folder("tent"), described(**changes))
    assert kind in run.kinds()


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"accuracy": 0.89}, "admitted below the threshold"),
        ({"accuracy": None}, "admitted below the threshold"),
        ({"threshold": 0.5}, "admitted with a threshold other than the sweep's"),
        ({"moments": None}, "admitted without checkpoint or moments"),
        ({"admitted": False}, "rejected without a reason"),
        ({"admitted": False, "reason": "x"}, "done though rejected"),
    ],
)
def test_a_wrong_admission_that_was_signed(run, changes, kind):
    path = sources_of(run.out) / "r18--digits.json"
    write_admission(run.out, replace(read_admission(path), **changes))
    assert kind in run.kinds()


def test_methods_may_differ_in_the_seed_of_their_stream_alone(run):
    for folder in run.folders.values():
        record = read(folder)
        if record.spec.method == "tent":
            settings = {"lr": 0.1, "seed": record.spec.seed}
            forged = described(
                identity=record.cell.identity | {"settings": settings},
                method=record.cell.method | {"settings": settings},
            )
            run.forge(folder, forged)
    assert run.kinds() == set()


def test_times_of_two_machines_are_not_compared(tmp_path):
    for study, kinds in (
        ("corruption", set()),
        ("cost", {"the hardware of the cost study differs between cells"}),
    ):
        text = ONE.replace('["corruption", "certificate"]', f'"{study}"')
        sweep = sweep_of(tmp_path, text)
        run = Run(sweep, Maker(sweep).make(tmp_path / study))
        hardware = read(run.folder("tent")).cell.hardware | {"device": "another"}
        run.forge(run.folder("tent"), described(hardware=hardware))
        assert run.kinds() == kinds


def test_a_class_ordered_stream_under_the_name_of_a_shuffled_one(tmp_path):
    text = ONE.replace("seeds = [0, 1]", 'orders = ["by-class"]')
    ordered = sweep_of(tmp_path, text)
    records = Maker(ordered).make(tmp_path / "ordered")
    sweep = sweep_of(tmp_path, ONE.replace("seeds = [0, 1]", ""))
    out = Maker(sweep).make(tmp_path / "out")
    shutil.rmtree(cells_of(out))
    for folder in scan(records).cells:
        record = read(folder)
        honest = record.cell.stream["relative_diversity"]
        forged = named(replace(record.spec, order="shuffled"))(record)
        forged = described(stream={"relative_diversity": honest, "class_ordered": False})(forged)
        write(cells_of(out), forged.cell, forged.samples, forged.batches)
    kinds = {problem.kind for problem in verify(sweep, out)}
    assert kinds == {"class-ordered stream without a class-ordered spec"}


def test_an_accuracy_that_the_records_do_not_bear_out(tmp_path):
    text = ONE.replace('corruptions = ["fog"]', "").replace("severities = [1]", "")
    sweep = sweep_of(tmp_path, text)
    out = Maker(sweep).make(tmp_path / "out")
    assert verify(sweep, out) == []
    run = Run(sweep, out)
    for folder in scan(out).cells:
        admission = read(folder).cell.admission | {"accuracy": 0.96}
        run.forge(folder, described(admission=admission))
    for path in scan(out).admissions:
        write_admission(out, replace(read_admission(path), accuracy=0.96))
    assert run.kinds() == {"clean accuracy differs from the admission's"}


TINY = ONE.replace("[0, 1]", "[0]").replace('"source-gda", ', "")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Sweep, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    sweep = sweep_of(folder, TINY)
    return sweep, Maker(sweep, n=24, checkpoints=True, refused=(("vit", "digits"),)).make(
        folder / "out"
    )


@given(data=st.data())
def test_any_flipped_byte_is_found(tiny, data):
    sweep, out = tiny
    with flipped_byte(data, sorted(path for path in out.rglob("*") if path.is_file())):
        assert verify(sweep, out, out)
    assert verify(sweep, out, out) == []


def test_a_run_that_was_never_begun_is_one_line(tmp_path):
    sweep, out = sweep_of(tmp_path, ONE), tmp_path / "nowhere"
    for command in ("verify", "report"):
        words = ["bench", command, str(tmp_path / "sweep.toml"), "--out", str(out)]
        words += ["-o", str(tmp_path / "report")] if command == "report" else []
        line = refusal(cli(*words))
        assert line.startswith(f"{out} has no records of {sweep.name}: run it first")
        assert "--records" in line
    assert not (tmp_path / "report").exists()
    out.mkdir()
    with pytest.raises(CasterError, match="run it first"):
        verify(sweep, out)
    with pytest.raises(CasterError, match="caster bench pack"):
        verify(sweep, Pack(out))
