"""Image classifiers of transformers from a local folder, and their preprocessing."""

from __future__ import annotations

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from caster import CasterError, wrap
from caster.models.preprocessing import Preprocessing

IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "size": {"height": 32, "width": 32},
    "resample": 2,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.25, 0.2],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small ViT as transformers saves it."""
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


def refusal(folder, **options) -> str:
    with pytest.raises(CasterError) as caught:
        wrap(f"hf:{folder}", **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_the_same_as_by_hand(made, folder, capfd):
    path, net = made
    model = wrap(f"hf:{path}")
    outputs = model(IMAGES)
    with torch.no_grad():
        assert torch.equal(outputs.logits, net(IMAGES).logits)
    assert (model.head, outputs.features.shape) == ("classifier", (2, 16))
    assert model.sha256 == wrap(f"hf:{folder}").sha256  # wherever the folder is
    assert capfd.readouterr() == ("", "")
    assert "checkpoint is not an option" in refusal(path, checkpoint="w.safetensors")


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
def test_preprocessing(folder, config, expected):
    from transformers import AutoImageProcessor

    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    stated = wrap(f"hf:{folder}").preprocessing
    assert stated == expected
    image = np.random.default_rng(1).integers(256, size=(80, 60, 3), dtype=np.uint8)
    by_hand = AutoImageProcessor.from_pretrained(folder, backend="pil")
    pixels = by_hand(Image.fromarray(image), return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(stated.batch([stated.fitted(image)]), pixels, atol=1e-5)


@pytest.mark.parametrize(
    "odd",
    [
        {"rescale_factor": 1 / 127.5},
        {"image_processor_type": "EfficientNetImageProcessor", "rescale_offset": True},
        {"image_processor_type": "LevitImageProcessor", "size": {"shortest_edge": 32}},
    ],
    ids=["rescale", "offset", "LeViT"],
)
def test_preprocessing_that_cannot_be_stated(folder, odd, tmp_path):
    edit(folder / "preprocessor_config.json", **odd)
    assert "state the preprocessing in a TOML file" in refusal(folder)
    half = Preprocessing(1.0, (0.5,) * 3, (0.5,) * 3, "NCHW")
    assert wrap(f"hf:{folder}", preprocessing=half).preprocessing == half


def test_without_a_preprocessor(folder):
    (folder / "preprocessor_config.json").unlink()
    assert wrap(f"hf:{folder}").preprocessing is None


def test_folders_that_are_no_model(folder, tmp_path, monkeypatch):
    assert "is no folder with a config.json" in refusal(tmp_path / "none")
    config, weights = folder / "config.json", folder / "model.safetensors"
    kept = config.read_text()
    edit(config, num_hidden_layers=2)
    assert "its weights lack vit." in refusal(folder)
    config.write_text(kept)
    edit(config, id2label={"0": "a", "1": "b"})
    assert "its weights lack classifier.bias, classifier.weight, or" in refusal(folder)
    for text in ("{}", "{", json.dumps({"model_type": "bert"})):
        config.write_text(text)
        assert "cannot be made" in refusal(folder)
    config.write_text(kept)
    weights.write_bytes(weights.read_bytes()[:-9])
    assert "cannot be made" in refusal(folder)
    weights.unlink()
    torch.save({}, folder / "pytorch_model.bin")  # never unpickled
    assert "cannot be made" in refusal(folder)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install 'caster-tta[hf]'" in refusal(folder)
