"""One file to pixels: every kind that Pillow reads, and every way to fail."""

from __future__ import annotations

import io
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from caster import CasterError
from caster.io.decode import UnreadableImage, decode

from .conftest import noise

COLOUR = noise(6, 5, 3)


def saved(tmp_path, image, name="image.png", **options):
    image.save(tmp_path / name, **options)
    return tmp_path / name


def refusal(path) -> str:
    with pytest.raises(UnreadableImage) as caught:
        decode(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("suffix", ["png", "PNG", "bmp", "tif", "tiff", "ppm", "webp"])
def test_lossless_kinds(tmp_path, suffix):
    path = saved(tmp_path, Image.fromarray(COLOUR), f"a.{suffix}", lossless=True)
    image = decode(path)
    assert image.dtype == np.uint8
    assert np.array_equal(image, COLOUR)


def test_the_content_counts_and_not_the_suffix(tmp_path):
    path = saved(tmp_path, Image.fromarray(COLOUR), "a.jpg", format="WEBP", lossless=True)
    assert np.array_equal(decode(path), COLOUR)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGBA", "CMYK", "YCbCr"])
def test_modes_are_what_pillow_makes_of_them(tmp_path, mode):
    image = Image.fromarray(COLOUR).convert("P" if mode == "PA" else mode).convert(mode)
    name = "a.tif" if mode in ("CMYK", "YCbCr", "PA") else "a.png"
    path = saved(tmp_path, image, name)
    assert np.array_equal(decode(path), np.asarray(Image.open(path).convert("RGB")))


def test_16_bit_grey_is_scaled_and_not_clipped(tmp_path):
    eight = noise(4, 4)
    path = saved(tmp_path, Image.fromarray(eight.astype(np.uint16) * 257))
    with Image.open(path) as image:
        assert image.mode.startswith("I")
    assert np.array_equal(decode(path), np.repeat(eight[..., None], 3, axis=2))
    tif = saved(tmp_path, Image.fromarray(eight.astype(np.uint16) * 257), "a.tif")
    assert np.array_equal(decode(tif), decode(path))


@pytest.mark.parametrize(("largest", "half"), [(65535, 32768), (1023, 512)])
def test_16_bit_pgm(tmp_path, largest, half):
    (tmp_path / "a.pgm").write_bytes(
        f"P5 2 1 {largest}\n".encode() + np.array([half, largest], dtype=">u2").tobytes()
    )
    assert decode(tmp_path / "a.pgm")[0, :, 0].tolist() == [128, 255]


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_without_a_range_are_refused(tmp_path, dtype):
    path = saved(tmp_path, Image.fromarray(np.full((2, 2), 0.5).astype(dtype)), "a.tif")
    assert "no fixed range" in refusal(path)


@pytest.mark.parametrize("transparency", [0, bytes([0, 128] * 8)])
def test_transparent_palettes_warn_nobody(tmp_path, transparency):
    image = Image.fromarray(COLOUR).quantize(16)
    path = saved(tmp_path, image, transparency=transparency)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(decode(path), np.asarray(image.convert("RGB")))


def test_the_camera_is_not_turned(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    path = saved(tmp_path, Image.fromarray(COLOUR), exif=exif)
    assert np.array_equal(decode(path), COLOUR)


def test_the_first_frame_of_several(tmp_path):
    frames = [Image.fromarray(np.full((4, 4), value, dtype=np.uint8)) for value in (10, 200)]
    path = saved(tmp_path, frames[0], "a.gif", save_all=True, append_images=frames[1:])
    assert decode(path).max() == 10


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "tif", "webp", "gif", "ppm"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.6, 0.9])
def test_truncated(tmp_path, suffix, share):
    path = saved(tmp_path, Image.fromarray(noise(40, 40, 3)), f"a.{suffix}")
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    refusal(path)


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "tif", "webp", "gif", "ppm"])
def test_any_flipped_bit_is_read_or_refused_in_one_line(tmp_path, suffix):
    path = saved(tmp_path, Image.fromarray(noise(12, 12, 3)), f"a.{suffix}")
    original, refusals = path.read_bytes(), []
    rng = np.random.default_rng(0)
    for at in rng.choice(len(original), min(100, len(original)), replace=False):
        damaged = bytearray(original)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            assert decode(path).shape[2] == 3
        except UnreadableImage as error:
            refusals.append(str(error))
    assert not any("\n" in refusal for refusal in refusals)


def test_no_image_at_all(tmp_path):
    (tmp_path / "a.jpg").write_text("<html>")
    assert "not allowed" in refusal(tmp_path / "a.jpg")
    assert "No such file" in refusal(tmp_path / "gone.jpg")


def test_decompression_bombs(tmp_path, monkeypatch):
    path = saved(tmp_path, Image.fromarray(COLOUR))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert "decompression bomb" in refusal(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)  # half of it is a warning only
    assert "decompression bomb" in refusal(path)  # which these tests make an error
    with pytest.warns(Image.DecompressionBombWarning):
        assert np.array_equal(decode(path), COLOUR)


def test_not_enough_memory(tmp_path, monkeypatch):
    def exhausted(*_):
        raise MemoryError

    monkeypatch.setattr(Image.Image, "convert", exhausted)
    assert "memory" in refusal(saved(tmp_path, Image.fromarray(COLOUR)))


def test_without_pillow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(CasterError, match=r"pip install 'caster-tta\[images\]'"):
        decode(tmp_path / "a.jpg")


def test_several_threads(tmp_path):
    images = [noise(20, 20, 3) for _ in range(60)]
    paths = [
        saved(tmp_path, Image.fromarray(image), f"{i}.{('png', 'bmp', 'tif')[i % 3]}")
        for i, image in enumerate(images)
    ]
    with ThreadPoolExecutor(8) as pool:
        for image, expected in zip(pool.map(decode, paths * 3), images * 3, strict=True):
            assert np.array_equal(image, expected)


def test_pixels_are_torchvisions(tmp_path):
    buffer = io.BytesIO()
    Image.fromarray(noise(30, 30, 3)).save(buffer, "JPEG")
    (tmp_path / "a.jpg").write_bytes(buffer.getvalue())
    expected = np.asarray(Image.open(buffer).convert("RGB"))  # its `pil_loader`, word for word
    assert np.array_equal(decode(tmp_path / "a.jpg"), expected)
