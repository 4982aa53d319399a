"""Whether a set is complete: what is missing is named, what is there is counted."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from caster_bench.data.sets import SETS
from caster_bench.data.sets.check import check
from caster_bench.data.sets.layout import Splits
from caster_bench.data.sets.names import class_names

from . import publish
from .test_sets import pets


def resized(monkeypatch, name: str, sizes: dict[tuple[str, ...], int], classes: int, **more):
    """A set of the table with the sizes of a small tree."""
    splits = tuple(Splits(names, size, **more) for names, size in sizes.items())
    monkeypatch.setitem(SETS, name, replace(SETS[name], splits=splits, classes=classes))


def test_a_complete_set(tmp_path, monkeypatch):
    publish.food101(tmp_path)
    resized(monkeypatch, "food101", {("train", "test"): 2}, classes=2)
    checked = check("food101", tmp_path)
    assert checked.complete
    assert checked.begun
    assert [(s.split, s.images, s.expected) for s in checked.splits] == [
        ("train", 2, 2),
        ("test", 2, 2),
    ]
    assert checked.gaps() == {}
    assert checked.wrong() == []


def test_nothing(tmp_path):
    checked = check("food101", tmp_path)
    assert not checked.complete
    assert not checked.begun
    folder = tmp_path / "food-101"
    assert checked.gaps() == {folder: ["meta/train.txt", "images/", "meta/test.txt"]}


def test_missing_images_are_named_once(tmp_path, monkeypatch):
    publish.food101(tmp_path)
    resized(monkeypatch, "food101", {("train", "test"): 2}, classes=2)
    (tmp_path / "food-101/images/waffles/9.jpg").unlink()  # of both splits
    checked = check("food101", tmp_path)
    assert not checked.complete
    assert checked.gaps() == {tmp_path / "food-101": ["images/waffles/9.jpg"]}
    assert check("food101:train", tmp_path).splits[0].images is None


def test_counts(tmp_path, monkeypatch):
    publish.food101(tmp_path)
    resized(monkeypatch, "food101", {("test",): 4}, classes=2)
    assert check("food101", tmp_path).wrong() == [
        "food101:test has 2 images and 4 are published",
        "food101:test has 1 images of apple_pie and 2 are published",
        "food101:test has 1 images of waffles and 2 are published",
    ]
    resized(monkeypatch, "food101", {("test",): 2}, classes=3, balanced=False)
    checked = check("food101", tmp_path)
    assert checked.wrong() == ["food101:test has images of 2 classes and 3 are published"]
    assert not checked.complete  # though there are as many images as there should be
    resized(monkeypatch, "food101", {("test",): 2}, classes=2, balanced=False)
    assert check("food101", tmp_path).complete


def test_pets_are_not_balanced(tmp_path, monkeypatch):
    pets(tmp_path)
    resized(monkeypatch, "pets", {("test",): 4}, classes=3, balanced=False)
    assert check("pets:test", tmp_path).complete


def test_damage_is_said(tmp_path):
    publish.flowers(tmp_path)
    (tmp_path / "flowers-102/setid.mat").write_bytes(b"")
    (line,) = check("flowers102:train", tmp_path).wrong()
    assert "setid.mat is damaged" in line


def test_digests(tmp_path, monkeypatch):
    publish.corrupted_arrays(tmp_path, "CIFAR-10-C", ["fog"], each=4)
    folder = tmp_path / "CIFAR-10-C"
    data = SETS["cifar10-c"]
    digests = {p.name: hashlib.md5(p.read_bytes()).hexdigest() for p in folder.iterdir()}
    layout = replace(data.layouts[0], md5=digests)
    names = ("fog-1", "fog-2", "fog-3", "fog-4", "fog-5")
    splits = (Splits(names, 4, "x", balanced=False),)
    monkeypatch.setitem(
        SETS, "cifar10-c", replace(data, layouts=(layout,), splits=splits, present=4)
    )
    checked = check("cifar10-c", tmp_path)
    assert checked.complete
    assert checked.published == {folder / "fog.npy": True, folder / "labels.npy": True}
    content = bytearray((folder / "fog.npy").read_bytes())
    content[-1] ^= 1  # a single pixel: shapes and counts are right
    (folder / "fog.npy").write_bytes(content)
    checked = check("cifar10-c", tmp_path)
    assert not checked.complete
    assert checked.changed() == [folder / "fog.npy"]
    assert all(split.complete for split in checked.splits)


def test_a_missing_array_is_named_once(tmp_path):
    publish.corrupted_arrays(tmp_path, "CIFAR-10-C", ["fog"])
    checked = check("cifar10-c", tmp_path)
    assert not checked.complete
    ((folder, files),) = checked.gaps().items()
    assert folder == tmp_path / "CIFAR-10-C"
    assert len(files) == len(set(files)) == 18
    assert "fog.npy" not in files


def test_missing_class_folders(tmp_path):
    publish.class_folders(tmp_path / "PACS/sketch", ["dog", "horse"])
    checked = check("pacs:sketch", tmp_path)
    assert checked.gaps() == {
        tmp_path / "PACS": [
            f"sketch/{x}/*" for x in ("elephant", "giraffe", "guitar", "house", "person")
        ]
    }


def test_the_layout_that_is_there(tmp_path):
    publish.class_folders(tmp_path / "office_home/Art", class_names("office-home"))
    checked = check("office-home", tmp_path)
    assert checked.splits[0].folder == tmp_path / "office_home"
    assert checked.splits[0].images == 65
    assert checked.gaps() == {tmp_path / "office_home": ["Clipart/", "Product/", "Real World/"]}


def test_no_image_is_decoded(tmp_path, monkeypatch):
    publish.food101(tmp_path)
    monkeypatch.setattr("caster.io.image_folder.decode", lambda path: pytest.fail("decoded"))
    check("food101", tmp_path)


REAL = os.environ.get("CASTER_DATA")


@pytest.mark.skipif(not REAL, reason="CASTER_DATA names no folder with the published files")
@pytest.mark.parametrize("name", ["cifar10", "cifar100", "pets"])
def test_real_sets_have_the_published_counts(name):
    checked = check(name)
    if not checked.begun:
        pytest.skip(f"{name} is not in {Path(str(REAL))}")
    assert checked.gaps() == {}
    assert checked.wrong() == []
    assert all(split.complete for split in checked.splits)
