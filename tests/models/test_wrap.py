"""One call for every kind of model: what it makes of each, and each option that is out of place."""

from __future__ import annotations

import hashlib
import os
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


def refusal(model, **options) -> str:
    with pytest.raises(CasterError) as caught:
        wrap(model, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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
def test_what_is_no_model(model):
    message = refusal(model)
    assert message.startswith(
        "a model is an nn.Module, 'timm:NAME', 'hf:FOLDER', 'FILE.py:FACTORY'"
    )
    assert message.endswith(repr(model) if isinstance(model, str) else type(model).__name__)


def test_a_model_is_wrapped_once(onnx_file):
    """A second time would lose the digest that binds a state to it."""
    assert refusal(wrap(network())) == "Sequential is wrapped already"
    assert refusal(wrap(embed)) == "embed is wrapped already"
    assert refusal(wrap(onnx_file)) == f"{onnx_file} is wrapped already"


# --- options out of place --------------------------------------------------------------------

VALUES = {
    "head": "fc",
    "checkpoint": "weights.safetensors",
    "device": "cpu",
    "bf16": True,
    "channels_last": True,
    "providers": ["CPUExecutionProvider"],
    "version": "1",
}
STRAY = {
    "module": ("checkpoint", "providers", "version"),
    "timm": ("providers", "version"),
    "onnx": ("checkpoint", "device", "bf16", "channels_last", "version"),
    "function": ("head", "checkpoint", "device", "bf16", "channels_last", "providers"),
}


@pytest.mark.parametrize(
    ("kind", "option"), [(kind, option) for kind, options in STRAY.items() for option in options]
)
def test_stray_options(kind, option):
    model, called = {
        "module": (network(), "Sequential"),
        "timm": ("timm:resnet18", "'timm:resnet18'"),
        "onnx": ("model.onnx", "'model.onnx'"),
        "function": (embed, "function"),
    }[kind]
    message = refusal(model, **{option: VALUES[option]})
    assert message == f"{option} is not an option of {called}"


# --- preprocessing ---------------------------------------------------------------------------


def test_preprocessing_of_every_kind_of_model(onnx_file, toml):
    for model in (network(), onnx_file, embed):
        for stated in (HALF, toml, str(toml)):
            assert wrap(model, preprocessing=stated).preprocessing == HALF


def test_in_graph(onnx_file):
    pixels = Preprocessing.in_graph("NCHW", "float32")
    for model in (network(), onnx_file):
        assert wrap(model, preprocessing="in-graph").preprocessing == pixels
    assert refusal(embed, preprocessing="in-graph") == (
        "state a function's preprocessing in full: it shows no input shape"
    )


def test_preprocessing_that_cannot_be_read(tmp_path):
    for model in (network(), embed, "timm:resnet18"):
        message = refusal(model, preprocessing=tmp_path / "none.toml")
        assert message.endswith("none.toml: No such file or directory")


# --- timm ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Weights of a small timm model, of one with other classes, and of another architecture."""
    import timm

    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    nets = {
        "plain": timm.create_model(TIMM),
        "eleven": timm.create_model(TIMM, num_classes=11),
        "other": timm.create_model("test_efficientnet"),
    }
    for name, net in nets.items():
        for value in net.buffers():
            if value.is_floating_point():
                value.uniform_(0.5, 1.5)
        save_file(net.state_dict(), folder / f"{name}.safetensors")
    return folder, nets


@pytest.mark.parametrize(("name", "n_classes"), [("plain", 1000), ("eleven", 11)])
def test_timm_with_a_checkpoint(checkpoints, name, n_classes):
    folder, nets = checkpoints
    path = folder / f"{name}.safetensors"
    model = wrap(f"timm:{TIMM}", checkpoint=path)
    expected = nets[name].eval().state_dict()
    loaded = model.module.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[key], expected[key]) for key in expected)
    outputs = model(torch.tensor(IMAGES).repeat(1, 1, 4, 4))
    assert outputs.logits.shape == (4, n_classes)
    with torch.no_grad():
        assert torch.equal(outputs.logits, nets[name](torch.tensor(IMAGES).repeat(1, 1, 4, 4)))
    assert model.name == f"timm:{TIMM}"
    assert model.sha256 == TorchModel(nets[name]).sha256
    assert model.sha256 == wrap(nets[name], device="cpu").sha256
    assert wrap(f"timm:{TIMM}", checkpoint=str(path)).sha256 == model.sha256


def test_timms_own_preprocessing(checkpoints, toml):
    from timm.data import resolve_model_data_config

    folder, nets = checkpoints
    use = partial(wrap, f"timm:{TIMM}", checkpoint=folder / "plain.safetensors")
    stated = use().preprocessing
    config = resolve_model_data_config(nets["plain"])
    assert (stated.crop, stated.resize) == ((160, 160), int(160 / config["crop_pct"]))
    assert (stated.mean, stated.std) == (config["mean"], config["std"])
    assert stated.interpolation == config["interpolation"]
    assert use(preprocessing=toml).preprocessing == HALF
    assert use(preprocessing="in-graph").preprocessing == Preprocessing.in_graph("NCHW", "float32")


def test_a_preprocessing_of_timms_that_is_not_known_can_be_stated(checkpoints, monkeypatch, toml):
    import timm

    create = timm.create_model
    border = partial(create, pretrained_cfg_overlay={"crop_mode": "border"})
    monkeypatch.setattr(timm, "create_model", border)
    use = {"checkpoint": checkpoints[0] / "plain.safetensors"}
    assert "crop mode 'border'" in refusal(f"timm:{TIMM}", **use)
    assert wrap(f"timm:{TIMM}", **use, preprocessing=toml).preprocessing == HALF


def test_a_distilled_checkpoint_has_two_classifiers(tmp_path):
    import timm

    net = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=3, depth=12)
    save_file(net.state_dict(), tmp_path / "deit.safetensors")
    name, path = "timm:deit_tiny_distilled_patch16_224", tmp_path / "deit.safetensors"
    model = wrap(name, checkpoint=path, head="head")
    assert model.module.head.out_features == model.module.head_dist.out_features == 3


def test_checkpoints_that_do_not_fit(checkpoints, tmp_path):
    folder, _ = checkpoints
    message = refusal(f"timm:{TIMM}", checkpoint=folder / "other.safetensors")
    assert message.startswith(
        f"timm:{TIMM} cannot be made: Error(s) in loading state_dict for ResN"
    )
    assert "Missing key(s)" in message
    assert len(message) < 400
    content = (folder / "plain.safetensors").read_bytes()
    damaged = tmp_path / "damaged.safetensors"
    for part in (content[:-100], content[: len(content) // 2], content[:6], b"", b"hello" * 9):
        damaged.write_bytes(part)
        message = refusal(f"timm:{TIMM}", checkpoint=damaged)
        assert message == f"the checkpoint {damaged} is truncated or damaged"
    missing = refusal(f"timm:{TIMM}", checkpoint=tmp_path / "none.safetensors")
    assert missing == f"the checkpoint {tmp_path / 'none.safetensors'} does not exist"


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (torch.tensor(1.0), "has the shape ()"),
        (torch.zeros(5), "has the shape (5,)"),
        (torch.zeros(10**9, 0), "has the shape (1000000000, 0)"),  # costs no byte in the file
        (torch.zeros(1000, 96, 1), "size mismatch"),
        (torch.zeros(1000, 96, dtype=torch.complex64), "holds torch.complex64, not torch.float32"),
        (torch.zeros(1000, 96, dtype=torch.int64), "holds torch.int64, not torch.float32"),
    ],
    ids=["scalar", "row", "wide", "three axes", "complex", "whole"],
)
def test_classifiers_that_are_no_matrix(checkpoints, tmp_path, odd, reason):
    path = tmp_path / "odd.safetensors"
    save_file(checkpoints[1]["plain"].state_dict() | {"fc.weight": odd}, path)
    assert reason in refusal(f"timm:{TIMM}", checkpoint=path)


def test_modules_without_values():
    with torch.device("meta"):
        whole = network()
    part = torch.nn.Sequential(torch.nn.BatchNorm2d(3), network())
    part[0].running_mean = part[0].running_mean.to("meta")
    assert "meta device" in refusal(part)
    assert "meta device" in refusal(whole)
    assert "meta tensor" in refusal(whole, device="cpu")


class Trap:
    def __reduce__(self):
        return os.mkdir, ("unpickled",)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_nothing_is_unpickled(tmp_path, monkeypatch, suffix):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"weights{suffix}"
    torch.save({"fc.weight": Trap()}, path)
    message = refusal(f"timm:{TIMM}", checkpoint=path)
    assert f"{path} must be a .safetensors file: caster never unpickles" in message
    path.rename(tmp_path / "weights.safetensors")
    assert "damaged" in refusal(f"timm:{TIMM}", checkpoint=tmp_path / "weights.safetensors")
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("resnet180", "Unknown model (resnet180)"),
        ("", "Unknown model ()"),
        ("resnet18.nonsense", "Invalid pretrained tag (nonsense)"),
        ("someone/resnet18", "has no source prefix"),
        ("ftp:resnet18", "Unknown model source"),
    ],
)
def test_names_timm_does_not_know(checkpoints, name, reason):
    for options in ({}, {"checkpoint": checkpoints[0] / "plain.safetensors"}):
        message = refusal(f"timm:{name}", **options)
        assert message.startswith(f"timm:{name} cannot be made: ")
        assert reason in message


def test_no_network(monkeypatch):
    import timm

    def fail(name, **options):
        assert (name, options) == ("resnet18", {"pretrained": True})
        raise OSError("Name or service not known\nRetrying")

    monkeypatch.setattr(timm, "create_model", fail)
    assert refusal("timm:resnet18") == (
        "cannot fetch the pretrained weights of timm:resnet18: without a network, give a local "
        "checkpoint (.safetensors)"
    )


def test_pretrained_weights_are_asked_for_only_without_a_checkpoint(checkpoints, monkeypatch):
    import timm

    asked, create = [], timm.create_model

    def note(name, pretrained=False, **options):
        asked.append(pretrained)
        return create(name, **options)

    monkeypatch.setattr(timm, "create_model", note)
    wrap(f"timm:{TIMM}", checkpoint=checkpoints[0] / "plain.safetensors")
    assert not any(asked)
    wrap(f"timm:{TIMM}")
    assert asked[-1] is True


# --- libraries that are missing --------------------------------------------------------------


def test_without_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert refusal("timm:resnet18") == ("timm:resnet18 needs timm: pip install 'caster-tta[timm]'")


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "caster.models.torch")
    assert refusal("timm:resnet18") == (
        "timm:resnet18 needs torch: pip install 'caster-tta[torch]'"
    )
    assert type(wrap(embed)) is FunctionModel


def test_wrapping_a_function_imports_none_of_them():
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


def test_functions_that_record_gradients_or_answer_in_half():
    weight = torch.eye(3, requires_grad=True)
    images = torch.tensor(IMAGES)
    outputs = wrap(lambda batch: embed(batch) @ weight)(images)
    assert not outputs.features.requires_grad
    assert torch.equal(outputs.features, embed(images))
    for dtype in (torch.bfloat16, torch.float16):
        outputs = wrap(lambda batch, dtype=dtype: (embed(batch), embed(batch).to(dtype)))(images)
        assert outputs.logits.dtype == torch.float32
        assert torch.equal(outputs.logits, embed(images).to(dtype).float())


def test_functions_that_give_no_numbers():
    with pytest.raises(CasterError, match="numbers are needed, not an array of <U1"):
        wrap(lambda batch: np.full((len(batch), 2), "a"))(IMAGES)


def test_functions_of_anything_with_a_length():
    texts = ["a cat", "a dog", "a small bird"]
    outputs = wrap(lambda batch: np.array([[len(text), 1.0] for text in batch]))(texts)
    assert outputs.features[:, 0].tolist() == [5, 5, 12]


def test_the_version_is_what_binds():
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
    with pytest.raises(CasterError) as caught:
        wrap(function)(IMAGES)
    assert str(caught.value) == f"<lambda> must give {reason}"
