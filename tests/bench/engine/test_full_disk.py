"""A full disk or memory: one line, nothing half-written, and a run that continues."""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import typer

from caster.cli.app import _safely
from caster.errors import CasterError
from caster_bench.engine import executors
from caster_bench.engine.executors import Task, failed, perform
from caster_bench.records.store import scan
from caster_bench.studies.verify import verify
from tests.conftest import problem
from tests.support.command_line import cli
from tests.support.inline import run_inline, sweep_of

REMEDY = "run the same command again"


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the size of files, here and in child processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_sweep_stops_in_one_line_and_continues_where_it_stopped(tmp_path, checkpoints):
    sweep, out = sweep_of(tmp_path), tmp_path / "out"
    run_inline(sweep, out, checkpoints, only=["corruption"])
    wanted = len(scan(out).cells)
    for folder in scan(out).cells[::2]:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    kept = len(scan(out).cells)
    words = ["bench", "run", str(tmp_path / "sweep.toml"), "--out", str(out)]
    words += ["--root", str(checkpoints), "--device", "cpu", "--workers", "1"]
    with largest_file(500):
        done = cli(*words)
    assert done.exit_code == 1, done.output
    (line,) = done.output.splitlines()
    assert line.startswith(f"caster: cannot write {out}")
    assert REMEDY in line
    assert f"{kept} of {wanted} cells are saved" in line
    assert len(scan(out).cells) == kept
    assert not scan(out).leftovers
    summary, _ = run_inline(sweep, out, checkpoints)
    assert summary.failures == []
    assert verify(sweep, out, checkpoints) == []


def test_a_command_that_cannot_write(tmp_path):
    features, labels = problem(n=300)
    np.savez(tmp_path / "source.npz", features=features, labels=labels)
    words = ["fit", str(tmp_path / "source.npz"), "-o", str(tmp_path / "s.caster")]
    with largest_file(100):
        done = cli(*words)
    assert done.exit_code == 1
    (line,) = done.output.splitlines()
    assert REMEDY in line
    assert [path.name for path in tmp_path.iterdir()] == ["source.npz"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "out of memory"),
        (MemoryError("Unable to allocate 9 GiB"), "Unable to allocate 9 GiB"),
        (RecursionError("maximum recursion depth exceeded"), "nested too deeply"),
        (OSError(errno.ENOSPC, "No space left on device", "a.bin"), f"a.bin: No space.*{REMEDY}"),
        (PermissionError(errno.EACCES, "Permission denied", "a.bin"), "a.bin: Permission denied"),
        (OSError("a reader's own words"), "a reader's own words"),
    ],
)
def test_a_machine_at_its_limits_is_one_line(capsys, error, words):
    def command() -> None:
        raise error

    with pytest.raises(typer.Exit) as ended:
        _safely(command)()
    assert ended.value.exit_code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("caster: ")
    assert re.search(words, line)


def test_a_reader_that_has_gone_is_left_to_click():
    def command() -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        _safely(command)()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_full_disk_is_recognised_in_another_process(monkeypatch, wrapped):
    def full(*args: object) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device", "a.bin")
        except OSError:
            if wrapped:
                raise CasterError("cannot write a.bin: No space left on device") from None
            raise

    monkeypatch.setattr(executors, "worker_cache", full)
    task = Task("group", ())
    with pytest.raises(CasterError) as raised:
        perform(None, task)
    ended = failed(task, type(raised.value)(*raised.value.args))  # as another process has it
    assert ended.disk_full
    assert "a.bin: No space left" in ended.error
    assert not failed(task, CasterError("cannot write a.bin: no permission")).disk_full
