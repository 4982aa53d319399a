"""The torch path against the NumPy path: the same bytes from the same random numbers, and random
numbers of its own that are as good."""

from __future__ import annotations

import builtins
import hashlib
import sys
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats

from caster_bench.data.corruptions import CORRUPTIONS, corrupt, make
from caster_bench.data.corruptions.constants import CIFAR, IMAGENET
from caster_bench.data.corruptions.on_device import digital, entry, noise, weather
from caster_bench.data.corruptions.on_device.draws import Draws, counted, keys, mixed
from caster_bench.data.corruptions.textures import textures_for
from tests.bench.data.corruptions.test_make import psnr, refusal, scenes

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
WITHOUT_CHANCE = (
    "defocus_blur",
    "zoom_blur",
    "gaussian_blur",
    "brightness",
    "contrast",
    "pixelate",
    "saturate",
)
SINGLE = ("gaussian_noise", "speckle_noise", "impulse_noise")  # NumPy draws float32 for these
DOUBLE = ("motion_blur", "snow", "fog", "elastic_transform")
WORD = 2**64


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=[32, 96])
def make_images(request) -> np.ndarray:
    images = scenes(8 if request.param > 32 else 48, request.param, request.param + 4)
    images[0], images[1], images[2, :9] = 0, 255, 100
    return images


class SameDraws(Draws):
    """NumPy's own numbers, so that both paths have one definition to differ in."""

    def __init__(self, rngs: list[np.random.Generator], dtype: str, device: str) -> None:
        self.rngs, self.dtype, self.device = rngs, np.dtype(dtype), device

    def uniform(self, *shape: int) -> torch.Tensor:
        return self._all([rng.random(shape, self.dtype) for rng in self.rngs])

    def normal(self, *shape: int) -> torch.Tensor:
        return self._all([rng.standard_normal(shape, self.dtype) for rng in self.rngs])

    def _all(self, numbers: list) -> torch.Tensor:
        return torch.tensor(np.stack(numbers), device=self.device).double()


def from_the_same_numbers(images: np.ndarray, name: str, severity: int, device: str) -> np.ndarray:
    salt = f"{name} {severity} 0 {images.shape[1:3]}:".encode()
    rngs = [make.generator(image, salt) for image in images]
    draws = SameDraws(rngs, "f4" if name in SINGLE else "f8", device)
    with patch.object(entry, "Draws", lambda start: draws):
        return corrupt(images, name, severity, device=device)


@pytest.mark.parametrize("severity", [1, 3, 5])
@pytest.mark.parametrize("name", WITHOUT_CHANCE)
def test_without_chance_the_bytes_are_numpys(name, severity, make_images, device):
    expected = corrupt(make_images, name, severity).astype(int)
    made = corrupt(make_images, name, severity, device=device)
    assert np.abs(made - expected).max() <= 1
    assert np.mean(made != expected) < 1e-3
    assert np.array_equal(made[:2], expected[:2])  # black and white


@pytest.mark.parametrize("severity", [1, 4])
@pytest.mark.parametrize("name", [*SINGLE, *DOUBLE])
def test_the_same_numbers_make_the_same_bytes(name, severity, make_images, device):
    expected = corrupt(make_images, name, severity).astype(int)
    made = from_the_same_numbers(make_images, name, severity, device)
    assert np.mean(made != expected) < 1e-4
    assert np.array_equal(made[:2], expected[:2])


@pytest.mark.parametrize("severity", [1, 2, 5])
def test_glass_of_the_same_shifts(severity, make_images, device):
    reach = make.published("glass_blur", severity, *make_images.shape[1:3])[1]

    def shifts(draws: SameDraws, *shape: int) -> torch.Tensor:
        drawn = [rng.integers(-reach, reach, shape) for rng in draws.rngs]
        return (draws._all(drawn) + (reach + 0.5)) / (2 * reach)

    expected = corrupt(make_images, "glass_blur", severity).astype(int)
    with patch.object(SameDraws, "uniform", shifts):
        made = from_the_same_numbers(make_images, "glass_blur", severity, device)
    assert np.abs(made - expected).max() <= 1
    assert np.mean(made != expected) < 1e-3
    assert np.array_equal(made[:2], expected[:2])


def test_every_corruption_with_a_torch_path_is_compared():
    elsewhere = {"glass_blur", "shot_noise", "frost"}
    assert set(make.ON_DEVICE) == {*WITHOUT_CHANCE, *SINGLE, *DOUBLE, *elsewhere}
    assert set(CORRUPTIONS) - set(make.ON_DEVICE) == {"jpeg_compression", "spatter"}


@pytest.mark.parametrize("size", [(90, 9), (9, 90), (70, 5), (1, 1)])
@pytest.mark.parametrize("name", WITHOUT_CHANCE)
def test_any_shape(name, size):
    """A kernel may reach over more than the image, and Pillow may take a tall one sideways."""
    images = scenes(3, *size)
    expected = corrupt(images, name, 5).astype(int)
    assert np.abs(corrupt(images, name, 5, device="cpu") - expected).max() <= (name == "pixelate")


@settings(max_examples=30)
@given(
    side=st.integers(1, 300),
    factor=st.sampled_from([*CIFAR["pixelate"], *IMAGENET["pixelate"]]),
)
def test_boxes_are_pillows(side, factor):
    row = np.random.default_rng(side).integers(0, 256, (1, side, 3), dtype=np.uint8)
    wanted = max(int(side * factor), 1)
    for start, end in ((side, wanted), (wanted, side)):
        given = row[:, :start]
        expected = np.asarray(Image.fromarray(given).resize((end, 1), Image.Resampling.BOX))
        sums = digital.boxes(start, end) @ given[0].astype(np.int64) + digital.ONE / 2
        assert np.array_equal(sums // digital.ONE, expected[0])


# The random numbers


def splitmix64(seed: int, count: int) -> list[int]:
    """The published generator, in whole numbers of any length."""
    numbers = []
    for i in range(1, count + 1):
        word = (seed + i * 0x9E3779B97F4A7C15) % WORD
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
        numbers.append(word ^ (word >> 31))
    return numbers


def test_splitmix64(device):
    words = mixed(1234567 + counted(0, 5, torch.device(device)))
    # The outputs that implementations of it are commonly checked with.
    assert [word % WORD for word in words.tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(seeds=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3))
def test_streams_go_on(seeds):
    """Two halves of a word make two uniform numbers; the next draw takes the next words."""
    draws = Draws(lambda: torch.tensor(seeds))
    drawn = [draws.uniform(3), draws.uniform(), draws.uniform(2, 2)]
    for i, seed in enumerate(seeds):
        halves = [
            (half + 2**31) % 2**32
            for word in splitmix64(seed % WORD, 5)
            for half in (word % 2**32, word >> 32)
        ]
        expected = np.array([halves[place] for place in (0, 1, 2, 4, 6, 7, 8, 9)])
        made = torch.cat([numbers[i].flatten() for numbers in drawn]).numpy()
        assert np.array_equal(made, (expected + 0.5) / 2**32)


def test_uniform_numbers(device):
    numbers = stream(device).uniform(20_000).cpu().numpy()
    assert numbers.min() > 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, 1000, (0, 1))[0]
    assert 1e-3 < stats.chisquare(counts).pvalue < 1 - 1e-3
    pairs = np.histogram2d(*numbers.reshape(-1, 2).T, 50, ((0, 1), (0, 1)))[0]  # halves of a word
    assert 1e-3 < stats.chisquare(pairs.ravel()).pvalue < 1 - 1e-3
    low = np.floor(numbers * 2**32).astype(np.int64)
    for bit in range(32):
        assert stats.binomtest(int(np.sum(low >> bit & 1)), low.size).pvalue > 1e-4
    assert_independent(numbers)


def test_normal_numbers(device):
    numbers = stream(device).normal(20_001).cpu().numpy()
    assert numbers.shape == (50, 20_001)
    assert stats.kstest(numbers.ravel(), "norm").pvalue > 1e-3
    error = numbers.size**-0.5
    assert abs(numbers.mean()) < 4 * error
    assert abs(numbers.var() - 1) < 4 * 2**0.5 * error
    assert abs(stats.kurtosis(numbers, axis=None)) < 4 * 24**0.5 * error
    for far in (3, 4):  # tails
        share = 2 * stats.norm.sf(far)
        assert abs(np.mean(np.abs(numbers) > far) - share) < 4 * share**0.5 * error
    assert_independent(numbers)


def stream(device: str) -> Draws:
    """Numbers for fifty images that differ in a pixel: what comes out never changes."""
    images = np.zeros((50, 4, 4, 3), dtype=np.uint8)
    images[:, 2, 1, 0] = np.arange(50)
    return Draws(lambda: keys(torch.tensor(images, device=device), b"salt"))


def assert_independent(numbers: np.ndarray) -> None:  # (images, numbers)
    """Within an image near and half an image apart, and between images."""
    half = numbers.shape[1] // 2
    for lag in (1, 2, 3, 32, 96, half, half + 1):
        one, other = numbers[:, lag:], numbers[:, :-lag]
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4 * one.size**-0.5, lag
    table = np.corrcoef(numbers)[np.triu_indices(len(numbers), 1)]
    assert np.abs(table).max() < 5 * numbers.shape[1] ** -0.5
    assert abs(table.std() * numbers.shape[1] ** 0.5 - 1) < 4 * (2 * table.size) ** -0.5


@given(data=st.data())
def test_every_pixel_counts_for_the_key(data):
    image = scenes(1, 5, 7)
    other = image.copy()
    change = data.draw(st.sampled_from(["bit", "swap", "roll"]))
    if change == "bit":
        place = data.draw(st.integers(0, image.size - 1))
        other.reshape(-1)[place] ^= 1 << data.draw(st.integers(0, 7))
    elif change == "swap":
        other[0, [0, 1]] = other[0, [1, 0]]
    else:
        other = np.roll(other, data.draw(st.integers(1, 6)), axis=2)
    one, another = keys(torch.tensor(np.concatenate([image, other])), b"").tolist()
    assert bin((one ^ another) % WORD).count("1") > 8  # half of 64 on average


def test_the_key_of_a_image(device):
    """Written down a second time: bytes that were made once can be made again."""
    image = scenes(1, 3, 5)
    sums = sum(
        int(byte) * weight for byte, weight in zip(image.ravel(), splitmix64(0, 45), strict=True)
    )
    salt = int.from_bytes(hashlib.sha256(b"fog 2").digest()[:8], "little")
    # One step back, for the reference adds one before it mixes.
    (expected,) = splitmix64((sums + salt - 0x9E3779B97F4A7C15) % WORD, 1)
    assert int(keys(torch.tensor(image, device=device), b"fog 2")) % WORD == expected


@pytest.mark.parametrize("rate", sorted({*CIFAR["shot_noise"], *IMAGENET["shot_noise"]}))
def test_photons_are_counted_by_inversion(rate, device):
    levels = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3), dtype=np.uint8)
    levels[0, 0, 0], levels[0, 0, 1] = 0, 255
    numbers = np.random.default_rng(1).integers(0, 2**32, levels.shape)
    numbers[0, 0, :2] = [[0, 2**31, 2**32 - 1]] * 2
    chances = (numbers + 0.5) / 2**32
    draws = Draws(lambda: None)
    with patch.object(draws, "uniform", lambda *_: torch.tensor(chances, device=device)):
        images = torch.tensor(levels / np.float32(255), device=device)
        made = noise.shot_noise(images, rate, draws).cpu().numpy()
    expected = stats.poisson.ppf(chances, levels * (rate / 255))
    expected[levels == 0] = 0  # SciPy has no distribution for no light
    assert np.array_equal(made, (expected / rate).astype(np.float32))


# Statistics of whole corruptions


@pytest.mark.parametrize("name", ["gaussian_noise", "speckle_noise", "shot_noise", "impulse_noise"])
@pytest.mark.parametrize("side", [32, 96])
def test_noise_is_distributed_as_numpys(name, side, device):
    """Every level's share, which includes mean, variance and what is clipped."""
    images = np.full((3_000_000 // side**2 // 3, side, side, 3), 90, dtype=np.uint8)
    which = np.arange(len(images))
    images[:, 0, 0] = np.stack([which % 256, which // 256, which * 0], axis=1)  # a stream for each
    one, other = corrupt(images, name, 5), corrupt(images, name, 5, device=device)
    counts = np.stack([np.bincount(made[:, 1:].ravel(), minlength=256) for made in (one, other)])
    often = counts.sum(axis=0) >= 20
    assert stats.chi2_contingency(counts[:, often]).pvalue > 1e-3
    assert counts[:, ~often].sum() < 1e-3 * counts.sum()


@pytest.mark.parametrize("name", ["glass_blur", *DOUBLE, "frost"])
def test_images_are_as_numpys(name, device):
    """Mean, variance, likeness and sharpness of many images; each has numbers of its own.

    Images are independent, so the difference of two means has the error of both.
    """
    images = np.repeat(scenes(1, 32, 32), 600, axis=0)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = np.arange(600) % 256, np.arange(600) // 256
    one, other = (
        np.array([features(images[0], made) for made in corrupt(images, name, 3, device=where)])
        for where in (None, device)
    )
    error = ((one.var(axis=0) + other.var(axis=0)) / len(images)) ** 0.5
    assert (np.abs(one.mean(axis=0) - other.mean(axis=0)) < 4 * error).all()
    for column in range(one.shape[1]):
        assert stats.ks_2samp(one[:, column], other[:, column]).pvalue > 1e-4, column


def features(image: np.ndarray, made: np.ndarray) -> list[float]:
    power = np.abs(np.fft.rfft2(made.mean(axis=2))) ** 2
    far = np.hypot(np.fft.fftfreq(32)[:, None], np.fft.rfftfreq(32))
    bands = [np.log(power[(far > low) & (far <= low + 0.125)].mean()) for low in (0, 0.125, 0.25)]
    return [made.mean(), made.var(), psnr(image, made), *bands]


def test_frost_is_a_piece_of_a_texture(device):
    made = corrupt(black_images(), "frost", 3, device=device)
    textures = textures_for(32, 32)
    pieces = [windows(icy(texture, 0.4), 1) for texture in textures]  # of single rows
    assert {which for which, _ in found_in(made[:, 5:6], pieces)} == set(range(len(textures)))


def test_frost_of_photographs(tmp_path, device):
    """Of different sizes: the one leaves no freedom downwards, the other little to the side."""
    rng = np.random.default_rng(0)
    shades = [rng.integers(0, 256, size, dtype=np.uint8) for size in ((160, 260, 3), (300, 170, 3))]
    for name, photograph in zip("ab", shades, strict=True):
        Image.fromarray(photograph).save(tmp_path / f"{name}.png")
    made = corrupt(black_images(), "frost", 3, device=device, textures=tmp_path)
    pieces = [windows(icy(photograph[2::5, 2::5], 0.4), 31) for photograph in shades]
    found = found_in(made[:, :31], pieces)
    assert {which for which, _ in found} == {0, 1}
    assert {place % 3 for which, place in found if which == 1} == {0, 1, 2}  # as far as it goes


def black_images() -> np.ndarray:
    """But for a corner that gives each its own numbers."""
    black = np.zeros((40, 32, 32, 3), dtype=np.uint8)
    black[:, 31, 31, 0] = np.arange(40)
    return black


def icy(texture: np.ndarray, weight: float) -> np.ndarray:
    return (np.float32(weight) * (texture / np.float32(255)) * np.float32(255)).astype(np.uint8)


def windows(texture: np.ndarray, height: int) -> np.ndarray:  # (places, 3, height, 32)
    views = np.lib.stride_tricks.sliding_window_view(texture, (height, 32), axis=(0, 1))
    return views.reshape(-1, 3, height, 32)


def found_in(made: np.ndarray, pieces: list[np.ndarray]) -> set[tuple[int, int]]:
    """Which textures, and where, the images are pieces of; each must be one of some."""
    used = set()
    for image in made.transpose(0, 3, 1, 2):
        holders = {
            (which, int(place))
            for which, places in enumerate(pieces)
            for place in np.flatnonzero((places == image).all((1, 2, 3)))
        }
        assert holders
        used |= holders
    return used


def test_clouds_fill_their_range(device):
    heights = weather.plasma(64, 2.0, stream(device)).cpu().numpy()
    assert heights.shape == (50, 64, 64)
    assert (heights.min(axis=(1, 2)) == 0).all()
    assert (heights.max(axis=(1, 2)) == 1).all()


# What all have in common


@settings(max_examples=40)
@given(data=st.data(), name=st.sampled_from(make.ON_DEVICE), severity=st.integers(1, 5))
def test_a_image_is_alone(data, name, severity):
    height, width = data.draw(
        st.sampled_from([(32, 32), (33, 47), (24, 17), (5, 3), (70, 5), (1, 1)])
    )
    images = scenes(6, height, width, data.draw(st.integers(0, 9)))
    whole = corrupt(images, name, severity, seed=7, device="cpu")
    order = data.draw(st.permutations(range(6)))
    with patch.object(entry, "AT_ONCE", data.draw(st.integers(1, 4)) * height * width * 3):
        again = corrupt(images[order], name, severity, seed=7, device="cpu")
    assert np.array_equal(again, whole[order])
    one = data.draw(st.integers(0, 5))
    alone = corrupt(images[one : one + 1], name, severity, seed=7, device="cpu")
    assert np.array_equal(alone[0], whole[one])


@pytest.mark.parametrize("name", ["gaussian_noise", "shot_noise", "fog", "elastic_transform"])
def test_seed_severity_and_pixels_count(name, device):
    images = np.repeat(scenes(1, 32, 32), 2, axis=0)
    images[1, 0, 0, 0] ^= 1
    made = corrupt(images, name, 4, device=device)
    assert np.abs(made[0].astype(int) - made[1]).sum() > 1000
    assert np.array_equal(corrupt(images, name, 4, seed=0, device=device), made)
    assert not np.array_equal(corrupt(images, name, 4, seed=1, device=device), made)


@pytest.mark.parametrize("name", ["shot_noise", "motion_blur", "contrast", "jpeg_compression"])
def test_out_as_in(name, device):
    images = scenes(3, 33, 20)
    expected = corrupt(images, name, 2, device=device)
    assert isinstance(expected, np.ndarray)
    tensor = torch.tensor(images)
    made = corrupt(tensor, name, 2, device=torch.device(device))
    assert made.dtype == torch.uint8
    assert made.device.type == device
    assert np.array_equal(made.cpu().numpy(), expected)
    assert np.array_equal(tensor.numpy(), images)
    strided = torch.tensor(images.transpose(0, 3, 1, 2)).permute(0, 2, 3, 1)
    assert torch.equal(corrupt(strided, name, 2, device=device), made)
    images.setflags(write=False)
    backwards = images[:, :, ::-1]
    assert np.array_equal(
        corrupt(backwards, name, 2, device=device),
        corrupt(backwards.copy(), name, 2, device=device),
    )
    assert corrupt(images[:0], name, 2, device=device).shape == (0, 33, 20, 3)
    assert corrupt(tensor[:0], name, 2, device=device).shape == (0, 33, 20, 3)


def test_without_a_torch_path_it_is_numpys(device):
    images = scenes(2, 32, 32)
    for name in ("spatter", "jpeg_compression"):
        assert np.array_equal(corrupt(images, name, 2, device=device), corrupt(images, name, 2))


def test_refusals():
    images = np.zeros((2, 8, 8, 3), dtype=np.uint8)
    tensor = torch.tensor(images)
    assert "name the device" in refusal(tensor, "fog", 1)
    assert "are float32: give pixels" in refusal(tensor / 255, "fog", 1, device="cpu")
    assert "permute(0, 2, 3, 1)" in refusal(tensor.permute(0, 3, 1, 2), "fog", 1, device="cpu")
    assert "shape (8, 8, 3): give images[None]" in refusal(tensor[0], "fog", 1, device="cpu")
    for device in ("gpu", 3.5):
        assert refusal(images, "fog", 1, device=device) == (
            f"{device!r} is no device: say 'cpu', 'cuda' or 'cuda:1'"
        )
    assert "device 'meta' cannot be used here: " in refusal(images, "fog", 1, device="meta")
    assert "it takes none" in refusal(images, "fog", 1, device="cpu", textures="x")
    if not torch.cuda.is_available():
        for name in ("fog", "spatter"):  # also where a device would not be used
            assert "device 'cuda' cannot be used here: " in refusal(images, name, 1, device="cuda")


def test_torch_is_an_extra(monkeypatch):
    plain = builtins.__import__

    def without(name, *arguments, **options):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return plain(name, *arguments, **options)

    for name in [name for name in sys.modules if ".corruptions.on_device" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    images = np.zeros((1, 8, 8, 3), dtype=np.uint8)
    assert refusal(images, "fog", 1, device="cuda") == (
        "device 'cuda' needs torch: pip install 'caster-tta[torch]'"
    )
    assert corrupt(images, "fog", 1).shape == images.shape
