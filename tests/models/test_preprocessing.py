"""Preprocessing: what torchvision and timm make of an image, stated in full, and its digest."""

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

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
PLAIN = Preprocessing(range=1.0, **IMAGENET, layout="NCHW")
FULL = replace(PLAIN, resize=256, interpolation="bicubic", crop=(224, 200))
PIXELS = Preprocessing.in_graph("NHWC", "uint8")

SIZES = [(40, 60), (60, 40), (33, 47), (32, 32), (1, 1), (2, 9), (90, 7)]  # height, width


def image(height=5, width=7, seed=0):
    """Coarse shapes under fine noise, so that every interpolation leaves its mark."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 200, (-(-height // 4), -(-width // 4), 3))
    coarse = coarse.repeat(4, axis=0).repeat(4, axis=1)[:height, :width]
    return (coarse + rng.integers(0, 56, (height, width, 3))).astype(np.uint8)


def refusal(use, *arguments, **options) -> str:
    with pytest.raises(CasterError) as caught:
        use(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- torchvision -----------------------------------------------------------------------------


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("resize", [24, 23, (24, 24), (29, 50)], ids=str)
@pytest.mark.parametrize("crop", [(23, 23), (16, 21)], ids=str)
def test_pixels_are_torchvisions(interpolation, resize, crop):
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
        assert np.array_equal(ours.fitted(original), expected)


@given(
    size=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    side=st.integers(1, 40),
    share=st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)),
)
def test_sizes_and_offsets_are_torchvisions(size, side, share):
    original = image(*size)
    whole = transforms.Resize(side)(Image.fromarray(original))
    crop = (max(1, round(share[0] * whole.height)), max(1, round(share[1] * whole.width)))
    ours = replace(PLAIN, resize=side, interpolation="bilinear", crop=crop)
    assert np.array_equal(ours.fitted(original), np.asarray(transforms.CenterCrop(crop)(whole)))


def test_normalised_as_torchvision_does():
    original = (
        np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    )  # every value, each channel
    tensor = transforms.ToTensor()(Image.fromarray(original))
    expected = transforms.Normalize(*IMAGENET.values())(tensor).numpy()
    batch = PLAIN.batch([original])
    assert batch.dtype == np.float32
    np.testing.assert_allclose(batch[0], expected, rtol=0, atol=1e-6)


def test_nothing_to_do_leaves_the_image_alone():
    original = image(24, 30)
    assert PLAIN.fitted(original) is original
    for resize in (24, (24, 30)):
        assert replace(PLAIN, resize=resize, interpolation="box").fitted(original) is original


def test_a_crop_beyond_the_image_is_refused():
    """torchvision would pad with black, and nobody trained on that."""
    message = refusal(replace(PLAIN, crop=(8, 4)).fitted, image(7, 9))
    assert message == "an image of 9x7 has no crop of 4x8: state a resize"
    assert "has no crop of 10x4" in refusal(replace(PLAIN, crop=(4, 10)).fitted, image(7, 9))


def test_without_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert PLAIN.fitted(image()) is not None
    assert "resizing needs Pillow" in refusal(FULL.fitted, image())


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
        fitted = ours.fitted(original)
        assert np.array_equal(fitted.transpose(2, 0, 1), pixels(Image.fromarray(original)).numpy())
        expected = theirs(Image.fromarray(original)).numpy()
        np.testing.assert_allclose(ours.batch([fitted])[0], expected, rtol=0, atol=2e-6)


def test_the_models_above_differ():
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
    np.testing.assert_allclose(ours.batch([ours.fitted(original)])[0], expected, atol=2e-6)


def test_every_pretrained_model_is_known_or_refused():
    """timm's own steps, read off the transform it would build."""
    from timm.data import create_transform
    from timm.models import list_pretrained

    refused = set()
    for name in list_pretrained():
        config = timm_config(name)
        resize, crop, *_ = create_transform(**config).transforms
        try:
            ours = Preprocessing.from_timm(config)
        except CasterError:
            refused.add(name)
            assert config["crop_mode"] == "border" or config["crop_pct"] > 1
            continue
        assert ours.resize == (
            tuple(resize.size) if isinstance(resize.size, list | tuple) else resize.size
        )
        assert ours.interpolation == resize.interpolation.value
        assert (ours.crop, ours.mean, ours.std) == (crop.size, config["mean"], config["std"])
    assert len(refused) < 20


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"crop_mode": "border"}, "crop mode 'border' of 0.95 to 3x224x224 is not known"),
        ({"crop_mode": "random"}, "crop mode 'random'"),
        ({"crop_pct": 1.15}, "'center' of 1.15 to"),
        ({"input_size": (3, 224, 192)}, "'center' of 0.95 to 3x224x192"),
        ({"input_size": (1, 224, 224)}, "to 1x224x224"),
        ({"interpolation": "random"}, "a resize needs an interpolation, one of nearest"),
        ({"mean": (0.5,)}, "mean must be three numbers"),
    ],
)
def test_timm_configurations_that_are_not_known(change, reason):
    config = timm_config("resnet50.a1_in1k") | change
    assert reason in refusal(Preprocessing.from_timm, config)


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


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_in_graph_takes_pixels_as_they_are(layout, dtype):
    stated = Preprocessing.in_graph(layout, dtype)
    original = image(9, 4)
    assert stated.fitted(original) is original
    batch = stated.batch([original])
    assert batch.dtype == dtype
    expected = original.transpose(2, 0, 1) if layout == "NCHW" else original
    assert np.array_equal(batch[0], expected)


def test_read_only_and_cropped_images():
    original = image(9, 9)
    original.flags.writeable = False
    stated = replace(PLAIN, crop=(3, 4))
    assert np.array_equal(
        stated.batch([stated.fitted(original)]), PLAIN.batch(original[None, 3:6, 2:6])
    )


def test_images_of_a_batch_are_of_one_size():
    message = refusal(PLAIN.batch, [image(4, 6), image(4, 6), image(5, 6)])
    assert message == "images of a batch differ in size (6x4 and 6x5): state a resize"


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
def test_what_is_no_batch_of_images(images):
    assert refusal(PLAIN.batch, images).startswith("a batch needs images: uint8")


# --- TOML ------------------------------------------------------------------------------------

WHOLE = """
# of a model trained elsewhere
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
def test_order_and_comments_do_not_count(tmp_path_factory, values, order, comments):
    lines = in_toml({name: values[name] for name in order}).splitlines()
    for at in comments:
        lines.insert(at, "# a comment")
    path = tmp_path_factory.getbasetemp() / "shuffled.toml"
    path.write_text("\n\n".join(lines))
    assert Preprocessing.from_toml(path).sha256 == Preprocessing(**values).sha256


@given(values=STATED, data=st.data())
def test_any_other_value_is_another_digest(values, data):
    name = data.draw(st.sampled_from(list(CHOICES)))
    other = data.draw(st.sampled_from([v for v in CHOICES[name] if v != values[name]]))
    before, after = Preprocessing(**values), Preprocessing(**values | {name: other})
    assert before.sha256 != after.sha256
    assert before.sha256 == Preprocessing(**values).sha256


def test_values_left_out_are_values_too():
    digests = {FULL.sha256, replace(FULL, crop=None).sha256}
    digests.add(replace(FULL, resize=None, interpolation=None).sha256)
    assert len(digests) == 3


def test_a_number_is_a_number_however_it_is_written(toml):
    whole = Preprocessing.from_toml(toml('range = 255\nmean = 0\nstd = [1, 1, 1]\nlayout = "NHWC"'))
    assert whole == Preprocessing.in_graph("NHWC", "float32")
    assert whole.sha256 == Preprocessing.in_graph("NHWC", "float32").sha256


def test_the_digest_is_of_the_values_as_json():
    """Pinned: another digest would orphan every state that was ever fitted."""
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
    message = refusal(Preprocessing.from_toml, path)
    assert message == f"{path} must also say `{name}`: nothing is guessed"


def test_unknown_keys(toml):
    path = toml(in_toml(MINIMAL | {"size": 224, "Crop": 3}))
    assert refusal(Preprocessing.from_toml, path) == f"{path} has no use for `Crop, size`"
    path = toml(in_toml(MINIMAL) + "[table]\nrange = 1\n")
    assert refusal(Preprocessing.from_toml, path) == f"{path} has no use for `table`"


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
def test_values_that_will_not_do(toml, name, value):
    values = MINIMAL | {"resize": 256, "interpolation": "box"} | {name: value}
    path = toml(in_toml(values))
    message = refusal(Preprocessing.from_toml, path)
    assert message.startswith(f"{path}: ")
    assert name in message


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", ["mean", "std"])
def test_numbers_that_are_none(toml, name, number):
    path = toml(in_toml({k: v for k, v in MINIMAL.items() if k != name}) + f"{name} = {number}\n")
    assert f"{name} must be three numbers" in refusal(Preprocessing.from_toml, path)


def test_a_resize_and_its_interpolation_come_together(toml):
    for lonely in ({"resize": 256}, {"interpolation": "box"}):
        path = toml(in_toml(MINIMAL | lonely))
        assert "a resize needs an interpolation" in refusal(Preprocessing.from_toml, path)


@pytest.mark.parametrize(
    "changes", [{"range": 1.0}, {"mean": (0.0, 0.0, 1.0)}, {"std": (1.0, 2.0, 1.0)}], ids=str
)
def test_bytes_are_not_normalised(changes):
    assert "dtype uint8 takes pixels as they are" in refusal(replace, PIXELS, **changes)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"range = ", "Invalid value"),
        (b"range = 1\nrange = 1\n", "overwrite"),
        (b"just words", "Expected"),
        (b"\xff\xfe\x00r", "not UTF-8"),
        (b"PK\x03\x04\x00\x00", "cannot read"),
        (b"", "must also say `range, mean, std, layout`"),
    ],
    ids=["cut", "twice", "words", "no text", "an archive", "empty"],
)
def test_files_that_are_no_toml(tmp_path, content, reason):
    path = tmp_path / "pre.toml"
    path.write_bytes(content)
    message = refusal(Preprocessing.from_toml, path)
    assert str(path) in message
    assert reason in message


def test_files_that_are_not_there(tmp_path):
    missing = refusal(Preprocessing.from_toml, tmp_path / "none.toml")
    assert missing.endswith("none.toml: No such file or directory")
    assert refusal(Preprocessing.from_toml, tmp_path).endswith("Is a directory")


def test_lists_do_as_well_as_tuples():
    listed = Preprocessing(1, [0.5] * 3, [0.5] * 3, "NCHW", crop=[2, 2])
    plain = Preprocessing(1.0, (0.5,) * 3, (0.5,) * 3, "NCHW", crop=(2, 2))
    assert listed.sha256 == plain.sha256
    assert np.array_equal(
        listed.batch([listed.fitted(image())]), plain.batch([plain.fitted(image())])
    )


def test_every_field_is_tested():
    names = {field.name for field in fields(Preprocessing)}
    assert names == set(WRONG) == set(CHOICES)
