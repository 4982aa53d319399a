"""`wrap`: every kind of model, its options, and rejected inputs."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from functools import partial

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, parser
from safetensors.torch import save_file
from torch import nn

import caster
from caster import CasterError, wrap
from caster.models.function import FunctionModel
from caster.models.onnx import OnnxModel
from caster.models.preprocessing import Preprocessing
from caster.models.protocol import Outputs
from caster.models.torch import TorchModel
from tests.support.messages import error_line

IMAGES = np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32)
HALF = Preprocessing(range=1.0, mean=(0.5,) * 3, std=(0.5,) * 3, layout="NCHW")
TOML = 'range = 1\nmean = 0.5\nstd = 0.5\nlayout = "NCHW"\n'
TIMM = "test_resnet.r160_in1k"  # half a million weights


def network(n_classes=5):
    torch.manual_seed(0)
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, n_classes))


def embed(images):
    return images.mean((2, 3))


@pytest.fixture
def onnx_file(tmp_path):
    weight = np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32)
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[N, 3, 8, 8] x) => (float[N, 5] y)'
        " { p = GlobalAveragePool(x) h = Flatten(p) [fc] y = MatMul(h, W) }"
    )
    model.graph.initializer.append(numpy_helper.from_array(weight, "W"))
    onnx.save(model, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.fixture
def toml(tmp_path):
    (tmp_path / "pre.toml").write_text(TOML)
    return tmp_path / "pre.toml"


rejection = partial(error_line, wrap)


# --- which kind ------------------------------------------------------------------------------


def test_a_module():
    net = network()
    model = wrap(net)
    assert type(model) is TorchModel
    assert (model.module, model.name, model.preprocessing) == (net, "Sequential", None)
    outputs = model(IMAGES)
    assert model.head == "2"
    torch.testing.assert_close(outputs.features, torch.tensor(embed(IMAGES)))


def test_a_modules_options():
    model = wrap(network(), head="2", device="cpu", bf16=True, channels_last=True)
    assert (model.head, model.bf16, model.channels_last) == ("2", True, True)


def test_an_onnx_file(onnx_file):
    for path in (onnx_file, str(onnx_file)):
        model = wrap(path)
        assert type(model) is OnnxModel
        assert model.name == str(onnx_file)
        np.testing.assert_allclose(model(IMAGES).features, embed(IMAGES), atol=1e-6)
    model = wrap(onnx_file, head="fc", providers=["CPUExecutionProvider"])
    assert model(IMAGES).logits.shape == (4, 5)
    with pytest.raises(CasterError, match="no provider Abacus"):
        wrap(onnx_file, providers=["Abacus"])(IMAGES)


def test_a_single_image_for_an_onnx_file(onnx_file):
    with pytest.raises(CasterError, match="a single image needs a batch axis"):
        wrap(onnx_file)(IMAGES[0])
    assert repr(wrap(onnx_file)) == f"OnnxModel('{onnx_file}', input=(any, 3, 8, 8))"


def test_a_function():
    model = wrap(embed, version="pixels-1")
    assert type(model) is FunctionModel
    assert (model.name, model.version, model.preprocessing) == ("embed", "pixels-1", None)
    outputs = model(IMAGES)
    assert np.array_equal(outputs.features, embed(IMAGES))
    assert outputs.logits is None
    model.verify()


def test_the_name_is_public():
    assert caster.wrap is wrap


@pytest.mark.parametrize(
    "model",
    ["model.pt", "resnet18", "", None, 3, np.zeros((2, 2)), {"a": 1}, ["x.onnx"], nn.Flatten],
    ids=repr,
)
def test_inputs_that_are_not_a_model(model):
    message = rejection(model)
    assert message.startswith(
        "a model is an nn.Module, 'timm:NAME', 'hf:FOLDER', 'FILE.py:FACTORY'"
    )
    assert message.endswith(repr(model) if isinstance(model, str) else type(model).__name__)


def test_a_model_is_wrapped_once(onnx_file):
    """Wrapping again would lose the digest that binds a state to the model."""
    assert rejection(wrap(network())) == "Sequential is wrapped already"
    assert rejection(wrap(embed)) == "embed is wrapped already"
    assert rejection(wrap(onnx_file)) == f"{onnx_file} is wrapped already"


def test_modules_without_values():
    with torch.device("meta"):
        whole = network()
    part = torch.nn.Sequential(torch.nn.BatchNorm2d(3), network())
    part[0].running_mean = part[0].running_mean.to("meta")
    assert "meta device" in rejection(part)
    assert "meta device" in rejection(whole)
    assert "meta tensor" in rejection(whole, device="cpu")


# --- options of another kind of model --------------------------------------------------------

VALUES = {
    "head": "fc",
    "checkpoint": "weights.safetensors",
    "device": "cpu",
    "bf16": True,
    "channels_last": True,
    "providers": ["CPUExecutionProvider"],
    "version": "1",
}
OTHER_OPTIONS = {
    "module": ("checkpoint", "providers", "version"),
    "timm": ("providers", "version"),
    "onnx": ("checkpoint", "device", "bf16", "channels_last", "version"),
    "function": ("head", "checkpoint", "device", "bf16", "channels_last", "providers"),
}


@pytest.mark.parametrize(
    ("kind", "option"),
    [(kind, option) for kind, options in OTHER_OPTIONS.items() for option in options],
)
def test_options_of_another_kind_of_model_are_rejected(kind, option):
    model, called = {
        "module": (network(), "Sequential"),
        "timm": ("timm:resnet18", "'timm:resnet18'"),
        "onnx": ("model.onnx", "'model.onnx'"),
        "function": (embed, "function"),
    }[kind]
    message = rejection(model, **{option: VALUES[option]})
    remedy = ""
    if (kind, option) == ("onnx", "device"):
        remedy = ": use `--provider CPUExecutionProvider` (providers= in Python)"
    assert message == f"{option}= does not apply to {called}{remedy}"


@pytest.mark.parametrize(
    ("device", "provider"),
    [
        (torch.device("cpu"), " CPUExecutionProvider"),
        ("cpu:0", " CPUExecutionProvider"),
        ("cuda:1", " CUDAExecutionProvider"),
        ("mps", ""),
    ],
)
def test_the_provider_for_a_device(device, provider):
    assert f"use `--provider{provider}` (" in rejection("model.onnx", device=device)


# --- preprocessing ---------------------------------------------------------------------------


def test_preprocessing_of_every_kind_of_model(onnx_file, toml):
    for model in (network(), onnx_file, embed):
        for stated in (HALF, toml, str(toml)):
            assert wrap(model, preprocessing=stated).preprocessing == HALF


def test_in_graph(onnx_file):
    pixels = Preprocessing.in_graph("NCHW", "float32")
    for model in (network(), onnx_file):
        assert wrap(model, preprocessing="in-graph").preprocessing == pixels
    assert "a function needs a complete preprocessing" in rejection(embed, preprocessing="in-graph")


def test_preprocessing_that_cannot_be_read(tmp_path):
    for model in (network(), embed, "timm:resnet18"):
        message = rejection(model, preprocessing=tmp_path / "none.toml")
        assert message.endswith("none.toml: No such file or directory")


# --- libraries that are missing --------------------------------------------------------------


def test_without_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert rejection("timm:resnet18") == (
        "timm:resnet18 needs timm: pip install 'caster-tta[timm]'"
    )


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "caster.models.torch")
    assert rejection("timm:resnet18") == (
        "timm:resnet18 needs torch: pip install 'caster-tta[torch]'"
    )
    assert type(wrap(embed)) is FunctionModel


def test_wrapping_a_function_imports_no_framework():
    code = (
        "import sys, caster; caster.wrap(len); "
        "sys.exit(bool({'torch', 'timm', 'onnx', 'onnxruntime'} & {*sys.modules}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- functions -------------------------------------------------------------------------------


def both(images):
    return embed(images), images.sum((2, 3))[:, :2]


@pytest.mark.parametrize(
    "function",
    [both, lambda images: Outputs(*both(images)), partial(both)],
    ids=["tuple", "Outputs", "partial"],
)
def test_functions_with_logits(function):
    outputs = wrap(function)(IMAGES)
    assert np.array_equal(outputs.features, both(IMAGES)[0])
    assert np.array_equal(outputs.logits, both(IMAGES)[1])


def test_functions_of_torch_tensors_and_objects():
    class Service:
        def __call__(self, images):
            return torch.as_tensor(embed(images))

    model = wrap(Service(), version="v1")
    assert model.name == "Service"
    assert torch.equal(model(IMAGES).features, torch.as_tensor(embed(IMAGES)))


def test_functions_that_record_gradients_or_return_half_precision():
    weight = torch.eye(3, requires_grad=True)
    images = torch.tensor(IMAGES)
    outputs = wrap(lambda batch: embed(batch) @ weight)(images)
    assert not outputs.features.requires_grad
    assert torch.equal(outputs.features, embed(images))
    for dtype in (torch.bfloat16, torch.float16):
        outputs = wrap(lambda batch, dtype=dtype: (embed(batch), embed(batch).to(dtype)))(images)
        assert outputs.logits.dtype == torch.float32
        assert torch.equal(outputs.logits, embed(images).to(dtype).float())


def test_functions_that_do_not_return_numbers():
    with pytest.raises(CasterError, match="expected numbers, not an array of <U1"):
        wrap(lambda batch: np.full((len(batch), 2), "a"))(IMAGES)


def test_functions_of_anything_with_a_length():
    texts = ["a cat", "a dog", "a small bird"]
    outputs = wrap(lambda batch: np.array([[len(text), 1.0] for text in batch]))(texts)
    assert outputs.features[:, 0].tolist() == [5, 5, 12]


def test_the_version_identifies_a_function():
    assert wrap(embed).sha256 is None
    assert wrap(embed, version="a").sha256 == hashlib.sha256(b"version a").hexdigest()
    assert wrap(embed, version="a").sha256 == wrap(both, version="a").sha256
    assert wrap(embed, version="a").sha256 != wrap(embed, version="b").sha256


WRONG = {
    "rows": (lambda b: embed(b)[:-1], "features as an array (4, width), not (3, 3)"),
    "one dimension": (lambda b: embed(b)[:, 0], "features as an array (4, width), not (4,)"),
    "images": (lambda b: b, "features as an array (4, width), not (4, 3, 8, 8)"),
    "a number": (lambda b: np.float32(3), "features as an array (4, width), not ()"),
    "a list": (lambda b: embed(b).tolist(), "features as an array (4, width), not list"),
    "nothing": (lambda b: None, "features as an array (4, width), not NoneType"),
    "no features": (lambda b: (None, embed(b)), "features as an array (4, width), not NoneType"),
    "three": (lambda b: (embed(b),) * 3, "features as an array (4, width), not tuple"),
    "logits": (lambda b: (embed(b), embed(b)[1:]), "logits as an array (4, width), not (3, 3)"),
    "a row of logits": (
        lambda b: (embed(b), embed(b)[:, 0]),
        "logits as an array (4, width), not (4,)",
    ),
    "Outputs": (
        lambda b: Outputs(embed(b), embed(b)[1:]),
        "logits as an array (4, width), not (3, 3)",
    ),
}


@pytest.mark.parametrize(("function", "reason"), WRONG.values(), ids=WRONG)
def test_answers_of_the_wrong_shape(function, reason):
    assert error_line(wrap(function), IMAGES) == f"<lambda> must return {reason}"


# --- FILE.py:FACTORY ---------------------------------------------------------------------------

SMALL = torch.linspace(-1, 1, 4 * 48).reshape(4, 3, 4, 4)
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


@pytest.mark.parametrize("factory", ["make", "Network"])
def test_a_factory_of_a_module(path, factory):
    before = list(sys.path)
    model = wrap(f"{path}:{factory}", head="3")
    assert sys.path == before
    assert model.name == f"{path}:{factory}"
    outputs = model(SMALL)
    assert (outputs.features.shape, outputs.logits.shape) == ((4, 5), (4, 3))
    assert model.sha256 == wrap(wrap(f"{path}:make").module, head="3").sha256
    model.twin()


def test_a_checkpoint_for_a_factory(path, tmp_path):
    net = wrap(f"{path}:make").module
    with torch.no_grad():
        net[1].weight.mul_(2)
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    model = wrap(f"{path}:make", checkpoint=tmp_path / "w.safetensors")
    assert model.sha256 == wrap(net).sha256 != wrap(f"{path}:make").sha256
    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "w.safetensors")
    message = rejection(f"{path}:make", checkpoint=tmp_path / "w.safetensors")
    assert f"does not fit {path}:make: Error(s) in loading" in message
    assert "does not exist" in rejection(f"{path}:make", checkpoint=tmp_path / "none.safetensors")
    assert "checkpoint= does not apply to" in rejection(f"{path}:embed", checkpoint="w.safetensors")


def test_factories_of_functions_and_wrapped_models(path):
    plain = wrap(f"{path}:embed", version="1")
    assert type(plain) is FunctionModel
    model = wrap(f"{path}:wrapped")
    assert (type(model), model.version) == (FunctionModel, "mine-1")
    np.testing.assert_array_equal(model(SMALL).features, SMALL.mean((2, 3)))
    assert rejection(f"{path}:wrapped", version="2") == (
        f"version= does not apply to '{path}:wrapped'"
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
def test_factories_that_fail(path, factory, reason):
    assert reason.format(path=path) in rejection(f"{path}:{factory}")


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
    message = rejection(f"{tmp_path / 'odd.py'}:make")
    assert message.startswith(f"{tmp_path / 'odd.py'} cannot be imported: {reason}")
    assert sys.path == before
    assert "there is no file" in rejection(f"{tmp_path / 'none.py'}:make")
