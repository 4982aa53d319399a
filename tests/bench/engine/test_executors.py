"""Ray and local executors, when a cell fails or a process is killed."""

from __future__ import annotations

import os
import signal
import socket
import time
import warnings
from pathlib import Path

import pytest
import torch

from caster.errors import CasterError
from caster_bench.engine import worker_cache as workers
from caster_bench.engine.executors import DIED
from caster_bench.engine.executors.ray import AUTO, RayExecutor, cluster_device
from caster_bench.engine.run_context import RunContext
from caster_bench.records.store import read, scan
from tests.support.inline import SMALL, run_inline, sweep_of
from tests.support.messages import error_line
from tests.support.miniature import start

RAY = ("--executor", "ray", "--device", "cpu", "--workers", 2)


def descendants(pid):
    """The descendants of a process, with their command lines."""
    parents, words = {}, {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text()
            words[int(folder.name)] = (folder / "cmdline").read_text()
        except OSError:  # it has ended
            continue
        parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    found = {pid}
    for _ in range(8):
        found |= {child for child, parent in parents.items() if parent in found}
    return {child: words.get(child, "") for child in found - {pid}}


def wait_for(condition, seconds=180.0):  # Ray takes a minute to start where cores are busy
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    assert condition()


def failures(stderr):
    """Each cell and its reason, which is printed once if several cells share it."""
    why = ""
    for line in stderr.splitlines():
        if line.startswith("failed ("):
            why = line.partition("): ")[2]
        elif line.startswith("failed: "):
            yield line.removeprefix("failed: ")
        elif line.startswith("  ") and why:
            yield f"{line.strip()}: {why}"


@pytest.mark.slow
@pytest.mark.whole
def test_on_ray_a_failing_cell_and_a_killed_worker_stop_no_other(tmp_path, checkpoints):
    text = SMALL.replace('"clean", "contrast"', '"clean", "contrast", "fog"')
    sweep_of(tmp_path, text.replace('"tent"', '"tent", {method = "knn", k = 5000}'))
    out = tmp_path / "out"
    words = ("run", tmp_path / "sweep.toml", "--out", out, "--root", checkpoints, *RAY)
    with start(*words) as process:

        def busy():
            return [p for p, line in descendants(process.pid).items() if "Worker.perform" in line]

        wait_for(lambda: scan(out).cells and busy())
        os.kill(busy()[0], signal.SIGKILL)
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 1, stdout + stderr
    lines = list(failures(stderr))
    killed = [line for line in lines if line.endswith(DIED)]
    failed = [line for line in lines if line not in killed]
    lost = {line.partition(",")[2].partition(":")[0] for line in killed}
    assert len(lost) == 1  # one stream of three
    assert len(failed) == 2
    assert all("knn (k 5000)" in line and "5000 neighbours" in line for line in failed)
    assert len(scan(out).cells) == 12 - len(lines)
    for folder in scan(out).cells:
        read(folder)  # whole


@pytest.mark.parametrize(
    ("address", "why"),
    [
        pytest.param("127.0.0.1:{port}", "no Ray cluster at 127.0.0.1:", marks=pytest.mark.whole),
        ("nowhere", "is HOST:PORT of a Ray"),
    ],
)
def test_an_address_without_a_cluster_fails_within_seconds(tmp_path, checkpoints, address, why):
    with socket.socket() as bound:  # not listening
        bound.bind(("127.0.0.1", 0))
        context = RunContext.of(sweep_of(tmp_path), tmp_path / "out", checkpoints)
        began = time.monotonic()
        with pytest.raises(CasterError, match=why) as error:
            RayExecutor(context, address.format(port=bound.getsockname()[1]), None)
    assert time.monotonic() - began < 10
    assert "\n" not in str(error.value)


def test_the_device_of_a_cluster():
    assert cluster_device("cuda", 1) == cluster_device(AUTO, 0.5) == "cuda:0"
    assert cluster_device(AUTO, 0) == cluster_device("cpu", 0) == "cpu"
    assert "the Ray cluster has no GPU" in error_line(cluster_device, "cuda", 0)
    assert "Ray itself chooses a GPU" in error_line(cluster_device, "cuda:3", 8)


@pytest.mark.parametrize(
    ("nodes", "workers", "on_gpu", "expected"),
    [
        ([{"CPU": 8}], None, False, (8, 0, 0.0)),
        ([{"CPU": 8}, {"CPU": 4}], 3, False, (3, 9, 0.0)),
        ([{"CPU": 64}, {"CPU": 4, "GPU": 1}], None, True, (4, 64, 0.1666)),  # it has four cores
        ([{"CPU": 32, "GPU": 2}], None, True, (12, 20, 0.1666)),
    ],
)
def test_every_worker_of_a_cluster_has_a_core(nodes, workers, on_gpu, expected):
    cluster = RayExecutor.__new__(RayExecutor)
    cluster._allocate(nodes, workers, on_gpu)
    assert (cluster.workers, cluster.helpers, cluster._gpu_share) == expected


@pytest.mark.whole
@pytest.mark.slow
def test_local_workers_end_with_a_killed_run(tmp_path, checkpoints):
    sweep, out = sweep_of(tmp_path), tmp_path / "out"
    words = ("run", tmp_path / "sweep.toml", "--out", out, "--root", checkpoints)
    with start(*words, "--workers", 1, "--device", "cpu") as process:
        wait_for(lambda: scan(out).cells)
        workers = descendants(process.pid)
        assert workers
        process.kill()
        _, stderr = process.communicate(timeout=20)  # until the last that could write there ends
    assert "Traceback" not in stderr
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 20)
    assert len(scan(out).cells) < 6
    summary, _ = run_inline(sweep, out, checkpoints)
    assert summary.cells == 6


def test_deterministic_kernels_without_warnings(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    flags = torch.backends.cuda
    before = (flags.mem_efficient_sdp_enabled(), flags.cudnn_sdp_enabled())
    filling = torch.utils.deterministic.fill_uninitialized_memory
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            workers.use_deterministic_kernels()
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            assert not flags.mem_efficient_sdp_enabled()
            assert flags.math_sdp_enabled()
            values = torch.zeros(4)
            values.put_(torch.tensor([0]), torch.tensor([1.0]))  # not deterministic
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="deterministic"):
                values.put_(torch.tensor([0]), torch.tensor([1.0]))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filling
        flags.enable_mem_efficient_sdp(before[0])
        flags.enable_cudnn_sdp(before[1])
