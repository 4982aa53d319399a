"""Runs that meet trouble: rejected checkpoints, failures, kills, Ctrl-C, changed inputs."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from caster.errors import CasterError
from caster_bench.cli.bench import show_summary
from caster_bench.data import open_data
from caster_bench.engine.executors import DIED
from caster_bench.engine.executors.local import LocalExecutor
from caster_bench.engine.plan import Costs, groups_of, make_plan
from caster_bench.engine.record import round_seconds
from caster_bench.engine.run import run
from caster_bench.engine.run_context import RunContext
from caster_bench.engine.train import checkpoint
from caster_bench.methods import tent
from caster_bench.records.digest import content
from caster_bench.records.schema import REJECTED
from caster_bench.records.store import cells_of, read, scan
from caster_bench.studies.verify import verify
from tests.support.command_line import cli
from tests.support.inline import LAYERNORM, SMALL, run_inline, sweep_of
from tests.support.miniature import ENVIRONMENT, start
from tests.support.record_maker import of_format
from tests.support.sampling import sampled


def contents(out, without=()):
    found = [read(folder) for folder in scan(out).cells if folder not in without]
    return {r.spec: content(r.cell, r.samples, r.batches) for r in found}


@pytest.fixture(scope="module")
def small(tmp_path_factory, checkpoints):
    """A small sweep, run without trouble."""
    folder = tmp_path_factory.mktemp("small")
    sweep = sweep_of(folder)
    summary, executor = run_inline(sweep, folder / "out", checkpoints)
    assert summary.failures == []
    return sweep, folder / "out", executor


def test_one_frozen_pass_serves_the_methods_of_a_stream(small):
    _, _, executor = small
    kinds = [(task.kind, len(task.specs)) for task in executor.performed]
    assert kinds == [("admit", 1), ("group", 3), ("group", 3)]


def test_the_cells_of_a_study_alone(tmp_path, checkpoints, small):
    sweep, _, _ = small
    with pytest.raises(CasterError, match="no study 'corruptions'"):
        run_inline(sweep, tmp_path / "out", checkpoints, only=["corruptions"])
    with pytest.raises(CasterError, match="small has no cells of the study cost"):
        run_inline(sweep, tmp_path / "out", checkpoints, only=["cost"])


ABSENT = """
[backbones.absent]
family = "layer"
checkpoint = "checkpoints/absent.safetensors"
"""


def test_the_cells_of_some_backbones_alone(tmp_path, checkpoints, small):
    """Other backbones are not looked for and not recorded as rejected."""
    sweep, out = sweep_of(tmp_path, SMALL + ABSENT), tmp_path / "out"
    with pytest.raises(CasterError, match="no backbone of small called 'resnet50'"):
        run_inline(sweep, out, checkpoints, backbones=["resnet50"])
    summary, executor = run_inline(sweep, out, checkpoints, backbones=["resnet"])
    assert (summary.cells, summary.rejected, summary.rejections) == (6, 0, {})
    assert {task.specs[0].backbone for task in executor.performed} == {"resnet"}
    assert contents(out) == contents(small[1])
    again, executor = run_inline(sweep, out, checkpoints, backbones=["resnet"])
    assert (again.already, executor.performed) == (0, [])
    both, _ = run_inline(sweep, out, checkpoints, backbones=["absent", "resnet"])
    assert (both.cells, both.rejected, both.already) == (6, 6, 6)


def test_the_cells_of_some_methods_alone(tmp_path, checkpoints, small):
    sweep, out = sweep_of(tmp_path, SMALL), tmp_path / "out"
    with pytest.raises(CasterError, match="no method of small called 'tant': did you mean 'tent'"):
        run_inline(sweep, out, checkpoints, methods=["tant"])
    summary, executor = run_inline(sweep, out, checkpoints, methods=["tent"])
    done = {spec.method for task in executor.performed for spec in task.specs}
    assert (summary.cells, done) == (2, {"tent"})
    assert contents(out).items() <= contents(small[1]).items()


def test_a_plan_of_some_backbones(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL + ABSENT)
    words = ["bench", "plan", str(path), "--out", str(tmp_path / "out"), "--backbone", "absent"]
    result = cli(*words)
    assert result.exit_code == 0, result.output
    assert "6 cells: 0 done, 0 rejected, 6 missing in 2 streams" in result.output
    assert "to be admitted first: absent on digits" in result.output
    assert "12 cells" in cli(*words, "--backbone", "resnet").output


def test_a_failing_cell_stops_no_other(tmp_path, checkpoints, small):
    text = SMALL.replace('"tent"', '"tent", {method = "knn", k = 5000}, {method = "tent", lr = -1}')
    sweep = sweep_of(tmp_path, text)
    summary, _ = run_inline(sweep, tmp_path / "out", checkpoints)
    assert len(summary.failures) == 4
    whats = {what.partition(": ")[2] for what, _ in summary.failures}
    assert whats == {"knn (k 5000)", "tent (lr -1)"}
    assert any("5000 neighbours" in why for _, why in summary.failures)
    assert contents(tmp_path / "out") == contents(small[1])
    kinds = {problem.kind for problem in verify(sweep, tmp_path / "out", checkpoints)}
    assert kinds == {"missing"}


def test_rejections_are_recorded_and_removed_once_admitted(tmp_path, checkpoints, small):
    root = tmp_path / "root"
    weak = SMALL.replace("0.85", "0.999")
    sweep, out = sweep_of(tmp_path, weak), tmp_path / "out"
    summary, _ = run_inline(sweep, out, root)
    (reason,) = summary.rejections.values()
    assert summary.rejected == 6
    assert "there is no checkpoint checkpoints/resnet.safetensors" in reason
    assert {read(folder).cell.status for folder in scan(out).cells} == {REJECTED}
    assert verify(sweep, out, root) == []
    shutil.copytree(checkpoints / "checkpoints", root / "checkpoints")
    summary, _ = run_inline(sweep, out, root)
    (reason,) = summary.rejections.values()
    assert "is below the threshold 99.9%" in reason
    assert (summary.rejected, summary.foreign, len(scan(out).cells)) == (6, [], 6)
    assert verify(sweep, out, root) == []
    admitted = sweep_of(tmp_path)
    summary, _ = run_inline(admitted, out, root)
    assert (summary.cells, summary.rejected, summary.foreign) == (6, 0, [])
    assert verify(admitted, out, root) == []
    assert contents(out) == contents(small[1])


def test_rejections_are_removed_backbone_by_backbone(tmp_path, checkpoints, small):
    """Another backbone that is not decided yet, and not part of this run, holds nothing back."""
    root, out = tmp_path / "root", tmp_path / "out"
    second = ABSENT.replace("absent", "convnext")
    sweep = sweep_of(tmp_path, SMALL + second)
    assert run_inline(sweep, out, root)[0].rejected == 12
    stale = {folder.name for folder in scan(out).cells}
    shutil.copytree(checkpoints / "checkpoints", root / "checkpoints")
    summary, _ = run_inline(sweep, out, root, backbones=["resnet"])
    assert (summary.cells, summary.rejected, summary.foreign) == (6, 0, [])
    statuses = {read(folder).cell.status for folder in scan(out).cells if folder.name in stale}
    assert (len(scan(out).cells), statuses) == (12, {REJECTED})
    assert verify(sweep, out, tmp_path) == []
    run_inline(sweep, out, root)
    assert not stale & {folder.name for folder in scan(out).cells}
    assert verify(sweep, out, root) == []


def test_stale_rejections_of_an_earlier_run_are_removed_although_nothing_is_missing(
    tmp_path, checkpoints, small
):
    sweep, before, _ = small
    out = tmp_path / "out"
    run_inline(sweep, out, tmp_path)
    shutil.rmtree(out / "sources")
    shutil.copytree(before / "sources", out / "sources")
    shutil.copytree(cells_of(before), cells_of(out), dirs_exist_ok=True)
    assert "twice" in {problem.kind for problem in verify(sweep, out, checkpoints)}
    _, executor = run_inline(sweep, out, checkpoints)
    assert executor.performed == []
    assert verify(sweep, out, checkpoints) == []


def test_records_of_an_earlier_revision_are_named(
    tmp_path, checkpoints, small, monkeypatch, capsys
):
    sweep, before, _ = small
    out = tmp_path / "out"
    shutil.copytree(before, out)
    old = {folder.name for folder in scan(out).cells if read(folder).spec.method == "tent"}
    monkeypatch.setattr(tent, "REVISION", 99, raising=False)
    for _ in range(2):  # and again, although nothing is missing any more
        summary, _ = run_inline(sweep, out, checkpoints)
        assert set(summary.foreign) == old
        show_summary(summary, out)
        printed = capsys.readouterr().out
        assert "2 records of an earlier revision of a method" in printed
        assert all(str(cells_of(out) / key) in printed for key in old)
    twice = [each.where for each in verify(sweep, out, checkpoints) if each.kind == "twice"]
    assert len(twice) == 2
    assert all("of the revisions " in where and "99" in where for where in twice)


def npz_sweep(folder):
    """The small sweep on image files, whose times can change."""
    for split in ("train", "test"):
        image_files = open_data(f"digits:{split}")
        images = np.stack([image_files.read(i) for i in range(len(image_files))])
        np.savez(folder / f"{split}.npz", images=images, labels=image_files.labels)
    text = SMALL.replace('"frozen", "caster", "tent"', '"caster"')
    text = text.replace("digits:train", str(folder / "train.npz"))
    return sweep_of(folder, text.replace("digits:test", str(folder / "test.npz")))


def test_an_admission_is_transferred_from_another_machine(tmp_path, checkpoints):
    """It is valid with other file times, and invalid with other images."""
    sweep = npz_sweep(tmp_path)
    here, there = tmp_path / "here", tmp_path / "there"
    run_inline(sweep, here, checkpoints)
    shutil.copytree(here / "sources", there / "sources")
    names = [path.name for path in (there / "sources").iterdir()]
    state = next(there / "sources" / name for name in names if name.endswith(".caster"))
    before = state.stat().st_mtime_ns
    for split in ("train", "test"):
        os.utime(tmp_path / f"{split}.npz")
    run_inline(sweep, there, checkpoints)
    assert state.stat().st_mtime_ns == before  # not fitted again
    assert contents(there) == contents(here)
    assert verify(sweep, there, checkpoints) == []
    with np.load(tmp_path / "train.npz") as file:
        images, labels = file["images"].copy(), file["labels"]
    images[:, 0, 0] = 255 - images[:, 0, 0]
    np.savez(tmp_path / "train.npz", images=images, labels=labels)
    old = set(scan(there).cells)  # they stay next to the new ones
    run_inline(sweep, there, checkpoints)
    assert state.stat().st_mtime_ns != before
    again, known = contents(there, without=old), contents(here)
    assert again.keys() == known.keys()
    assert again != known


def test_a_pinned_digest_and_architecture_are_required(tmp_path, checkpoints):
    for line in ('sha256 = "00"', 'architecture = "mini-vit"'):
        text = SMALL.replace('family = "batch"', f'family = "batch"\n{line}')
        summary, _ = run_inline(sweep_of(tmp_path, text), tmp_path / line[:4], checkpoints)
        (reason,) = summary.rejections.values()
        assert "the sweep wants 00" in reason or "is a mini-resnet, and not a mini-vit" in reason


def test_a_damaged_checkpoint_is_rejected_until_it_is_repaired(tmp_path, checkpoints, small):
    root, out = tmp_path / "root", tmp_path / "out"
    shutil.copytree(checkpoints / "checkpoints", root / "checkpoints")
    path = root / "checkpoints" / "resnet.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    summary, _ = run_inline(small[0], out, root)
    assert (summary.rejected, summary.failures) == (6, [])
    (reason,) = summary.rejections.values()
    assert reason.startswith("checkpoints/resnet.safetensors is truncated, damaged")
    assert verify(small[0], out, root) == []
    path.write_bytes(whole)
    run_inline(small[0], out, root)
    assert contents(out) == contents(small[1])


def test_checkpoints_are_relative_to_the_current_folder(tmp_path, monkeypatch, small):
    monkeypatch.chdir(tmp_path)
    assert RunContext.of(small[0], tmp_path / "out").root == tmp_path.resolve()


def test_a_sweep_finds_the_default_path_of_a_trained_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["bench", "train", "mini-resnet", "--data", "digits", "--epochs", "1", "--device"]
    unknown = cli(*words, "cuda:7")
    assert (unknown.exit_code, list(tmp_path.iterdir())) == (1, [])
    trained = cli(*words, "cpu")
    assert trained.exit_code == 0, trained.output
    text = SMALL.replace("checkpoints/resnet", "checkpoints/mini-resnet-digits-0")
    text = text.replace('"frozen", "caster", "tent"', '"frozen"')
    sweep = sweep_of(tmp_path, text.replace("0.85", "0.0"))
    summary, _ = run_inline(sweep, Path("runs/small"), None)
    assert (summary.cells, summary.rejections, summary.failures) == (2, {}, [])
    result = cli("bench", "plan", "sweep.toml")
    assert "2 cells: 2 done, 0 rejected, 0 missing" in result.output


def truncated(path):
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("file", "damage"),
    sampled(
        [
            ("samples.parquet", truncated),
            ("batches.parquet", lambda path: path.unlink()),
            ("batches.parquet", lambda path: path.write_bytes(b"")),
            ("cell.json", truncated),
            ("cell.json", lambda path: path.unlink()),
        ],
        3,
    ),
)
def test_a_damaged_record_is_made_again(tmp_path, checkpoints, small, file, damage):
    sweep, before, _ = small
    out = tmp_path / "out"
    shutil.copytree(before, out)
    folder = scan(out).cells[0]
    damage(folder / file)
    plan = make_plan(sweep, RunContext.of(sweep, out, checkpoints))
    assert (plan.damaged, len(plan.missing)) == ({folder.name}, 1)
    damaged = read(cells_of(before) / folder.name).spec.method
    others = {spec.method for spec in sweep.cells} - {damaged}
    run_inline(sweep, out, checkpoints, methods=others)  # nothing is missing
    assert folder.exists()
    summary, _ = run_inline(sweep, out, checkpoints)
    assert (summary.already, summary.cells, summary.failures) == (5, 6, [])
    assert contents(out) == contents(before)


@pytest.mark.parametrize("which", ["cells/*/cell.json", "sources/*.json"])
def test_records_of_another_format_stop_a_run_and_are_not_touched(
    tmp_path, checkpoints, small, which
):
    sweep, before, _ = small
    out = tmp_path / "out"
    shutil.copytree(before, out)
    for path in out.glob(which):
        of_format(path, 1)
    before_run = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    message = r"in format 1, and this version reads format 2"
    with pytest.raises(CasterError, match=message):
        make_plan(sweep, RunContext.of(sweep, out, checkpoints))
    with pytest.raises(CasterError, match=message):
        run_inline(sweep, out, checkpoints)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before_run
    kinds = {problem.kind for problem in verify(sweep, out, checkpoints)}
    assert "changed or damaged" not in kinds


def test_times_are_rounded_to_about_a_microsecond(small):
    _, out, _ = small
    seconds = np.concatenate([read(folder).batches.seconds for folder in scan(out).cells])
    assert (seconds > 0).all()
    np.testing.assert_array_equal(seconds * 2**20, np.round(seconds * 2**20))
    exact = np.array([0.0123456789, 1e-6, 7.0])
    np.testing.assert_allclose(round_seconds(exact), exact, atol=2**-21, rtol=0)


def test_damage_that_only_verify_finds_stops_no_plan(tmp_path, checkpoints, small):
    sweep, before, _ = small
    out = tmp_path / "out"
    shutil.copytree(before, out)
    for folder in scan(out).cells:
        content = bytearray((folder / "batches.parquet").read_bytes())
        content[20] ^= 1
        (folder / "batches.parquet").write_bytes(content)
    plan = make_plan(sweep, RunContext.of(sweep, out, checkpoints))
    costs = Costs(plan)
    assert (plan.missing, costs.measured) == ([], 0)
    assert sum(map(costs.cell, plan.wanted)) > 0
    assert "changed or damaged" in {problem.kind for problem in verify(sweep, out, checkpoints)}


def test_inert_methods_are_planned_without_the_frozen_pass_they_share(tmp_path, checkpoints):
    """Their records tell; behind a gate they have a pass of their own."""
    text = LAYERNORM.replace('"caster"', '"tent+certificate"')
    sweep, out = sweep_of(tmp_path, text), tmp_path / "out"
    context = RunContext.of(sweep, out, checkpoints)
    by_method = {spec.method: spec for spec in sweep.cells}

    def passes(method):
        costs = Costs(make_plan(sweep, context))
        return costs.cell(by_method[method]) / costs.frozen(by_method[method])

    assert passes("tent") == pytest.approx(3.5)
    run_inline(sweep, out, checkpoints)
    assert passes("tent") < 0.3
    assert passes("tent+certificate") > 0.7


def test_missing_data_fail_only_their_own_cells(tmp_path, checkpoints, monkeypatch):
    digits = SMALL[SMALL.index("[data.") : SMALL.index("[[grid]]")]
    other = digits.replace("data.digits", "data.other").replace("digits:test", "digits:train")
    text = SMALL.replace(digits, digits + other).replace('"frozen", "caster"', '"frozen"')
    sweep, out = sweep_of(tmp_path, text), tmp_path / "out"
    assert run_inline(sweep, out, checkpoints)[0].cells == 8
    for folder in scan(out).cells:
        if read(folder).spec.method == "tent":
            shutil.rmtree(folder)

    def gone(source, root=None):
        if source == "digits:test":
            raise CasterError("digits:test is gone")
        return open_data(source, root)

    monkeypatch.setattr("caster_bench.engine.admit.open_data", gone)
    summary, _ = run_inline(sweep, out, checkpoints)
    assert summary.failures == [("resnet on digits", "digits:test is gone")]
    there = [read(folder).spec for folder in scan(out).cells]
    assert sum(spec.data == "other" for spec in there) == 4
    assert sum(spec.data == "digits" for spec in there) == 2


def test_failures_name_the_option(tmp_path, checkpoints, monkeypatch):
    """A failure is what `caster bench run` prints, not what a Python caller would do."""
    monkeypatch.delenv("CASTER_DATA", raising=False)
    sweep = sweep_of(tmp_path, SMALL.replace("digits:test", "cifar10:test"))
    summary, _ = run_inline(sweep, tmp_path / "out", checkpoints)
    ((_, why),) = summary.failures
    assert "--data-root" in why
    assert "data_root" not in why


def test_data_that_cannot_be_opened_are_tried_once(tmp_path, checkpoints, monkeypatch):
    sweep = sweep_of(tmp_path, SMALL.replace("digits:test", "digits:tset"))
    costs = Costs(make_plan(sweep, RunContext.of(sweep, tmp_path / "out", checkpoints)))
    tried = []

    def noted(source, root=None):
        tried.append(source)
        return open_data(source, root)

    monkeypatch.setattr("caster_bench.engine.plan.open_data", noted)
    assert not any(map(costs.is_known, sweep.cells))
    assert sum(map(costs.cell, sweep.cells)) == 0
    assert list(costs.unopened) == ["digits"]
    assert tried == ["digits:tset"]


def test_a_plan_without_data_says_that_costs_are_unknown(tmp_path, monkeypatch):
    monkeypatch.delenv("CASTER_DATA", raising=False)
    path = tmp_path / "small.toml"
    path.write_text(SMALL.replace("digits:test", "cifar10:test"))
    words = ["bench", "plan", str(path), "--out", str(tmp_path / "out")]
    for options in ([], ["--cells"]):
        result = cli(*words, *options)
        assert result.exit_code == 0, result.output
        rows = [line for line in result.output.splitlines() if line.startswith(" resnet")]
        assert rows
        assert {row.split()[-1] for row in rows} == {"-"}
        assert "for one worker" not in result.output
        assert "the cost of 6 cells is unknown" in result.output
        assert "set CASTER_DATA or pass --data-root" in result.output


@pytest.mark.parametrize("part", ["source", "target"])
def test_a_plan_with_a_wrong_name_of_data_ends_in_status_1(tmp_path, part):
    path = tmp_path / "small.toml"
    path.write_text(SMALL.replace(f'{part} = "digits:', f'{part} = "digit:'))
    result = cli("bench", "plan", str(path), "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "digits: digit:" in result.output
    assert "does not exist" in result.output
    assert "the cost of 6 cells is unknown" in result.output


def test_a_plan_names_checkpoints_that_do_not_exist(tmp_path, checkpoints):
    """They may be trained later, so this is no fault."""
    path = tmp_path / "small.toml"
    path.write_text(SMALL + ABSENT)
    words = ["bench", "plan", path, "--out", tmp_path / "out", "--root", checkpoints]
    result = cli(*words)
    assert result.exit_code == 0, result.output
    assert "no such checkpoint: checkpoints/absent.safetensors;" in result.output
    assert "no such checkpoint" not in cli(*words, "--backbone", "resnet").output


def test_a_run_of_missing_checkpoints_fails_and_compares_none(tmp_path, checkpoints):
    (tmp_path / "small.toml").write_text(SMALL)
    words = [tmp_path / "small.toml", "--out", tmp_path / "out"]
    result = cli("bench", "run", *words, "--root", tmp_path / "elsewhere")
    assert result.exit_code == 1, result.output
    path = tmp_path / "elsewhere" / "checkpoints" / "resnet.safetensors"
    assert f"no such file: {path}\n" in result.output
    result = cli("bench", "verify", *words, "--root", checkpoints)
    assert result.exit_code == 0, result.output
    assert "6 of them rejected, 0 of 1 checkpoint files compared" in result.output


def test_a_missing_checkpoint_of_a_published_network_cannot_be_trained(tmp_path):
    text = SMALL.replace('family = "batch"', 'family = "batch"\narchitecture = "keras_resnet50"')
    summary, _ = run_inline(sweep_of(tmp_path, text), tmp_path / "out", tmp_path)
    (reason,) = summary.rejections.values()
    assert "make it with benchmarks/real/published.py, or fix its path" in reason
    assert "train" not in reason


def test_a_repeated_reason_is_printed_once_with_a_count(tmp_path, capsys):
    digits = SMALL[SMALL.index("[data.") : SMALL.index("[[grid]]")]
    two = digits + digits.replace("data.digits", "data.other").replace("limit = 96", "limit = 90")
    sweep = sweep_of(tmp_path, SMALL.replace(digits, two))
    summary, _ = run_inline(sweep, tmp_path / "out", tmp_path)
    show_summary(summary, tmp_path / "out")
    printed = capsys.readouterr().out
    assert printed.count("there is no checkpoint") == 1
    assert "rejected (2): there is no" in printed
    assert "\n  resnet on digits\n  resnet on other\n" in printed


def test_a_plan_with_some_of_its_data_counts_those(tmp_path, monkeypatch):
    monkeypatch.delenv("CASTER_DATA", raising=False)
    digits = SMALL[SMALL.index("[data.") : SMALL.index("[[grid]]")]
    other = digits.replace("data.digits", "data.other").replace("digits:test", "cifar10:test")
    path = tmp_path / "small.toml"
    path.write_text(SMALL.replace(digits, digits + other))
    result = cli("bench", "plan", str(path), "--out", str(tmp_path / "out"))
    rows = [line.split() for line in result.output.splitlines() if line.startswith(" resnet")]
    assert {row[1] for row in rows if row[-1] == "-"} == {"other"}
    assert {row[1] for row in rows if row[-1] == "s"} == {"digits"}
    assert "for one worker" in result.output
    assert "the cost of 6 cells is unknown" in result.output


def test_a_plan_counts_streams_not_groups_of_cells(tmp_path):
    rates = ", ".join(f'{{method = "tent", lr = 0.00{digit}}}' for digit in range(1, 8))
    path = tmp_path / "small.toml"
    path.write_text(SMALL.replace('"tent"', rates))
    result = cli("bench", "plan", str(path), "--out", str(tmp_path / "out"))
    assert "18 missing in 2 streams" in result.output


def test_another_checkpoint_or_constant_makes_other_cells(tmp_path, checkpoints, small):
    sweep, before, _ = small
    out, root = tmp_path / "out", tmp_path / "root"
    shutil.copytree(before, out)
    root.mkdir()
    path = root / "checkpoints" / "resnet.safetensors"
    path.parent.mkdir()
    net, known = checkpoint.load(checkpoints / "checkpoints" / "resnet.safetensors")
    with torch.no_grad():
        net.get_classifier().bias += 0.1
    checkpoint.save(net, known, path)
    context = RunContext.of(sweep, out, root)
    assert len(make_plan(sweep, context).missing) == 6
    summary, _ = run_inline(sweep, out, root)
    assert (summary.cells, len(summary.foreign), len(scan(out).cells)) == (6, 6, 12)
    assert "twice" in {problem.kind for problem in verify(sweep, out, root)}
    other = sweep_of(tmp_path, SMALL.replace("[backbones", "[constants]\ntau = 2.0\n[backbones", 1))
    assert len(make_plan(other, RunContext.of(other, before, checkpoints)).missing) == 6


def test_missing_data_are_a_failure_not_a_rejection(tmp_path, checkpoints):
    sweep = sweep_of(tmp_path, SMALL.replace("digits:test", "digits:tset"))
    summary, _ = run_inline(sweep, tmp_path / "out", checkpoints)
    ((what, why),) = summary.failures
    assert what == "resnet on digits"
    assert "no split 'tset'" in why
    assert scan(tmp_path / "out").cells == ()


def test_two_runs_do_not_write_to_one_folder(tmp_path, checkpoints, small):
    sweep = small[0]

    def watch(status):
        with pytest.raises(CasterError, match="another run writes"):
            run_inline(sweep, tmp_path / "out", checkpoints)

    run_inline(sweep, tmp_path / "out", checkpoints, watch=watch)


def test_status_counts_up_to_the_end(tmp_path, checkpoints, small):
    seen = []
    run_inline(small[0], tmp_path / "out", checkpoints, watch=seen.append)
    assert seen[-1].done == seen[-1].total == 6
    assert seen[-1].left == pytest.approx(0.0)
    assert seen[-1].rate > 0


def test_timed_cells_come_last_one_by_one():
    from caster_bench.sweeps import Spec

    cells = [
        Spec("a", "d", "frozen", alone=True),
        Spec("b", "d", "frozen"),
        Spec("a", "d", "tent", alone=True),
        Spec("a", "d", "frozen"),
        Spec("b", "d", "tent"),
    ]
    assert list(groups_of(cells)) == [
        (cells[3],),
        (cells[1], cells[4]),
        (cells[0],),
        (cells[2],),
    ]


@pytest.mark.whole
@pytest.mark.slow
def test_a_killed_worker_loses_only_its_group(tmp_path, checkpoints, small, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    sweep, out = small[0], tmp_path / "out"
    context = RunContext.of(sweep, out, checkpoints)
    local = LocalExecutor(context, ["cpu"], 1, 0)
    killed = threading.Event()

    def kill():
        """Kill the worker once a first record shows that it is in a group of cells."""
        while not killed.is_set():
            time.sleep(0.005)
            if scan(out).cells:
                os.kill(local._processes["workers"][0].process.pid, signal.SIGKILL)
                killed.set()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        summary = run(sweep, context, lambda: local, lambda status: None)
    finally:
        killed.set()
        thread.join()
    assert summary.failures
    assert {why for _, why in summary.failures} == {DIED}
    assert {what.partition(",")[2].partition(":")[0].strip() for what, _ in summary.failures} == {
        "clean"  # the first group alone
    }
    assert summary.cells == 6 - len(summary.failures)
    for folder in scan(out).cells:
        read(folder)  # whole
    summary, _ = run_inline(sweep, out, checkpoints)
    assert (summary.cells, summary.failures) == (6, [])
    assert contents(out) == contents(small[1])
    assert verify(sweep, out, checkpoints) == []


def check_continued(small, out, checkpoints):
    """The next run keeps the cells of an interrupted one and makes the others."""
    kept = {folder.name: (folder / "cell.json").stat().st_mtime_ns for folder in scan(out).cells}
    assert 0 < len(kept) < 6
    summary, _ = run_inline(small[0], out, checkpoints)
    assert (summary.already, summary.cells) == (len(kept), 6)
    for name, written in kept.items():
        assert (cells_of(out) / name / "cell.json").stat().st_mtime_ns == written
    assert contents(out) == contents(small[1])


def test_an_interrupt_counts_what_is_saved_and_the_next_run_continues(tmp_path, checkpoints, small):
    out = tmp_path / "out"

    def watch(status):
        if scan(out).cells:
            raise KeyboardInterrupt

    message = r"^[1-5] of 6 cells are saved; run it again to continue$"
    with pytest.raises(KeyboardInterrupt, match=message):
        run_inline(small[0], out, checkpoints, watch=watch)
    check_continued(small, out, checkpoints)


@pytest.mark.whole
@pytest.mark.slow
def test_ctrl_c_ends_in_one_line_and_the_next_run_continues(tmp_path, checkpoints, small):
    out = tmp_path / "out"
    sweep_of(tmp_path)
    words = ("run", tmp_path / "sweep.toml", "--out", out, "--root", checkpoints)
    with start(*words, "--workers", 1, "--device", "cpu") as process:
        until = time.monotonic() + 120
        while not scan(out).cells and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stdout + stderr
    *progress, last = stderr.splitlines()
    assert last.startswith("caster: interrupted, ")
    assert last.endswith(" of 6 cells are saved; run it again to continue")
    assert all(" images/s, " in line for line in progress)
    check_continued(small, out, checkpoints)


def test_streams_of_several_conditions(tmp_path, checkpoints):
    text = SMALL[: SMALL.index("[[grid]]")]
    text += """
[[grid]]
study = "corruption"
corruptions = ["contrast", "brightness"]
severities = [2]
schedule = "mixed"
methods = ["frozen"]
"""
    sweep = sweep_of(tmp_path, text)
    summary, _ = run_inline(sweep, tmp_path / "out", checkpoints)
    assert summary.failures == []
    (folder,) = scan(tmp_path / "out").cells
    record = read(folder)
    assert np.all(np.bincount(record.samples.index) == 2)
    assert verify(sweep, tmp_path / "out", checkpoints) == []
