"""Sweep files for tests."""

from __future__ import annotations

from pathlib import Path

from caster_bench.sweeps import Sweep, read

SMALL = """
name = "small"
title = "A small sweep"

[constants]
tau = 0.8

[backbones.r18]
family = "batch"
checkpoint = "checkpoints/r18.safetensors"

[backbones.vit]
family = "layer"
checkpoint = "checkpoints/vit.safetensors"

[data.digits]
source = "digits:train"
target = "digits:test"
threshold = 0.9

[[grid]]
study = ["corruption", "certificate"]
corruptions = ["fog"]
severities = [1, 5]
methods = ["frozen", "source-gda", "caster", "tent"]
batch_sizes = [20]
seeds = [0, 1]
"""
ONE = SMALL.replace("[1, 5]", "[1]")


def sweep_of(folder: Path, text: str = SMALL) -> Sweep:
    path = folder / "sweep.toml"
    path.write_text(text)
    return read(path)
