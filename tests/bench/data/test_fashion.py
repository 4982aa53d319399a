"""Fashion-MNIST: small real idx files, gzipped and not, whole and damaged."""

from __future__ import annotations

import gzip
import struct
from dataclasses import replace

import numpy as np
import pytest

from caster.errors import CasterError
from caster.io.images import open_images
from caster_bench.data.sets import SETS
from caster_bench.data.sets.array_loaders import read_idx
from caster_bench.data.sets.dataset import SplitGroup
from tests.support.command_line import cli
from tests.support.image_files import noise, rejection

FOLDERS = ["fashion-mnist", "FashionMNIST/raw"]
PIXELS = {"train": noise(6, 28, 28), "t10k": noise(4, 28, 28)}
LABELS = {"train": [9, 0, 0, 3, 1, 6], "t10k": [2, 8, 9, 0]}


def idx(values: np.ndarray) -> bytes:
    """From its description: two zeros, 8 for bytes, the dimensions, their sizes, the bytes."""
    head = bytes([0, 0, 8, values.ndim])
    sizes = b"".join(struct.pack(">I", size) for size in values.shape)
    return head + sizes + bytes(values.astype(np.uint8).ravel().tolist())


def lay_out(folder, pack=gzip.compress) -> None:
    folder.mkdir(parents=True)
    for split, pixels in PIXELS.items():
        (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(pack(idx(pixels)))
        labels = np.array(LABELS[split])
        (folder / f"{split}-labels-idx1-ubyte.gz").write_bytes(pack(idx(labels)))


@pytest.mark.parametrize("folder", FOLDERS)
def test_images_and_classes(tmp_path, folder):
    lay_out(tmp_path / folder)
    for name, split in (("train", "train"), ("test", "t10k")):
        images = open_images(f"fashion-mnist:{name}", tmp_path, labelled=True)
        assert len(images) == len(PIXELS[split])
        assert len(images.classes) == 10
        order = images.classes.tolist()
        assert [order.index(label) for label in images.labels.tolist()] == LABELS[split]
        for i, grey in enumerate(PIXELS[split]):
            image = images.read(i)
            assert (image.dtype, image.shape) == (np.uint8, (28, 28, 3))
            assert all(np.array_equal(image[:, :, channel], grey) for channel in range(3))
    assert images.labels.tolist() == ["Pullover", "Bag", "Ankle boot", "T-shirt/top"]


def test_files_that_were_unpacked_in_place(tmp_path):
    lay_out(tmp_path / "fashion-mnist", pack=bytes)
    images = open_images("fashion-mnist:test", tmp_path)
    assert np.array_equal(images.read(3)[:, :, 1], PIXELS["t10k"][3])


def test_damage_is_reported_in_one_line(tmp_path):
    folder = tmp_path / "fashion-mnist"
    lay_out(folder)
    name = "fashion-mnist:test"
    images, labels = (folder / f"t10k-{x}-ubyte.gz" for x in ("images-idx3", "labels-idx1"))
    whole = {path: path.read_bytes() for path in (images, labels)}
    labels.write_bytes(whole[labels][:-9])
    assert f"{labels} is damaged or truncated" in rejection(name, tmp_path)
    labels.write_bytes(gzip.compress(idx(np.array([2, 8, 9]))))
    assert "has 4 images, and" in rejection(name, tmp_path)
    labels.write_bytes(gzip.compress(idx(np.array([2, 8, 9, 10]))))
    assert "a label is not one of the 10 classes" in rejection(name, tmp_path)
    labels.write_bytes(gzip.compress(idx(np.array([2, 8, 9, 0])) + b"\0"))
    assert "is damaged: it has 5 bytes for (4,)" in rejection(name, tmp_path)
    labels.write_bytes(whole[images])
    assert "not an idx file of bytes in 1 dimensions" in rejection(name, tmp_path)
    labels.write_bytes(whole[labels])
    images.write_bytes(b"\0\0")
    assert f"{images} is damaged or truncated" in rejection(name, tmp_path)
    images.write_bytes(whole[images][:-30])
    with pytest.raises(CasterError, match="damaged or truncated"):  # found when it is read
        open_images(name, tmp_path).read(0)
    images.unlink()
    assert "is missing t10k-images-idx3-ubyte.gz in" in rejection(name, tmp_path)
    with pytest.raises(CasterError, match="cannot read"):
        read_idx(images, 3)


def test_check_counts_them(tmp_path, monkeypatch):
    lay_out(tmp_path / "fashion-mnist")
    small = (SplitGroup(("train",), 6, balanced=False), SplitGroup(("test",), 4, balanced=False))
    known = replace(SETS["fashion-mnist"], splits=small, classes=5)
    monkeypatch.setitem(SETS, "fashion-mnist", known)
    done = cli("data", "check", "fashion-mnist", "--data-root", tmp_path)
    assert "train 6 of 6 images" in " ".join(done.output.split())
    assert "has 4 classes instead of 5" in done.output
    assert done.exit_code == 1
