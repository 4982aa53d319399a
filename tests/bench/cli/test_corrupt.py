"""The corrupt command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from caster_bench.data.corruptions import CORRUPTIONS, REPORTED, SPARE
from tests.support.command_line import cli, refusal

PIXELS = np.random.default_rng(0).integers(256, size=(6, 32, 32, 3), dtype=np.uint8)


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """Run the command in a folder with a small set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CASTER_DATA", raising=False)
    np.savez("set.npz", images=PIXELS, labels=np.arange(6))
    return lambda line: cli("corrupt", *line.split())


@pytest.fixture
def asked(monkeypatch):
    """Arguments of the job, which is interrupted at once."""
    calls = []

    def noted(images, out, **options):
        calls.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr("caster_bench.data.corrupt_job.corrupt_images", noted)
    return calls


def test_output(typed, tmp_path):
    done = typed("set.npz out --corruption contrast --severity 1,3 --workers 1")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        "6 images: 2 combinations of corruption and severity made",
        "Written: out, as CIFAR-C (37.1 kB); see out/manifest.json",
    ]
    assert done.stderr == ""
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "contrast-1.npy",
        "contrast-3.npy",
        "labels.npy",
        "manifest.json",
    ]
    done = typed("set.npz out --corruption contrast,fog --severity 1,3 --workers 1")
    assert "2 combinations of corruption and severity made, 2 there already" in done.stdout


@pytest.mark.parametrize(
    ("typing", "names"),
    [
        ("", CORRUPTIONS),
        ("--corruption all", CORRUPTIONS),
        ("--corruption reported", REPORTED),
        ("--corruption spare", SPARE),
        ("--corruption fog,snow --corruption frost", ("fog", "snow", "frost")),
    ],
)
def test_corruptions(typed, asked, typing, names):
    typed(f"set.npz out {typing}")
    assert tuple(asked[0]["corruptions"]) == names


@pytest.mark.parametrize(
    ("typing", "severities"),
    [
        ("", [1, 2, 3, 4, 5]),
        ("--severity 3", [3]),
        ("--severity 1,3,5", [1, 3, 5]),
        ("--severity 2-4", [2, 3, 4]),
        ("--severity 1-2,5", [1, 2, 5]),
    ],
)
def test_severities(typed, asked, typing, severities):
    typed(f"set.npz out {typing}")
    assert asked[0]["severities"] == severities


@pytest.mark.parametrize("text", ["6", "0", "3-1", "1-6", "two", "", "1,", "1.5", "-1"])
def test_invalid_severities(typed, tmp_path, text):
    done = cli("corrupt", "set.npz", "out", f"--severity={text}")
    assert f"{text!r} is not a list of severities: give numbers from 1 to 5" in refusal(done)
    assert not (tmp_path / "out").exists()


def test_bad_input_is_one_line_and_nothing_is_written(typed, tmp_path):
    np.savez("unlabelled.npz", images=PIXELS)
    assert refusal(typed("set.npz out --corruption fogg")) == (
        "there is no corruption 'fogg': did you mean 'fog'?"
    )
    assert "has no labels" in refusal(typed("unlabelled.npz out"))
    assert "none.npz does not exist" in refusal(typed("none.npz out"))
    assert "set CASTER_DATA or pass --data-root" in refusal(typed("cifar10:test out"))
    assert "cannot read the textures in ice" in refusal(
        typed("set.npz out --corruption frost --frost-textures ice")
    ).replace(str(tmp_path) + "/", "")
    assert not (tmp_path / "out").exists()
    assert typed("set.npz out --workers 0").exit_code == 2


def test_the_digits_that_sweeps_know(typed, tmp_path):
    done = typed("digits:test out --corruption contrast --severity 1 --workers 1")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("896 images: 1 combination")
    assert np.load(tmp_path / "out" / "contrast-1.npy").shape == (896, 32, 32, 3)
    assert "choose digits:train or digits:test" in refusal(typed("digits other"))


def test_ctrl_c_says_how_to_resume(typed, asked):
    done = typed("set.npz out")
    assert (done.exit_code, done.stdout) == (130, "")
    assert done.stderr == ("caster: interrupted, run it again to resume\n")


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False])
def test_a_real_ctrl_c(tmp_path, early):
    """Sent to all processes of the group, as a terminal does."""
    images = np.tile(PIXELS, (80, 1, 1, 1))
    np.savez(tmp_path / "set.npz", images=images, labels=np.zeros(480, dtype=int))
    command = [sys.executable, "-m", "caster", "corrupt", tmp_path / "set.npz", tmp_path / "out"]
    with subprocess.Popen(
        [*command, "--corruption", "glass_blur", "--workers", "2"], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0,
    ) as process:  # fmt: skip
        manifest = tmp_path / "out/manifest.json"
        while not (manifest.exists() and (early or json.loads(manifest.read_text())["begun"])):
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=60)
    assert said == ("", "caster: interrupted, run it again to resume\n")
    assert process.returncode == 130
    left = {path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".tmp"}
    # Ctrl-C between the creation of a temporary file and the block that removes it leaves one
    made = {"labels.npy", "labels.npy.part", "glass_blur.npy.part"}
    assert left <= {"manifest.json", *made}


def test_hostile_names_and_sizes(typed, tmp_path):
    for folder in (b"set/a", b"set/b"):
        (tmp_path / os.fsdecode(folder)).mkdir(parents=True)
        for name in (b"\xe9.png", b"x.png"):
            Image.fromarray(PIXELS[0]).save(os.path.join(folder, name))
    done = typed("set out --corruption contrast --severity 1 --workers 1")
    assert done.exit_code == 0, done.output
    assert os.path.exists(b"out/contrast/1/a/\xe9.JPEG")
    listing = subprocess.run(
        "cd out/contrast/1 && LC_ALL=C sha256sum -- */* | sha256sum",
        shell=True,
        capture_output=True,
        text=True,
    )
    noted = json.loads((tmp_path / "out/manifest.json").read_text())["written"]["contrast/1"]
    assert listing.stdout.split()[0] == noted["sha256"]
    assert "1024" in refusal(typed("set two --max pixels=1023"))
    Image.new("RGB", (1, 3000)).save("set/a/x.png")
    assert "x.png: 1 x 3,000 pixels resized" in refusal(typed("set two --max pixels=3000"))
