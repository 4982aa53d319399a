from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest

from caster_bench.engine.train import checkpoint, training_run
from tests.support.command_line import cli

caster = partial(cli, "bench", "train")


@pytest.fixture
def command(files, tmp_path) -> list[str]:
    data = ["--data", files[0], "--test", files[1], "--device", "cpu"]
    return ["mini-vit", *data, "--out", str(tmp_path / "net.safetensors"), "--epochs", "2"]


def test_trains_stops_and_resumes(command, tmp_path):
    stopped = caster(*command, "--seconds", "0")
    assert (stopped.exit_code, stopped.output) == (
        0,
        "1 of 2 epochs done; run it again to continue.\n",
    )
    done = caster(*command)
    metadata = checkpoint.inspect(tmp_path / "net.safetensors")
    assert done.exit_code == 0, done.output
    assert f"{metadata.accuracy:.2%} accuracy on" in done.output
    assert metadata.recipe.epochs == 2
    other = caster(*command, "--seed", "1")
    assert other.exit_code == 1
    assert "finished checkpoint with another seed: name another file" in other.output


def test_plain_training_has_its_own_default_file(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = ["--data", files[0], "--test", files[1], "--device", "cpu", "--epochs", "1"]
    done = caster("mini-resnet", "--plain", *data)
    assert done.exit_code == 0, done.output
    metadata = checkpoint.inspect(tmp_path / "checkpoints/mini-resnet-plain-train-0.safetensors")
    assert (metadata.recipe.mixup, metadata.recipe.ema, metadata.recipe.operations) == (0, 0, 0)
    assert "only ResNets have a plain recipe" in caster("mini-vit", "--plain", *data).output


def test_ctrl_c(command, monkeypatch):
    def interrupted(*args, **settings):
        raise KeyboardInterrupt("1 of 2 epochs are saved; run it again to continue")

    monkeypatch.setattr(training_run, "train", interrupted)
    stopped = caster(*command)
    assert stopped.exit_code == 130
    assert stopped.output == (
        "caster: interrupted, 1 of 2 epochs are saved; run it again to continue\n"
    )


def test_errors_are_one_line(files):
    for args, message in (
        (["mini-vitt", "--data", "digits"], "did you mean 'mini-vit'?"),
        (["mini-vit", "--data", "digit"], "there is no set 'digit': did you mean 'digits'?"),
        (["mini-vit", "--data", files[0]], "name the held-out images with --test"),
        (["mini-vit", "--data", "digits", "--device", "cuda:7"], "there is no device 'cuda:7'"),
        (["mini-vit", "--data", "digits", "--out", "no/such.safetensors"], "there is no folder no"),
    ):
        result = caster(*args)
        assert result.exit_code == 1, result.output
        assert result.output.startswith("caster: ")
        assert message in result.output
        assert result.output.count("\n") == 1


WITHOUT_TORCH = """
import sys

class Absent:
    def find_spec(self, name, *_):
        if name == "torch":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
from caster.cli import main
main()
"""


def test_without_torch_it_says_what_to_install():
    words = [sys.executable, "-c", WITHOUT_TORCH, "bench", "train", "resnet18", "--data", "digits"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    message = "caster: the benchmark needs torch: pip install 'caster-bench[sweeps]'\n"
    assert (done.returncode, done.stderr) == (1, message)
