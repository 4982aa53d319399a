"""Preprocessing: equal to torchvision and timm, with a digest of its values."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from caster import CasterError
from caster.models.preprocessing import INTERPOLATIONS, REQUIRED, Preprocessing
from tests.support.messages import error_line as rejection

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
PLAIN = Preprocessing(range=1.0, **IMAGENET, layout="NCHW")
FULL = replace(PLAIN, resize=256, interpolation="bicubic", crop=(224, 200))
PIXELS = Preprocessing.in_graph("NHWC", "uint8")

SIZES = [(40, 60), (60, 40), (33, 47), (32, 32), (1, 1), (2, 9), (90, 7)]  # height, width


def image(height=5, width=7, seed=0):
    """Coarse shapes under fine noise, so that interpolations differ."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 200, (-(-height // 4), -(-width // 4), 3))
    coarse = coarse.repeat(4, axis=0).repeat(4, axis=1)[:height, :width]
    return (coarse + rng.integers(0, 56, (height, width, 3))).astype(np.uint8)


# --- torchvision -----------------------------------------------------------------------------


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("resize", [24, 23, (24, 24), (29, 50)], ids=str)
@pytest.mark.parametrize("crop", [(23, 23), (16, 21)], ids=str)
def test_pixels_match_torchvision(interpolation, resize, crop):
    theirs = transforms.Compose(
        [
            transforms.Resize(resize, InterpolationMode(interpolation)),
            transforms.CenterCrop(crop),
        ]
    )
    ours = replace(PLAIN, resize=resize, interpolation=interpolation, crop=crop)
    for size in SIZES:
        original = image(*size)
        expected = np.asarray(theirs(Image.fromarray(original)))
        assert expected.shape == (*crop, 3)
        assert np.array_equal(ours.resize_and_crop(original), expected)


@given(
    size=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    side=st.integers(1, 40),
    share=st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)),
)
def test_sizes_and_offsets_match_torchvision(size, side, share):
    original = image(*size)
    whole = transforms.Resize(side)(Image.fromarray(original))
    crop = (max(1, round(share[0] * whole.height)), max(1, round(share[1] * whole.width)))
    ours = replace(PLAIN, resize=side, interpolation="bilinear", crop=crop)
    assert np.array_equal(
        ours.resize_and_crop(original), np.asarray(transforms.CenterCrop(crop)(whole))
    )


def test_normalisation_matches_torchvision():
    original = (
        np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    )  # every value, each channel
    tensor = transforms.ToTensor()(Image.fromarray(original))
    expected = transforms.Normalize(*IMAGENET.values())(tensor).numpy()
    batch = PLAIN.batch([original])
    assert batch.dtype == np.float32
    np.testing.assert_allclose(batch[0], expected, rtol=0, atol=1e-6)


def test_an_image_of_the_right_size_is_not_copied():
    original = image(24, 30)
    assert PLAIN.resize_and_crop(original) is original
    for resize in (24, (24, 30)):
        assert (
            replace(PLAIN, resize=resize, interpolation="box").resize_and_crop(original) is original
        )


def test_a_crop_larger_than_the_image_is_rejected():
    """torchvision would pad with black, which no model was trained on."""
    message = rejection(replace(PLAIN, crop=(8, 4)).resize_and_crop, image(7, 9))
    assert "an image of 9x7 is smaller than the crop of 4x8" in message
    assert "smaller than the crop of 10x4" in rejection(
        replace(PLAIN, crop=(4, 10)).resize_and_crop, image(7, 9)
    )


def test_without_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert PLAIN.resize_and_crop(image()) is not None
    assert "resizing needs Pillow" in rejection(FULL.resize_and_crop, image())


# --- timm ------------------------------------------------------------------------------------

MODELS = {
    "resnet18.tv_in1k": "bilinear, 0.875",
    "resnet50.a1_in1k": "bicubic, 0.95",
    "test_resnet.r160_in1k": "160 pixels",
    "inception_v3.tf_in1k": "299 pixels, mean and std of a half",
    "tf_efficientnet_b3.ns_jft_in1k": "300 pixels, 0.904",
    "vit_base_patch16_224.augreg_in21k_ft_in1k": "0.9",
    "convnext_tiny.in12k_ft_in1k_384": "squash",
    "vit_base_patch32_clip_384.openai_ft_in12k_in1k": "squash at 0.95, CLIP's mean and std",
}


def timm_config(name):
    from timm.data import resolve_model_data_config
    from timm.models import get_pretrained_cfg

    return resolve_model_data_config(
        SimpleNamespace(pretrained_cfg=get_pretrained_cfg(name).to_dict())
    )


@pytest.mark.parametrize("name", MODELS)
def test_timm(name):
    from timm.data import create_transform

    config = timm_config(name)
    ours = Preprocessing.from_timm(config)
    theirs = create_transform(**config)
    pixels = create_transform(**config, normalize=False)
    for size in [(400, 333), (201, 350), (3, 5)]:
        original = image(*size)
        fitted = ours.resize_and_crop(original)
        assert np.array_equal(fitted.transpose(2, 0, 1), pixels(Image.fromarray(original)).numpy())
        expected = theirs(Image.fromarray(original)).numpy()
        np.testing.assert_allclose(ours.batch([fitted])[0], expected, rtol=0, atol=2e-6)


def test_the_models_above_cover_every_case():
    configs = [timm_config(name) for name in MODELS]
    assert {config["crop_mode"] for config in configs} == {"center", "squash"}
    assert {config["interpolation"] for config in configs} == {"bilinear", "bicubic"}
    assert len({(*config["input_size"], config["crop_pct"]) for config in configs}) == len(MODELS)


def test_squashed_to_a_tall_image():
    from timm.data import create_transform

    config = timm_config("resnet50.a1_in1k") | {"input_size": (3, 48, 36), "crop_mode": "squash"}
    original = image(50, 90)
    expected = create_transform(**config)(Image.fromarray(original)).numpy()
    ours = Preprocessing.from_timm(config)
    np.testing.assert_allclose(ours.batch([ours.resize_and_crop(original)])[0], expected, atol=2e-6)


def test_every_pretrained_model_is_supported_or_rejected():
    """Compare with the steps of the transform that timm builds."""
    from timm.data import create_transform
    from timm.models import list_pretrained

    rejected = set()
    for name in list_pretrained():
        config = timm_config(name)
        resize, crop, *_ = create_transform(**config).transforms
        try:
            ours = Preprocessing.from_timm(config)
        except CasterError:
            rejected.add(name)
            assert config["crop_mode"] == "border" or config["crop_pct"] > 1
            continue
        assert ours.resize == (
            tuple(resize.size) if isinstance(resize.size, list | tuple) else resize.size
        )
        assert ours.interpolation == resize.interpolation.value
        assert (ours.crop, ours.mean, ours.std) == (crop.size, config["mean"], config["std"])
    assert len(rejected) < 20


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"crop_mode": "border"}, "crop mode 'border' of 0.95 to 3x224x224 is not supported"),
        ({"crop_mode": "random"}, "crop mode 'random'"),
        ({"crop_pct": 1.15}, "'center' of 1.15 to"),
        ({"input_size": (3, 224, 192)}, "'center' of 0.95 to 3x224x192"),
        ({"input_size": (1, 224, 224)}, "to 1x224x224"),
        ({"interpolation": "random"}, "a resize needs an interpolation"),
        ({"mean": (0.5,)}, "mean must be three numbers"),
    ],
)
def test_unsupported_timm_configurations(change, reason):
    config = timm_config("resnet50.a1_in1k") | change
    assert reason in rejection(Preprocessing.from_timm, config)


# --- batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("channels", ["RGB", "BGR"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-6), ("float16", 1e-3), ("uint8", 0)]
)
@pytest.mark.parametrize("top", [1.0, 255.0])
def test_every_kind_of_batch(layout, channels, dtype, tolerance, top):
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    if dtype == "uint8":
        top, mean, std = 255.0, (0.0,) * 3, (1.0,) * 3
    images = np.stack([image(seed=seed) for seed in range(4)])
    stated = Preprocessing(top, mean, std, layout, channels=channels, dtype=dtype)
    expected = np.empty((4, 3, 5, 7))
    for i, channel in enumerate(channels):
        values = images[..., "RGB".index(channel)] * (top / 255)
        expected[:, i] = (values - mean[i]) / std[i]
    if layout == "NHWC":
        expected = expected.transpose(0, 2, 3, 1)
    before = images.copy()
    for kind in (np.asarray, list, tuple):
        batch = stated.batch(kind(images))
        assert batch.dtype == dtype
        scale = max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(batch, expected, rtol=0, atol=tolerance * scale)
        torch.from_numpy(batch)  # which takes no negative strides
    assert np.array_equal(images, before)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_one_grey_channel_is_pillows(layout):
    stated = Preprocessing(1.0, (0.1307,), (0.3081,), layout, channels="grey")
    original = np.concatenate([image(40, 60), np.arange(180, dtype=np.uint8).reshape(1, 60, 3)])
    grey = np.asarray(Image.fromarray(original).convert("L"))
    expected = torch.tensor(grey)[None] / 255
    expected = transforms.Normalize(0.1307, 0.3081)(expected).numpy()
    (found,) = stated.batch([original])
    assert found.shape == ((*grey.shape, 1) if layout == "NHWC" else (1, *grey.shape))
    np.testing.assert_allclose(found.ravel(), expected.ravel(), rtol=1e-5, atol=1e-6)
    pixels = Preprocessing.in_graph(layout, "uint8", "grey")
    repeated = np.repeat(grey[..., None], 3, axis=2)
    assert np.array_equal(pixels.batch([repeated]).ravel(), grey.ravel())
    assert [end.shape for end in stated.value_range] == [(1, 1, 1)] * 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_in_graph_leaves_pixels_unchanged(layout, dtype):
    stated = Preprocessing.in_graph(layout, dtype)
    original = image(9, 4)
    assert stated.resize_and_crop(original) is original
    batch = stated.batch([original])
    assert batch.dtype == dtype
    expected = original.transpose(2, 0, 1) if layout == "NCHW" else original
    assert np.array_equal(batch[0], expected)


def test_read_only_and_cropped_images():
    original = image(9, 9)
    original.flags.writeable = False
    stated = replace(PLAIN, crop=(3, 4))
    assert np.array_equal(
        stated.batch([stated.resize_and_crop(original)]), PLAIN.batch(original[None, 3:6, 2:6])
    )


def test_images_of_a_batch_must_have_one_size():
    message = rejection(PLAIN.batch, [image(4, 6), image(4, 6), image(5, 6)])
    assert "differ in size (6x4 and 6x5)" in message


@pytest.mark.parametrize(
    "images",
    [
        [],
        np.zeros((0, 4, 4, 3), np.uint8),
        image(),
        [image() / 255],
        [image().astype(np.float32)],
        [image()[..., 0]],
        [image()[..., :1]],
        np.zeros((2, 3, 4, 4), np.uint8),
        [image(), image()[..., 0]],
    ],
    ids=["none", "no rows", "one", "0 to 1", "float", "grey", "one channel", "NCHW", "mixed"],
)
def test_inputs_that_are_not_a_batch_of_images(images):
    assert rejection(PLAIN.batch, images).startswith("a batch needs images, uint8")


# --- TOML ------------------------------------------------------------------------------------

WHOLE = """
# a model trained elsewhere
range = 255
mean = [123.675, 116.28, 103.53]  # red, green, blue
std = [58.395, 57.12, 57.375]
layout = "NHWC"
resize = [256, 320]
interpolation = "lanczos"
crop = [224, 288]
channels = "BGR"
dtype = "float16"
"""


@pytest.fixture
def toml(tmp_path):
    def write(text):
        (tmp_path / "pre.toml").write_text(text, encoding="utf-8")
        return tmp_path / "pre.toml"

    return write


def in_toml(values: dict) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


def test_every_key(toml):
    assert Preprocessing.from_toml(toml(WHOLE)) == Preprocessing(
        range=255,
        mean=(123.675, 116.28, 103.53),
        std=(58.395, 57.12, 57.375),
        layout="NHWC",
        resize=(256, 320),
        interpolation="lanczos",
        crop=(224, 288),
        channels="BGR",
        dtype="float16",
    )


def test_defaults_and_single_numbers(toml):
    path = toml('range = 1\nmean = 0.5\nstd = 0.25\nlayout = "NCHW"\n')
    stated = Preprocessing.from_toml(str(path))
    assert stated == Preprocessing(1.0, (0.5,) * 3, (0.25,) * 3, "NCHW")
    assert (stated.resize, stated.interpolation, stated.crop) == (None, None, None)
    assert (stated.channels, stated.dtype) == ("RGB", "float32")
    path.write_text(path.read_text() + 'crop = 224\nresize = 256\ninterpolation = "box"\n')
    stated = Preprocessing.from_toml(path)
    assert (stated.crop, stated.resize) == ((224, 224), 256)
    path.write_text('range = 1\nmean = [0.5]\nstd = 0.25\nlayout = "NCHW"\nchannels = "grey"\n')
    grey = Preprocessing.from_toml(path)
    assert (grey.mean, grey.std) == ((0.5,), (0.25,))
    assert "mean must be one number" in rejection(replace, grey, mean=(0.5,) * 3)
    assert "channels must be RGB, BGR or grey" in rejection(replace, grey, channels="L")


CHOICES = {
    "range": [1.0, 255.0],
    "mean": [(0.0, 0.0, 0.0), (0.5, 0.5, 0.5), (0.485, 0.456, 0.406), (0.406, 0.456, 0.485)],
    "std": [(1.0, 1.0, 1.0), (0.5, 0.5, 0.5), (0.229, 0.224, 0.225)],
    "layout": ["NCHW", "NHWC"],
    "resize": [224, 256, (224, 224), (224, 256)],
    "interpolation": INTERPOLATIONS,
    "crop": [(224, 224), (224, 200), (200, 224)],
    "channels": ["RGB", "BGR"],
    "dtype": ["float32", "float16"],
}
STATED = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()})


@given(values=STATED, order=st.permutations(list(CHOICES)), comments=st.lists(st.integers(0, 8)))
def test_order_and_comments_make_no_difference(tmp_path_factory, values, order, comments):
    lines = in_toml({name: values[name] for name in order}).splitlines()
    for at in comments:
        lines.insert(at, "# a comment")
    path = tmp_path_factory.getbasetemp() / "shuffled.toml"
    path.write_text("\n\n".join(lines))
    assert Preprocessing.from_toml(path).sha256 == Preprocessing(**values).sha256


@given(values=STATED, data=st.data())
def test_every_value_changes_the_digest(values, data):
    name = data.draw(st.sampled_from(list(CHOICES)))
    other = data.draw(st.sampled_from([v for v in CHOICES[name] if v != values[name]]))
    before, after = Preprocessing(**values), Preprocessing(**values | {name: other})
    assert before.sha256 != after.sha256
    assert before.sha256 == Preprocessing(**values).sha256


def test_missing_values_count_in_the_digest():
    digests = {FULL.sha256, replace(FULL, crop=None).sha256}
    digests.add(replace(FULL, resize=None, interpolation=None).sha256)
    assert len(digests) == 3


def test_integers_and_floats_have_the_same_digest(toml):
    whole = Preprocessing.from_toml(toml('range = 255\nmean = 0\nstd = [1, 1, 1]\nlayout = "NHWC"'))
    assert whole == Preprocessing.in_graph("NHWC", "float32")
    assert whole.sha256 == Preprocessing.in_graph("NHWC", "float32").sha256


def test_the_digest_is_stable():
    """Another digest would invalidate every state fitted so far."""
    text = (
        '{"channels": "RGB", "crop": [224, 200], "dtype": "float32", "interpolation": "bicubic", '
        '"layout": "NCHW", "mean": [0.485, 0.456, 0.406], "range": 1.0, "resize": 256, '
        '"std": [0.229, 0.224, 0.225]}'
    )
    assert sorted(json.loads(text)) == sorted(asdict(FULL))
    assert FULL.sha256 == hashlib.sha256(text.encode()).hexdigest()


MINIMAL = {"range": 1, "mean": 0.5, "std": 0.5, "layout": "NCHW"}


@pytest.mark.parametrize("name", REQUIRED)
def test_missing_keys(toml, name):
    path = toml(in_toml({key: value for key, value in MINIMAL.items() if key != name}))
    message = rejection(Preprocessing.from_toml, path)
    assert message.startswith(f"{path} lacks `{name}`")


def test_unknown_keys(toml):
    path = toml(in_toml(MINIMAL | {"size": 224, "Crop": 3}))
    line = rejection(Preprocessing.from_toml, path)
    assert line.startswith(f"{path} has unknown keys: `Crop, size`; it may have range, mean, std,")
    path = toml(in_toml(MINIMAL) + "[table]\nrange = 1\n")
    line = rejection(Preprocessing.from_toml, path)
    assert line.startswith(f"{path} has unknown keys: `table`;")


WRONG = {
    "range": [2, 0, -1, 254.5, True, "1", [1], "255"],
    "mean": ["0.5", [0.5], [0.5, 0.5], [0.5] * 4, [0.5, 0.5, "a"], [0.5, 0.5, True], True, 1e39],
    "std": [0, -1, [0.5, 0.5, 0], [0.5, 0.5, -1], [], [[1, 1, 1]] * 3, False],
    "layout": ["nchw", "CHW", 1, ["NCHW"], ""],
    "resize": [0, -1, 2.5, 256.0, True, "256", [256], [256, 0], [256, 256, 256], [256, 2.5], []],
    "interpolation": ["cubic", "BICUBIC", 3, ["box"], ""],
    "crop": [0, -1, 2.5, True, "224", [224], [224, 0], [224, 224, 3], [True, 224], []],
    "channels": ["rgb", "GRB", "RGBA", 3, ["R", "G", "B"]],
    "dtype": ["double", "float", "int8", 32, ["float32"], "uint8"],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in WRONG.items() for value in values],
    ids=lambda value: str(value)[:20],
)
def test_invalid_values(toml, name, value):
    values = MINIMAL | {"resize": 256, "interpolation": "box"} | {name: value}
    path = toml(in_toml(values))
    message = rejection(Preprocessing.from_toml, path)
    assert message.startswith(f"{path}: ")
    assert name in message


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", ["mean", "std"])
def test_numbers_that_are_not_finite(toml, name, number):
    path = toml(in_toml({k: v for k, v in MINIMAL.items() if k != name}) + f"{name} = {number}\n")
    assert f"{name} must be three numbers" in rejection(Preprocessing.from_toml, path)


def test_a_resize_needs_an_interpolation_and_vice_versa(toml):
    for lonely in ({"resize": 256}, {"interpolation": "box"}):
        path = toml(in_toml(MINIMAL | lonely))
        assert "a resize needs an interpolation" in rejection(Preprocessing.from_toml, path)


@pytest.mark.parametrize(
    "changes", [{"range": 1.0}, {"mean": (0.0, 0.0, 1.0)}, {"std": (1.0, 2.0, 1.0)}], ids=str
)
def test_uint8_cannot_be_normalised(changes):
    assert "dtype uint8 leaves pixels unchanged" in rejection(replace, PIXELS, **changes)


def test_lists_work_like_tuples():
    listed = Preprocessing(1, [0.5] * 3, [0.5] * 3, "NCHW", crop=[2, 2])
    plain = Preprocessing(1.0, (0.5,) * 3, (0.5,) * 3, "NCHW", crop=(2, 2))
    assert listed.sha256 == plain.sha256
    assert np.array_equal(
        listed.batch([listed.resize_and_crop(image())]),
        plain.batch([plain.resize_and_crop(image())]),
    )


def test_every_field_is_tested():
    names = {field.name for field in fields(Preprocessing)}
    assert names == set(WRONG) == set(CHOICES)
