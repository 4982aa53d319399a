"""Train and record all networks of sweeps with one command (benchmarks/record.py)."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from caster_bench.sweeps import read

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "benchmarks"))

record = import_module("record")

FAKE = r"""
import atexit, pathlib, sys, time
words = sys.argv[1:]
def log(when):
    with open("events", "a") as file:
        file.write(when + " " + words[0] + "\n")
atexit.register(log, "end")
log("start")
with open("calls", "a") as file:
    file.write(" ".join(words) + "\n")
{does}
if words[0] == "train":
    pathlib.Path(words[-1]).touch()
if words[0] == "pack":
    pathlib.Path(words[-1]).mkdir(exist_ok=True)
if words[0] == "run":
    print("running\nno such thing")
    sys.exit(int(pathlib.Path("code").read_text()))
"""
SWEEP = """
name = "{name}"
title = "A sweep"
[backbones.small]
family = "batch"
checkpoint = "checkpoints/resnet18-cifar10-0.safetensors"
{more}
[data.cifar10]
source = "cifar10:train"
target = "cifar10:test"
[[grid]]
study = "corruption"
methods = ["frozen", "tent"]
"""
SECOND = """
[backbones.other]
family = "batch"
checkpoint = "checkpoints/resnet18-cifar10-1.safetensors"
"""
THIRD = SECOND.replace("other", "another").replace("10-1", "10-2")
COST = '[[grid]]\nstudy = "cost"\nmethods = ["frozen", "tent"]\nalone = true\n'
PUBLISHED = """
[backbones.published]
family = "batch"
checkpoint = "checkpoints/keras_resnet50.safetensors"
"""


def stand_in(does: str = "") -> list[str]:
    """`caster bench` that logs words, start and end, does something, and exits as a file says."""
    return [sys.executable, "-c", FAKE.replace("{does}", does)]


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(record, "BENCH", stand_in())
    monkeypatch.setattr(record.shutil, "which", lambda name: None)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "code").write_text("0")
    (tmp_path / "first.toml").write_text(SWEEP.format(name="first", more=""))
    (tmp_path / "second.toml").write_text(SWEEP.format(name="second", more=PUBLISHED))
    return tmp_path


def called(workdir: Path, monkeypatch, *words: str) -> tuple[object, list[str]]:
    monkeypatch.setattr(sys, "argv", ["record.py", *words])
    with pytest.raises(SystemExit) as stopped:
        record.main()
    calls = workdir / "calls"
    return stopped.value.code, calls.read_text().splitlines() if calls.exists() else []


def test_a_network_is_trained_once_and_recorded_in_every_sweep(workdir, monkeypatch, capsys):
    words = ("first.toml", "second.toml", "--backbone", "small", "--method", "tent")
    code, calls = called(workdir, monkeypatch, *words)
    run = "--backbone small --workers 4 --method tent"
    checkpoint = "checkpoints/resnet18-cifar10-0.safetensors"
    assert calls == [
        f"train resnet18 --data cifar10 --seed 0 --epochs 80 --out {checkpoint}",
        f"run first.toml --out runs/first--small {run}",
        "pack first.toml --out runs/first--small -o packs/first--small",
        f"run second.toml --out runs/second--small {run}",
        "pack second.toml --out runs/second--small -o packs/second--small",
        "pack first.toml --records packs/first--small -o packs/first",
        "pack second.toml --records packs/second--small -o packs/second",
    ]
    assert code == 0
    _, again = called(workdir, monkeypatch, *words)
    assert again[7:] == calls[1:]  # the checkpoint is there


def test_timed_cells_wait_until_all_networks_are_done(workdir, monkeypatch):
    (workdir / "first.toml").write_text(SWEEP.format(name="first", more=SECOND) + COST)
    code, calls = called(workdir, monkeypatch, "first.toml", "--at-once", "2")
    assert code == 0
    *beside, first, second, third, fourth, _, _ = calls
    runs = [line for line in beside if line.startswith("run")]
    assert len(runs) == 2
    assert all(line.endswith("--workers 4 --only corruption") for line in runs)
    for (run, pack), name in zip(
        [(first, second), (third, fourth)], ("small", "other"), strict=True
    ):
        out = f"--out runs/first--{name}"
        assert run == f"run first.toml {out} --backbone {name} --workers 1 --only cost"
        assert pack == f"pack first.toml {out} -o packs/first--{name}"


def test_networks_are_recorded_when_all_are_trained(workdir, monkeypatch):
    monkeypatch.setattr(record, "BENCH", stand_in('time.sleep("10-1" in words[-1])'))
    (workdir / "first.toml").write_text(SWEEP.format(name="first", more=SECOND))
    code, _ = called(workdir, monkeypatch, "first.toml")
    assert code == 0
    before, run, _ = (workdir / "events").read_text().partition("start run")
    assert sorted(before.splitlines()) == 2 * ["end train"] + 2 * ["start train"]
    assert run


def test_packs_are_merged_into_a_new_one_when_all_networks_are_done(workdir, monkeypatch):
    (workdir / "packs" / "first").mkdir(parents=True)
    (workdir / "packs" / "first" / "of-an-earlier-revision").touch()
    (workdir / "first.toml").write_text(SWEEP.format(name="first", more=SECOND))
    _, calls = called(workdir, monkeypatch, "first.toml")
    *others, one, two = calls
    assert sorted([one, two]) == [
        "pack first.toml --records packs/first--other -o packs/first",
        "pack first.toml --records packs/first--small -o packs/first",
    ]
    assert sorted(line.split()[0] for line in others) == [
        "pack",
        "pack",
        "run",
        "run",
        "train",
        "train",
    ]
    assert list((workdir / "packs" / "first").iterdir()) == []


def most_at_once(workdir: Path, command: str) -> int:
    """How many runs of a command overlapped at most."""
    running, most = 0, 0
    for event in (workdir / "events").read_text().splitlines():
        when, own = event.split()
        running += {"start": 1, "end": -1}[when] * (own == command)
        most = max(most, running)
    assert running == 0
    return most


@pytest.mark.parametrize("at_once", [1, 2])
def test_only_so_many_networks_are_trained_or_recorded_at_once(workdir, monkeypatch, at_once):
    """Long enough for three of each to overlap without a limit."""
    slow = 'time.sleep({"train": 0.4, "run": 0.9}.get(words[0], 0))'
    monkeypatch.setattr(record, "BENCH", stand_in(slow))
    (workdir / "first.toml").write_text(SWEEP.format(name="first", more=SECOND + THIRD))
    code, calls = called(workdir, monkeypatch, "first.toml", "--at-once", str(at_once))
    assert code == 0
    assert [line.split()[0] for line in calls].count("run") == 3
    assert 1 <= most_at_once(workdir, "train") <= at_once
    assert 1 <= most_at_once(workdir, "run") <= at_once


def interrupted(workdir: Path, ready, *words: str, sleeping: str, start=None) -> list[str]:
    """Commands called until the script alone is interrupted, when their log is ready."""
    bench = stand_in(f"if {sleeping}: time.sleep(60)")
    script = (
        f"import sys; sys.path.append({str(ROOT / 'benchmarks')!r}); import record; "
        f"record.BENCH = {bench!r}; record.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, "first.toml", *words],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=start,
    )
    log, deadline = workdir / "calls", time.monotonic() + 30
    while not (log.exists() and ready(log.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 1
    assert error.strip() == "stopped: the same command continues"
    events = (workdir / "events").read_text().split()
    assert events.count("start") == events.count("end")  # also that of a sleeping command
    return log.read_text().splitlines()


@pytest.mark.parametrize("start", [None, partial(signal.signal, signal.SIGINT, signal.SIG_IGN)])
def test_an_interrupt_of_this_process_alone_ends_its_commands(workdir, start):
    """Also if it was started by a script, in the background."""
    calls = interrupted(
        workdir, lambda text: "run " in text, sleeping='words[0] == "run"', start=start
    )
    assert [line.split()[0] for line in calls] == ["train", "run"]


@pytest.mark.parametrize("command", ["train", "run"])
def test_an_interrupt_starts_none_of_the_waiting_networks(workdir, command):
    """While the second of three is trained or recorded, the third waits."""
    (workdir / "first.toml").write_text(SWEEP.format(name="first", more=SECOND + THIRD))
    calls = interrupted(
        workdir,
        lambda text: text.count(f"{command} ") == 2,
        *("--at-once", "1"),
        sleeping=f'pathlib.Path("calls").read_text().count("{command} ") == 2',
    )
    assert [line.split()[0] for line in calls].count(command) == 2


def test_an_interrupt_while_timed_cells_run_ends_them_and_keeps_the_merged_pack(workdir):
    (workdir / "first.toml").write_text(SWEEP.format(name="first", more=SECOND) + COST)
    merged = workdir / "packs" / "first" / "merged-before"
    merged.parent.mkdir(parents=True)
    merged.touch()
    calls = interrupted(workdir, lambda text: "--only cost" in text, sleeping='"cost" in words')
    assert calls[-1].endswith("--only cost")
    assert merged.exists()


def test_a_command_that_starts_while_all_are_stopped_is_interrupted_too(workdir, monkeypatch):
    recorder = record.Recorder(workdir, workdir, workers=1, at_once=1)
    stopping = threading.Thread(target=recorder._stop)
    start = subprocess.Popen

    def slow(*arguments, **options):
        stopping.start()
        stopping.join(0.5)
        return start(*arguments, **options)

    monkeypatch.setattr(record, "BENCH", [sys.executable, "-c", "import time; time.sleep(30)"])
    monkeypatch.setattr(record.subprocess, "Popen", slow)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in the background
    began = time.monotonic()
    assert not recorder._step(workdir / "log", "sleeping", [])
    assert time.monotonic() - began < 20
    assert not recorder._step(workdir / "log", "sleeping", [])


def test_an_error_of_one_network_stops_the_others(workdir, monkeypatch):
    """Here its log cannot be opened."""
    monkeypatch.setattr(record, "BENCH", stand_in('if words[0] == "run": time.sleep(60)'))
    (workdir / "first.toml").write_text(SWEEP.format(name="first", more=SECOND))
    (workdir / "runs" / "resnet18-cifar10-1.log").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["record.py", "first.toml"])
    began = time.monotonic()
    with pytest.raises(IsADirectoryError):
        record.main()
    assert time.monotonic() - began < 30
    calls = workdir / "calls"
    assert "pack" not in (calls.read_text() if calls.exists() else "")


def test_a_missing_published_checkpoint_stops_no_other_network(workdir, monkeypatch, capsys):
    code, calls = called(workdir, monkeypatch, "second.toml")
    assert code == 1
    assert "left out: there is no checkpoints/keras_resnet50.safetensors" in capsys.readouterr().out
    assert [line.split()[0] for line in calls] == ["train", "run", "pack", "pack"]


@pytest.mark.parametrize(("code", "steps"), [(1, 7), (130, 2)])
def test_a_failed_run_is_packed_and_an_interrupt_ends_everything(
    workdir, monkeypatch, capsys, code, steps
):
    (workdir / "code").write_text(str(code))
    merged = workdir / "packs" / "first" / "merged-before"
    merged.parent.mkdir(parents=True)
    merged.touch()
    words = ("first.toml", "second.toml", "--backbone", "small")
    exit_code, calls = called(workdir, monkeypatch, *words)
    assert (exit_code, len(calls)) == (1, steps)
    assert merged.exists() == (code == 130)
    why = "failed: no such thing (runs/resnet18-cifar10-0.log)" if code == 1 else "stopped"
    assert f"recording first, small {why}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["first.toml", "--backbone", "resnet"],
            "no sweep has the backbone resnet: there are small",
        ),
        (
            ["first.toml", "--method", "nope"],
            "no sweep has the method nope: there are frozen, tent",
        ),
        (["first.toml", "--workers", "0"], "--workers: invalid choice: 0"),
        (["third.toml"], "cannot read third.toml"),
        (["first.toml", "fourth.toml", "--backbone", "small", "--method", "eata"], "on these"),
    ],
)
def test_bad_input_is_an_error_before_anything_is_trained(
    workdir, monkeypatch, capsys, words, message
):
    other = SWEEP.format(name="fourth", more="").replace(".small]", ".other]")
    (workdir / "fourth.toml").write_text(other.replace("tent", "eata"))
    code, calls = called(workdir, monkeypatch, *words)
    assert (code, calls) == (2, [])
    assert message in capsys.readouterr().err


def test_a_sweep_without_the_method_is_left_out(workdir, monkeypatch):
    text = SWEEP.format(name="fourth", more="")
    (workdir / "fourth.toml").write_text(text.replace("tent", "eata"))
    words = ("first.toml", "fourth.toml", "--method", "eata", "--method", "tent")
    _, calls = called(workdir, monkeypatch, *words)
    assert [line.partition(" --workers 4 ")[2] for line in calls if line.startswith("run")] == [
        "--method tent",
        "--method eata",
    ]


def test_epochs_are_those_of_the_documentation():
    text = (ROOT / "docs" / "benchmark.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (\d+).*? \| (\d+)", text, re.MULTILINE)
    assert {name: (int(first), int(second)) for name, first, second in rows} == record.EPOCHS


def test_every_trained_network_of_the_sweeps_has_a_recipe():
    for path in (ROOT / "reproduction" / "sweeps").glob("*.toml"):
        for backbone in read(path).backbones.values():
            if re.search(r"cifar100?-\d+\.safetensors", backbone.checkpoint):
                assert record.training(backbone.checkpoint), backbone
