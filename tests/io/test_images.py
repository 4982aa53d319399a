"""The kinds of image source, by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from caster.io.images import open_images
from tests.support.image_files import noise, rejection


@pytest.mark.parametrize("source", ["cifar11:test", "imagenet22k", "no/such/folder", "C:\\images"])
def test_unknown(source):
    for images in (source, Path(source), [Path(source)]):
        message = rejection(images)
        assert f"{source} does not exist" in message
        assert "a folder of images or of class folders" in message
        assert ".npz" in message
        assert ".txt" in message


@pytest.mark.parametrize("source", ["", []])
def test_nothing(source):
    assert "no images are named" in rejection(source)


def test_files_of_other_kinds(tmp_path):
    (tmp_path / "features.parquet").touch()
    assert "features.parquet is of an unknown kind: DATA is" in rejection(
        tmp_path / "features.parquet"
    )


def test_a_path_comes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("cifar10:test").mkdir()
    Image.fromarray(noise(2, 2, 3)).save("cifar10:test/a.png")
    assert open_images("cifar10:test").names == ("a.png",)


def test_one_source_in_a_list(tmp_path):
    np.savez(tmp_path / "a.npz", images=noise(2, 4, 4, 3))
    assert len(open_images([tmp_path / "a.npz"])) == 2


def test_suffixes_ignore_case(tmp_path):
    np.savez(tmp_path / "a.npz", images=noise(2, 4, 4, 3))
    (tmp_path / "a.npz").rename(tmp_path / "A.NPZ")
    assert len(open_images(tmp_path / "A.NPZ")) == 2
