"""Hostile images: sizes bounded before the memory is taken, formats allowed, files regular."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zlib
from functools import partial

import numpy as np
import pytest
from PIL import Image

from caster import CasterError
from caster.adapt.image_batches import read_batches
from caster.config import DEFAULT_LIMITS, Limits
from caster.io.files import file_digest, read_regular
from caster.io.image_files import UnreadableImage, decode
from caster.io.images import open_images
from caster.models.preprocessing import Preprocessing
from tests.support.messages import error_line

PIXELS = {"range": 1.0, "mean": (0.5,) * 3, "std": (0.5,) * 3, "layout": "NCHW"}
SHORTER = Preprocessing(**PIXELS, resize=256, interpolation="bilinear", crop=(224, 224))
SQUASHED = Preprocessing(**PIXELS, resize=(224, 224), interpolation="bilinear")


def png(path, width, height, rows=None):
    """A grey PNG whose header may state more rows than there are."""
    content = zlib.compress(bytes((width + 1) * (height if rows is None else rows)), 9)

    def chunk(name, data):
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", content) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + parts)
    return path


rejection = partial(error_line, decode, kind=UnreadableImage)


# pixels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("side", "preprocessing"), [(15_000, "SHORTER"), (3_000_000, "SQUASHED")], ids=str
)
def test_a_thin_image_takes_little_memory(tmp_path, side, preprocessing):
    png(tmp_path / "thin.png", 1, side)
    code = f"""
import resource
from caster.io.images import open_images
from caster.adapt.image_batches import read_batches
from tests.io.test_limits import {preprocessing} as preprocessing
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
images = open_images("{tmp_path}/thin.png")
(batch,) = read_batches(images, preprocessing, [0], 1, skip_unreadable=True)
print(batch.unreadable[0])
taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert taken < 200_000, taken  # kB
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "thin.png" in done.stdout
    assert f"over the limit of {DEFAULT_LIMITS.pixels:,} pixels" in done.stdout


def test_the_limit_is_the_largest_that_passes(tmp_path):
    path = png(tmp_path / "a.png", 30, 20)
    assert decode(path, Limits(pixels=600)).shape == (20, 30, 3)
    assert "30 x 20 pixels, over the limit of 599 pixels" in rejection(path, Limits(pixels=599))
    image = np.zeros((20, 30, 3), dtype=np.uint8)
    assert SQUASHED.resize_and_crop(image, Limits(pixels=224 * 224)).shape == (224, 224, 3)
    with pytest.raises(CasterError, match="over the limit"):
        SQUASHED.resize_and_crop(image, Limits(pixels=224 * 224 - 1))


@pytest.mark.parametrize("side", [9_000, 11_000, 20_000])  # around Pillow's own limit
def test_the_header_is_enough_to_reject_an_image(tmp_path, side):
    message = rejection(png(tmp_path / "a.png", side, side, rows=1))
    assert f"over the limit of {DEFAULT_LIMITS.pixels:,} pixels" in message
    assert str(side * side) in message


def test_raising_the_limit_raises_pillows_too(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    path = png(tmp_path / "a.png", 30, 20)
    assert "bomb" in rejection(path)  # the user lowered Pillow's limit and did not raise ours
    limits = Limits(pixels=DEFAULT_LIMITS.pixels + 1)
    assert open_images(path, limits=limits).read(0).shape == (20, 30, 3)


@pytest.mark.parametrize("pixels", [0, -1, 1.5, True, "9"])
def test_limits_are_whole_numbers(pixels):
    with pytest.raises(CasterError, match="pixels must be a whole number"):
        Limits(pixels=pixels)


def test_images_of_an_array_are_bounded_too(tmp_path):
    np.savez(tmp_path / "a.npz", images=np.zeros((1, 20, 30, 3), dtype=np.uint8))
    with pytest.raises(CasterError, match="30 x 20 pixels, over the limit of 599 pixels"):
        open_images(tmp_path / "a.npz", limits=Limits(pixels=599))


def test_an_array_that_expands_is_not_decompressed(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, images=np.zeros((40, 100, 100, 3), dtype=np.uint8))
    assert open_images(path).read(0).shape == (100, 100, 3)
    bounded = open_images(path, limits=Limits(array_bytes=10**6))
    with pytest.raises(CasterError, match=r"takes 1,200,000 bytes, over the limit of 1,000,000"):
        bounded.read(0)


# formats


def test_an_eps_named_png_starts_no_ghostscript(tmp_path, monkeypatch):
    marker, gs = tmp_path / "started", tmp_path / "bin" / "gs"
    gs.parent.mkdir()
    gs.write_text(f"#!/bin/sh\ntouch {marker}\n")
    gs.chmod(0o755)
    monkeypatch.setenv("PATH", f"{gs.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # search for it again
    path = tmp_path / "a.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n%%EOF\n")
    assert "not allowed" in rejection(path)
    assert not marker.exists()
    with Image.open(path) as image, pytest.raises(Exception):  # noqa: B017, PT011
        image.load()
    assert marker.exists()  # the test would have detected it


@pytest.mark.parametrize("name", ["TGA", "ICO", "PCX", "SGI", "JPEG2000"])
def test_other_formats_are_not_allowed(tmp_path, name):
    path = tmp_path / "a.png"
    Image.fromarray(np.zeros((16, 16, 3), dtype=np.uint8)).save(path, name)
    assert "not allowed" in rejection(path)


# regular files


def test_a_fifo_among_the_images_is_not_opened(tmp_path):
    png(tmp_path / "a.png", 4, 4)
    os.mkfifo(tmp_path / "b.png")
    images = open_images(tmp_path)
    (batch,) = read_batches(images, SQUASHED, range(2), 2, skip_unreadable=True)
    assert batch.rows == [0]
    assert "b.png: it is not a regular file" in batch.unreadable[1]


@pytest.mark.parametrize("read", [read_regular, file_digest, Preprocessing.from_toml])
def test_special_files_are_not_opened(tmp_path, read):
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    for path in (fifo, "/dev/zero"):
        with pytest.raises((CasterError, OSError), match="not a regular file"):
            read(path)
