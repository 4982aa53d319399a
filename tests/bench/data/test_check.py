"""Checks of a set: what is missing is listed, what is there is counted."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from caster_bench.data.sets import SETS
from caster_bench.data.sets.check import check
from caster_bench.data.sets.dataset import SplitGroup
from caster_bench.data.sets.published import class_names
from tests.support import publish
from tests.support.publish import pets


def resized(monkeypatch, name: str, sizes: dict[tuple[str, ...], int], classes: int, **more):
    """Give a set the sizes of a small tree."""
    splits = tuple(SplitGroup(names, size, **more) for names, size in sizes.items())
    monkeypatch.setitem(SETS, name, replace(SETS[name], splits=splits, classes=classes))


def test_a_complete_set(tmp_path, monkeypatch):
    publish.food101(tmp_path)
    resized(monkeypatch, "food101", {("train", "test"): 2}, classes=2)
    status = check("food101", tmp_path)
    assert status.complete
    assert status.present
    assert [(s.split, s.images, s.expected) for s in status.splits] == [
        ("train", 2, 2),
        ("test", 2, 2),
    ]
    assert status.missing() == {}
    assert status.problems() == []


def test_nothing(tmp_path):
    status = check("food101", tmp_path)
    assert not status.complete
    assert not status.present
    folder = tmp_path / "food-101"
    assert status.missing() == {folder: ["meta/train.txt", "images/", "meta/test.txt"]}


def test_missing_images_are_listed_once(tmp_path, monkeypatch):
    publish.food101(tmp_path)
    resized(monkeypatch, "food101", {("train", "test"): 2}, classes=2)
    (tmp_path / "food-101/images/waffles/9.jpg").unlink()  # of both splits
    status = check("food101", tmp_path)
    assert not status.complete
    assert status.missing() == {tmp_path / "food-101": ["images/waffles/9.jpg"]}
    assert check("food101:train", tmp_path).splits[0].images is None


def test_counts(tmp_path, monkeypatch):
    publish.food101(tmp_path)
    resized(monkeypatch, "food101", {("test",): 4}, classes=2)
    assert check("food101", tmp_path).problems() == [
        "food101:test has 2 images instead of 4",
        "food101:test has 1 image of apple_pie instead of 2",
        "food101:test has 1 image of waffles instead of 2",
    ]
    resized(monkeypatch, "food101", {("test",): 2}, classes=3, balanced=False)
    status = check("food101", tmp_path)
    assert status.problems() == ["food101:test has 2 classes instead of 3"]
    assert not status.complete  # though the number of images is right
    resized(monkeypatch, "food101", {("test",): 2}, classes=2, balanced=False)
    assert check("food101", tmp_path).complete


def test_pets_are_not_balanced(tmp_path, monkeypatch):
    pets(tmp_path)
    resized(monkeypatch, "pets", {("test",): 4}, classes=3, balanced=False)
    assert check("pets:test", tmp_path).complete


def test_damage_is_reported(tmp_path):
    publish.flowers(tmp_path)
    (tmp_path / "flowers-102/setid.mat").write_bytes(b"")
    (line,) = check("flowers102:train", tmp_path).problems()
    assert "setid.mat is damaged" in line


def test_digests(tmp_path, monkeypatch):
    publish.corrupted_arrays(tmp_path, "CIFAR-10-C", ["fog"], each=4)
    folder = tmp_path / "CIFAR-10-C"
    data = SETS["cifar10-c"]
    digests = {p.name: hashlib.md5(p.read_bytes()).hexdigest() for p in folder.iterdir()}
    layout = replace(data.layouts[0], md5=digests)
    names = ("fog-1", "fog-2", "fog-3", "fog-4", "fog-5")
    splits = (SplitGroup(names, 4, "x", balanced=False),)
    monkeypatch.setitem(
        SETS, "cifar10-c", replace(data, layouts=(layout,), splits=splits, classes_present=4)
    )
    status = check("cifar10-c", tmp_path)
    assert status.complete
    assert status.digests_match == {folder / "fog.npy": True, folder / "labels.npy": True}
    content = bytearray((folder / "fog.npy").read_bytes())
    content[-1] ^= 1  # a single pixel: shapes and counts are right
    (folder / "fog.npy").write_bytes(content)
    status = check("cifar10-c", tmp_path)
    assert not status.complete
    assert status.changed() == [folder / "fog.npy"]
    assert all(split.complete for split in status.splits)


def test_a_missing_array_is_listed_once(tmp_path):
    publish.corrupted_arrays(tmp_path, "CIFAR-10-C", ["fog"])
    status = check("cifar10-c", tmp_path)
    assert not status.complete
    ((folder, files),) = status.missing().items()
    assert folder == tmp_path / "CIFAR-10-C"
    assert len(files) == len(set(files)) == 18
    assert "fog.npy" not in files


def test_missing_class_folders(tmp_path):
    publish.class_folders(tmp_path / "PACS/sketch", ["dog", "horse"])
    status = check("pacs:sketch", tmp_path)
    assert status.missing() == {
        tmp_path / "PACS": [
            f"sketch/{x}/*" for x in ("elephant", "giraffe", "guitar", "house", "person")
        ]
    }


def test_the_layout_that_is_there(tmp_path):
    publish.class_folders(tmp_path / "office_home/Art", class_names("office-home"))
    status = check("office-home", tmp_path)
    assert status.splits[0].folder == tmp_path / "office_home"
    assert status.splits[0].images == 65
    assert status.missing() == {tmp_path / "office_home": ["Clipart/", "Product/", "Real World/"]}


def test_no_image_is_decoded(tmp_path, monkeypatch):
    publish.food101(tmp_path)
    monkeypatch.setattr("caster.io.image_files.decode", lambda path: pytest.fail("decoded"))
    check("food101", tmp_path)


REAL = os.environ.get("CASTER_DATA")


@pytest.mark.skipif(not REAL, reason="CASTER_DATA names no folder with the published files")
@pytest.mark.parametrize("name", ["cifar10", "cifar100", "pets"])
def test_real_sets_have_the_published_counts(name):
    status = check(name)
    if not status.present:
        pytest.skip(f"{name} is not in {Path(str(REAL))}")
    assert status.missing() == {}
    assert status.problems() == []
    assert all(split.complete for split in status.splits)
