"""Benchmarks that the docs cite still start: what they use may have been renamed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]


def run(folder: Path, *words: str) -> str:
    """The output of a script; it must succeed."""
    script, *arguments = words
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("pack.py", "20", "50", "4"), "packed and verified in"),
        (("verify.py", "20"), "cells, 17 MiB: 0 problems"),
        (("state_size.py", "mini-resnet:10:32"), "mini-resnet | 10 |"),
        (("certificate_rules.py", "--help"), "store the logits of a network"),
    ],
)
def test_a_script_runs(tmp_path, words, said):
    assert said in run(tmp_path, *words)


@pytest.mark.slow
@pytest.mark.whole
def test_the_ablation_runs_all_variants(tmp_path, checkpoints):
    images = np.random.default_rng(0).integers(256, size=(600, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=np.arange(600) % 10)
    network = str(checkpoints / "checkpoints" / "resnet.safetensors")
    words = "mixture_ablation.py", network, "images.npz", "images.npz", "--sizes", "600"
    found = run(tmp_path, *words)
    for variant in ("smoothed frozen", "- chain", "+ true mixture", "+ classes in float32"):
        assert found.count(f" {variant} ") == 5, variant  # four streams, and the mean


@pytest.mark.slow
@pytest.mark.parametrize("side", [32, 224])
def test_images_for_the_reference_corruptions(tmp_path, side):
    pixels = np.random.default_rng(0).integers(256, size=(3, side, side, 3), dtype=np.uint8)
    for i, image in enumerate(pixels):
        (tmp_path / "set" / "a").mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "set" / "a" / f"{i}.png")
    options = ("--side", str(side), "--data", "set", "--count", "2")
    run(tmp_path, "parity", "images", "images.npz", *options)
    with np.load(tmp_path / "images.npz") as file:
        assert file["images"].shape == (2, side, side, 3)
