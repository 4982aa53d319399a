"""A user's own network and a folder of transformers on the command line."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from caster import Adapter, wrap
from tests.support.colours import NAMES, TOML, head, patches, write_folder
from tests.support.command_line import cli

CODE = """
from torch import nn

def make():
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 8))
"""


@pytest.fixture
def typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_folder(tmp_path / "source", *patches(10))
    return lambda line: cli(*line.split())


def test_a_users_own_network(typed, tmp_path):
    (tmp_path / "p.toml").write_text(TOML)
    (tmp_path / "mine.py").write_text(CODE)
    weight, bias = map(torch.tensor, head())
    save_file({"2.weight": weight.T.contiguous(), "2.bias": bias}, tmp_path / "w.safetensors")
    model = "--model mine.py:make --preprocessing p.toml --checkpoint w.safetensors"
    result = typed(f"fit {model} source -o s.caster")
    assert result.exit_code == 0, result.output
    result = typed(f"predict {model} s.caster source -o out.csv")
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert len(lines) == 81
    assert all(any(name in line for name in NAMES) for line in lines[1:])
    Adapter(  # the state is bound to the module and its weights
        wrap("mine.py:make", checkpoint="w.safetensors", preprocessing="p.toml"), "s.caster"
    )
    result = typed(f"fit {model.replace(':make', ':none')} source -o t.caster")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    result = typed(f"fit {model} source -o mine.py")
    assert result.exit_code == 1
    assert (tmp_path / "mine.py").read_text() == CODE


def test_a_folder_of_transformers(typed, tmp_path):
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], num_labels=8)
    ResNetForImageClassification(config).save_pretrained(tmp_path / "net")
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 16, "width": 16},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (tmp_path / "net" / "preprocessor_config.json").write_text(json.dumps(processor))
    result = typed("fit --model hf:net source -o s.caster --layers")
    assert result.exit_code == 0, result.output
    result = typed("predict --model hf:net s.caster source -o out.csv")
    assert result.exit_code == 0, result.output
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 81
    (tmp_path / "net" / "preprocessor_config.json").unlink()
    result = typed("fit --model hf:net source -o t.caster")
    assert "preprocessing" in result.stderr
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
