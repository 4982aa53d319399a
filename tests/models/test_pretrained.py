"""Pretrained models of timm and transformers: their weights, preprocessing and failures."""

from __future__ import annotations

import json
import os
import shutil
import sys
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from caster import wrap
from caster.models.preprocessing import Preprocessing
from caster.models.torch import TorchModel
from tests.support.messages import error_line

IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
HALF = Preprocessing(range=1.0, mean=(0.5,) * 3, std=(0.5,) * 3, layout="NCHW")
TIMM = "test_resnet.r160_in1k"  # half a million weights


rejection = partial(error_line, wrap)


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
    outputs = model(IMAGES)
    assert outputs.logits.shape == (2, n_classes)
    with torch.no_grad():
        assert torch.equal(outputs.logits, nets[name](IMAGES))
    assert model.name == f"timm:{TIMM}"
    assert model.sha256 == TorchModel(nets[name]).sha256
    assert model.sha256 == wrap(nets[name], device="cpu").sha256
    assert wrap(f"timm:{TIMM}", checkpoint=str(path)).sha256 == model.sha256


def test_timm_states_the_preprocessing(checkpoints):
    from timm.data import resolve_model_data_config

    folder, nets = checkpoints
    use = partial(wrap, f"timm:{TIMM}", checkpoint=folder / "plain.safetensors")
    stated = use().preprocessing
    config = resolve_model_data_config(nets["plain"])
    assert (stated.crop, stated.resize) == ((160, 160), int(160 / config["crop_pct"]))
    assert (stated.mean, stated.std) == (config["mean"], config["std"])
    assert stated.interpolation == config["interpolation"]
    assert use(preprocessing=HALF).preprocessing == HALF
    assert use(preprocessing="in-graph").preprocessing == Preprocessing.in_graph("NCHW", "float32")


def test_an_unsupported_preprocessing_of_timm_can_be_replaced(checkpoints, monkeypatch):
    import timm

    create = timm.create_model
    border = partial(create, pretrained_cfg_overlay={"crop_mode": "border"})
    monkeypatch.setattr(timm, "create_model", border)
    use = {"checkpoint": checkpoints[0] / "plain.safetensors"}
    assert "crop mode 'border'" in rejection(f"timm:{TIMM}", **use)
    assert wrap(f"timm:{TIMM}", **use, preprocessing=HALF).preprocessing == HALF


def test_a_distilled_checkpoint_has_two_classifiers(tmp_path):
    import timm

    net = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=3, depth=12)
    save_file(net.state_dict(), tmp_path / "deit.safetensors")
    name, path = "timm:deit_tiny_distilled_patch16_224", tmp_path / "deit.safetensors"
    model = wrap(name, checkpoint=path, head="head")
    assert model.module.head.out_features == model.module.head_dist.out_features == 3


def test_checkpoints_that_do_not_fit(checkpoints, tmp_path):
    folder, _ = checkpoints
    message = rejection(f"timm:{TIMM}", checkpoint=folder / "other.safetensors")
    assert message.startswith(f"cannot load timm:{TIMM}: Error(s) in loading state_dict for ResN")
    assert "Missing key(s)" in message
    assert len(message) < 400
    content = (folder / "plain.safetensors").read_bytes()
    damaged = tmp_path / "damaged.safetensors"
    for part in (content[:-100], content[: len(content) // 2], content[:6], b"", b"hello" * 9):
        damaged.write_bytes(part)
        message = rejection(f"timm:{TIMM}", checkpoint=damaged)
        assert message == f"the checkpoint {damaged} is truncated or damaged"
    missing = rejection(f"timm:{TIMM}", checkpoint=tmp_path / "none.safetensors")
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
def test_classifiers_that_are_not_a_matrix(checkpoints, tmp_path, odd, reason):
    path = tmp_path / "odd.safetensors"
    save_file(checkpoints[1]["plain"].state_dict() | {"fc.weight": odd}, path)
    assert reason in rejection(f"timm:{TIMM}", checkpoint=path)


class Trap:
    def __reduce__(self):
        return os.mkdir, ("unpickled",)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_nothing_is_unpickled(tmp_path, monkeypatch, suffix):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"weights{suffix}"
    torch.save({"fc.weight": Trap()}, path)
    message = rejection(f"timm:{TIMM}", checkpoint=path)
    assert f"{path} must be a .safetensors file: caster never unpickles" in message
    path.rename(tmp_path / "weights.safetensors")
    assert "damaged" in rejection(f"timm:{TIMM}", checkpoint=tmp_path / "weights.safetensors")
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
def test_unknown_timm_names(checkpoints, name, reason):
    for options in ({}, {"checkpoint": checkpoints[0] / "plain.safetensors"}):
        message = rejection(f"timm:{name}", **options)
        assert message.startswith(f"cannot load timm:{name}: ")
        assert reason in message


def test_no_network(monkeypatch):
    import timm

    def fail(name, **options):
        assert (name, options) == ("resnet18", {"pretrained": True})
        raise OSError("Name or service not known\nRetrying")

    monkeypatch.setattr(timm, "create_model", fail)
    message = rejection("timm:resnet18")
    assert message.startswith("cannot download the pretrained weights of timm:resnet18")
    assert message.endswith("with checkpoint=")


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


# --- transformers -----------------------------------------------------------------------------

PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "size": {"height": 32, "width": 32},
    "resample": 2,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.25, 0.2],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small ViT saved by transformers."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "image_size": 32, "patch_size": 8}
    config = ViTConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, num_labels=3)
    folder = tmp_path_factory.mktemp("hf") / "vit"
    net = ViTForImageClassification(config).eval()
    net.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder, net


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made[0], tmp_path / "copy")


def edit(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_transformers_features_and_logits(made, folder, capfd):
    path, net = made
    model = wrap(f"hf:{path}")
    outputs = model(IMAGES)
    with torch.no_grad():
        assert torch.equal(outputs.logits, net(IMAGES).logits)
    assert (model.head, outputs.features.shape) == ("classifier", (2, 16))
    assert model.sha256 == wrap(f"hf:{folder}").sha256  # wherever the folder is
    assert capfd.readouterr() == ("", "")
    assert "checkpoint= does not apply to" in rejection(f"hf:{path}", checkpoint="w.safetensors")


PROCESSORS = {
    "vit": (
        PROCESSOR,
        Preprocessing(1.0, (0.5, 0.4, 0.3), (0.5, 0.25, 0.2), "NCHW", (32, 32), "bilinear"),
    ),
    "crop": (
        {
            "image_processor_type": "BitImageProcessor",
            "size": {"shortest_edge": 40},
            "crop_size": {"height": 32, "width": 32},
            "resample": 3,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
        Preprocessing(1.0, (0.5,) * 3, (0.5,) * 3, "NCHW", 40, "bicubic", (32, 32)),
    ),
    "ConvNext": (
        {
            "image_processor_type": "ConvNextImageProcessor",
            "size": {"shortest_edge": 28},
            "crop_pct": 0.875,
            "resample": 2,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
        Preprocessing(1.0, (0.5,) * 3, (0.5,) * 3, "NCHW", 32, "bilinear", (28, 28)),
    ),
    "plain": (
        {"image_processor_type": "ViTImageProcessor", "do_resize": False, "do_normalize": False},
        Preprocessing(1.0, (0.0,) * 3, (1.0,) * 3, "NCHW"),
    ),
}


@pytest.mark.parametrize(("config", "expected"), PROCESSORS.values(), ids=PROCESSORS)
def test_transformers_preprocessing(folder, config, expected):
    from transformers import AutoImageProcessor

    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    stated = wrap(f"hf:{folder}").preprocessing
    assert stated == expected
    image = np.random.default_rng(1).integers(256, size=(80, 60, 3), dtype=np.uint8)
    by_hand = AutoImageProcessor.from_pretrained(folder, backend="pil")
    pixels = by_hand(Image.fromarray(image), return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(stated.batch([stated.resize_and_crop(image)]), pixels, atol=1e-5)


@pytest.mark.parametrize(
    "odd",
    [
        {"rescale_factor": 1 / 127.5},
        {"image_processor_type": "EfficientNetImageProcessor", "rescale_offset": True},
        {"image_processor_type": "LevitImageProcessor", "size": {"shortest_edge": 32}},
    ],
    ids=["rescale", "offset", "LeViT"],
)
def test_unsupported_transformers_preprocessing(folder, odd, tmp_path):
    edit(folder / "preprocessor_config.json", **odd)
    assert "state the preprocessing in a TOML file" in rejection(f"hf:{folder}")
    half = Preprocessing(1.0, (0.5,) * 3, (0.5,) * 3, "NCHW")
    assert wrap(f"hf:{folder}", preprocessing=half).preprocessing == half


def test_without_a_preprocessor(folder):
    (folder / "preprocessor_config.json").unlink()
    assert wrap(f"hf:{folder}").preprocessing is None


def test_folders_without_a_usable_model(folder, tmp_path, monkeypatch):
    assert "has no config.json" in rejection(f"hf:{tmp_path / 'none'}")
    config, weights = folder / "config.json", folder / "model.safetensors"
    kept = config.read_text()
    edit(config, num_hidden_layers=2)
    assert "its weights lack vit." in rejection(f"hf:{folder}")
    config.write_text(kept)
    edit(config, id2label={"0": "a", "1": "b"})
    assert "its weights lack classifier.bias, classifier.weight, or" in rejection(f"hf:{folder}")
    for text in ("{}", "{", json.dumps({"model_type": "bert"})):
        config.write_text(text)
        assert "cannot load hf:" in rejection(f"hf:{folder}")
    config.write_text(kept)
    weights.write_bytes(weights.read_bytes()[:-9])
    assert "cannot load hf:" in rejection(f"hf:{folder}")
    weights.unlink()
    torch.save({}, folder / "pytorch_model.bin")  # never unpickled
    assert "cannot load hf:" in rejection(f"hf:{folder}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install 'caster-tta[hf]'" in rejection(f"hf:{folder}")
