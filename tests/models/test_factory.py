"""A user's own network from FILE.py:FACTORY: what it becomes, and every way it can fail."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from caster import CasterError, wrap
from caster.models.function import FunctionModel

IMAGES = torch.linspace(-1, 1, 4 * 48).reshape(4, 3, 4, 4)
CODE = """
from __future__ import annotations
from dataclasses import dataclass, field

import blocks  # lies beside this file
import caster
import torch
from torch import nn

@dataclass
class Sizes:
    hidden: int = blocks.HIDDEN
    more: list[int] = field(default_factory=list)

class Network(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        layers = nn.Flatten(), nn.Linear(48, Sizes().hidden), nn.ReLU(), nn.Linear(5, 3)
        super().__init__(*layers)

def make():
    import blocks
    return Network()

def embed():
    return lambda images: images.mean((2, 3))

def wrapped():
    return caster.wrap(embed(), version="mine-1")

def fails():
    raise RuntimeError("no weights\\nanywhere")

def leaves():
    raise SystemExit(2)

def nothing():
    pass

def a_class():
    return Network

number = 3
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "blocks.py").write_text("HIDDEN = 5\n")
    (tmp_path / "mine.py").write_text(CODE)
    yield tmp_path / "mine.py"
    sys.modules.pop("blocks", None)


def refusal(model, **options) -> str:
    with pytest.raises(CasterError) as caught:
        wrap(model, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("factory", ["make", "Network"])
def test_a_module(path, factory):
    before = list(sys.path)
    model = wrap(f"{path}:{factory}", head="3")
    assert sys.path == before
    assert model.name == f"{path}:{factory}"
    outputs = model(IMAGES)
    assert (outputs.features.shape, outputs.logits.shape) == ((4, 5), (4, 3))
    assert model.sha256 == wrap(wrap(f"{path}:make").module, head="3").sha256
    model.twin()


def test_a_checkpoint(path, tmp_path):
    net = wrap(f"{path}:make").module
    with torch.no_grad():
        net[1].weight.mul_(2)
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    model = wrap(f"{path}:make", checkpoint=tmp_path / "w.safetensors")
    assert model.sha256 == wrap(net).sha256 != wrap(f"{path}:make").sha256
    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "w.safetensors")
    message = refusal(f"{path}:make", checkpoint=tmp_path / "w.safetensors")
    assert f"does not fit {path}:make: Error(s) in loading" in message
    assert "does not exist" in refusal(f"{path}:make", checkpoint=tmp_path / "none.safetensors")
    assert "checkpoint is not an option" in refusal(f"{path}:embed", checkpoint="w.safetensors")


def test_functions_and_wrapped_models(path):
    plain = wrap(f"{path}:embed", version="1")
    assert type(plain) is FunctionModel
    model = wrap(f"{path}:wrapped")
    assert (type(model), model.version) == (FunctionModel, "mine-1")
    np.testing.assert_array_equal(model(IMAGES).features, IMAGES.mean((2, 3)))
    assert refusal(f"{path}:wrapped", version="2") == (
        f"version is not an option of '{path}:wrapped'"
    )


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("absent", "has no function 'absent'"),
        ("number", "has no function 'number'"),
        ("", "has no function ''"),
        ("fails", "fails() of {path} failed: RuntimeError: no weights anywhere"),
        ("leaves", "leaves() of {path} failed: SystemExit: 2"),
        ("nothing", "must return an nn.Module, not NoneType"),
        ("a_class", "must return an nn.Module, not type"),
    ],
)
def test_what_makes_no_model(path, factory, reason):
    assert reason.format(path=path) in refusal(f"{path}:{factory}")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def make(:", "SyntaxError"),
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named"),
        ("1 / 0", "ZeroDivisionError"),
        ("raise SystemExit('usage')", "SystemExit: usage"),
    ],
)
def test_files_that_cannot_be_imported(tmp_path, code, reason):
    (tmp_path / "odd.py").write_text(code)
    before = list(sys.path)
    message = refusal(f"{tmp_path / 'odd.py'}:make")
    assert message.startswith(f"{tmp_path / 'odd.py'} cannot be imported: {reason}")
    assert sys.path == before
    assert "there is no file" in refusal(f"{tmp_path / 'none.py'}:make")
