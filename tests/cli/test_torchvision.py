"""A torchvision that does not match torch: every way to timm ends in one line with the remedy.

Tests define the operators such a torchvision lacks (tests/conftest.py). This one starts a process
without them, as a user has it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from caster import Caster

SOURCE = Path(__file__).parents[2] / "src"
STUB = "raise RuntimeError('operator torchvision::nms does not exist')\n"
CODE = """
import json, sys
from typer.testing import CliRunner
from caster import CasterError
from caster_bench.engine.networks import build
from caster.cli.app import app

try:
    import torchvision
except RuntimeError:
    said = []
    for words in json.loads(sys.argv[1]):
        done = CliRunner().invoke(app, words)
        said.append([done.exit_code, done.output])
    try:
        build("mini-resnet", 10)
    except CasterError as error:
        said.append([1, f"caster: {error}\\n"])
    print(json.dumps(said))
"""


def run(commands, *folders) -> str:
    """Run commands in a process of its own; nothing is printed where torchvision works."""
    path = os.pathsep.join(map(str, (*folders, SOURCE)))
    ran = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(commands)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "400"},
        timeout=120,
        check=True,
    )
    return ran.stdout


@pytest.fixture
def commands(tmp_path):
    """Those that take a timm model, or build on timm."""
    rng = np.random.default_rng(0)
    for label in "ab":
        (tmp_path / "images" / label).mkdir(parents=True)
        pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / label / "0.png")
    state, images = tmp_path / "state.caster", tmp_path / "images"
    Caster().fit(rng.standard_normal((20, 4)), [0, 1] * 10).save(state)
    model = ["--model", "timm:resnet18"]
    return [
        ["fit", *model, str(images), "-o", str(tmp_path / "new.caster")],
        ["predict", *model, str(state), str(images), "-o", str(tmp_path / "out.csv")],
        ["evaluate", *model, str(state), str(images), "-o", str(tmp_path / "report.html")],
        [
            "bench",
            "train",
            "mini-vit",
            "--data",
            "digits",
            "--out",
            str(tmp_path / "net.safetensors"),
        ],
    ]


def test_one_line_with_the_remedy(commands, tmp_path):
    before = {*tmp_path.iterdir()}
    found = run(commands)
    if not found:  # the pair installed here works: one that raises the same error in its place
        stub = tmp_path.with_name(f"{tmp_path.name}-stub")
        stub.mkdir()
        (stub / "torchvision.py").write_text(STUB)
        found = run(commands, stub)
    said = json.loads(found)
    assert len(said) == len(commands) + 1
    for (status, line), words in zip(said, [*commands, ["build"]], strict=True):
        assert status == 1, words
        assert line.count("\n") == 1, line
        assert line.startswith("caster: "), line
        assert "torchvision::nms does not exist" in line, line
        assert "pip install --force-reinstall --no-deps torchvision" in line, line
    assert {*tmp_path.iterdir()} == before
