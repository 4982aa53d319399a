"""Folders of classes, folders of images, and lists."""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, features

from caster import CasterError
from caster.io.decode import UnreadableImage, formats
from caster.io.image_folder import in_words
from caster.io.images import open_images

from .conftest import noise, refusal


def fill(root: Path, *names: str) -> Path:
    """Images of these names, each of a colour of its own."""
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 6, 3), i, dtype=np.uint8)).save(root / name)
    return root


@pytest.fixture
def tree(tmp_path):
    root = fill(tmp_path / "tree", "dog/b.png", "dog/a.PNG", "cat/z.jpg", "cat/deep/er/a.jpeg")
    (root / "dog/.hidden.png").touch()
    (root / "dog/notes.txt").touch()
    (root / ".git").mkdir()
    (root / "README.md").touch()
    return root


def test_a_folder_a_class(tree):
    images = open_images(tree, labelled=True)
    assert images.name == str(tree)
    assert list(images.names) == ["cat/z.jpg", "cat/deep/er/a.jpeg", "dog/a.PNG", "dog/b.png"]
    assert images.labels.tolist() == ["cat", "cat", "dog", "dog"]
    assert images.classes.tolist() == ["cat", "dog"]
    assert images.by_class
    assert len(images) == 4
    assert [int(images.read(i).mean().round()) for i in range(4)] == [2, 3, 1, 0]


def test_the_order_of_torchvision(tree):
    fill(tree, "cat/deep/a.png", "cat/deep-er/a.png", "cat/a.png", "Cow/a.png", "dog/B.png")
    expected = []
    for name in sorted(["cat", "Cow", "dog"]):  # its `make_dataset`
        for where, _, files in sorted(os.walk(tree / name)):
            expected += [os.path.join(where, file) for file in sorted(files)]
    kept = [path for path in expected if not path.endswith((".hidden.png", "notes.txt"))]
    assert [str(tree / name) for name in open_images(tree).names] == kept


def test_a_flat_folder(tmp_path):
    fill(tmp_path, "b.png", "a.png")
    (tmp_path / "empty").mkdir()
    images = open_images(str(tmp_path))
    assert list(images.names) == ["a.png", "b.png"]
    assert images.labels is None
    assert images.classes is None
    assert not images.by_class
    assert "has no labels: give a folder with one folder a class" in refusal(
        tmp_path, labelled=True
    )


def test_images_beside_class_folders(tree):
    fill(tree, "stray.png")
    message = refusal(tree)
    assert "images (stray.png) beside class folders (cat)" in message


def test_no_image_anywhere(tmp_path):
    assert "holds no image" in refusal(tmp_path)
    (tmp_path / "cat").mkdir()
    (tmp_path / "notes.txt").touch()
    assert "holds no image" in refusal(tmp_path)


def test_an_empty_class_is_a_class_and_refused_where_labels_count(tree):
    (tree / "bird").mkdir()
    (tree / "bird/notes.txt").touch()
    images = open_images(tree)
    assert images.classes.tolist() == ["bird", "cat", "dog"]
    assert images.labels.tolist() == ["cat", "cat", "dog", "dog"]
    assert "class folder bird of" in refusal(tree, labelled=True)


def test_links_are_followed_once(tree, tmp_path):
    (tree / "cat/elsewhere").symlink_to(fill(tmp_path / "elsewhere", "c.png"))
    assert "cat/elsewhere/c.png" in open_images(tree).names
    (tree / "cat/deep/up").symlink_to(tree / "cat")
    assert "a second time" in refusal(tree)


def test_a_link_to_nothing_is_not_passed_over(tree):
    (tree / "cat/gone.png").symlink_to(tree / "nowhere.png")
    images = open_images(tree)
    assert "cat/gone.png" in images.names
    with pytest.raises(CasterError, match=r"gone\.png: No such file"):
        _ = images.sha256


def test_folders_that_cannot_be_read(tree, monkeypatch):
    scandir, listdir = os.scandir, os.listdir

    def denied(real, part):
        def scan(path):
            if str(path).endswith(part):
                raise PermissionError(13, "Permission denied", str(path))
            return real(path)

        return scan

    monkeypatch.setattr(os, "scandir", denied(scandir, "deep"))
    assert "deep: Permission denied" in refusal(tree)
    monkeypatch.setattr(os, "listdir", denied(listdir, "tree"))
    assert "tree: Permission denied" in refusal(tree)


def test_an_unreadable_image_is_named(tree):
    (tree / "cat/z.jpg").write_bytes(b"")
    images = open_images(tree)
    with pytest.raises(UnreadableImage, match=r"cat/z\.jpg: it is empty"):
        images.read(0)
    assert images.read(1).shape == (4, 6, 3)


def test_digest(tree, tmp_path):
    first = open_images(tree).sha256
    assert first == open_images(tree).sha256
    tree = tree.rename(tmp_path / "moved")
    assert first == open_images(tree).sha256
    shutil.copytree(tree, tmp_path / "copy")  # names, sizes and dates alike, as in an archive
    assert first != open_images(tmp_path / "copy").sha256

    stat = (tree / "cat/z.jpg").stat()
    os.utime(tree / "cat/z.jpg", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    touched = open_images(tree).sha256
    assert touched != first
    os.utime(tree / "cat/z.jpg", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    first, changed = open_images(tree).sha256, first
    assert first != changed  # a date set back is a change all the same
    (tree / "bird").mkdir()
    assert open_images(tree).sha256 != first
    (tree / "bird").rmdir()
    (tree / "cat").rename(tree / "lynx")
    assert open_images(tree).sha256 != first


def test_digest_reads_no_image(tree, monkeypatch):
    images = open_images(tree)
    monkeypatch.setattr("builtins.open", None)
    assert len(images.sha256) == 64


@pytest.fixture
def listing(tmp_path):
    fill(tmp_path / "shots", "b.png", "a.png", "noending.png")
    (tmp_path / "shots/noending.png").rename(tmp_path / "shots/noending")
    path = tmp_path / "shots/list.txt"
    path.write_text(
        f"\ufeff# mine\nb.png\n\n  noending\n{tmp_path}/shots/a.png\n", encoding="utf-8"
    )
    return path


def test_a_list(listing, tmp_path):
    images = open_images(listing)
    assert list(images.names) == ["b.png", "noending", f"{tmp_path}/shots/a.png"]
    assert [int(images.read(i)[0, 0, 0]) for i in range(3)] == [0, 2, 1]
    assert images.labels is None
    assert "has no labels" in refusal(listing, labelled=True)
    assert images.sha256 == open_images(listing).sha256
    listing.write_text(f"noending\nb.png\n{tmp_path}/shots/a.png\n")
    assert images.sha256 != open_images(listing).sha256  # features kept by digest have an order


def test_lists_that_are_wrong(listing):
    listing.write_text("b.png\n# no\nc.png\n")
    assert "line 3: there is no file c.png" in refusal(listing)
    listing.write_text("# nothing\n")
    assert "names no file" in refusal(listing)
    listing.write_bytes(b"\xff\xfe\x00")
    assert "not text in UTF-8" in refusal(listing)


def test_lists_that_cannot_be_opened(listing, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("caster.io.image_folder.read_regular", denied)
    assert "list.txt: Permission denied" in refusal(listing)


def test_several_files(tmp_path, monkeypatch):
    monkeypatch.chdir(fill(tmp_path, "b.png", "a.png"))
    images = open_images([Path("b.png"), Path("a.png")])
    monkeypatch.chdir("/")
    assert images.name == "b.png and 1 more"
    assert list(images.names) == ["b.png", "a.png"]
    assert [int(images.read(i)[0, 0, 0]) for i in range(2)] == [0, 1]
    assert open_images(tmp_path / "b.png").names == (str(tmp_path / "b.png"),)
    assert "there is no file c.png" in refusal([tmp_path / "b.png", Path("c.png")])
    assert "is a folder" in refusal([tmp_path / "b.png", tmp_path])


def test_several_threads(tmp_path):
    pixels = noise(30, 5, 5, 3)
    for i, image in enumerate(pixels):
        (tmp_path / f"{i % 3}").mkdir(exist_ok=True)
        Image.fromarray(image).save(tmp_path / f"{i % 3}/{i:02d}.png")
    images = open_images(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(images.read, list(range(30)) * 4))
    expected = [pixels[int(Path(name).stem)] for name in images.names] * 4
    assert all(np.array_equal(a, b) for a, b in zip(read, expected, strict=True))


def test_every_suffix_of_a_format_is_read(tmp_path):
    for suffix, kind in formats().items():
        Image.new("RGB", (8, 8)).save(tmp_path / f"x{suffix}", format=kind)
    images = open_images(tmp_path)
    assert {".jfif", ".tif", ".tiff"} <= {os.path.splitext(name)[1] for name in images.names}
    assert all(images.read(i).shape == (8, 8, 3) for i in range(len(images)))
    assert (".avif" in formats()) == features.check("avif")
    assert images.skipped == []


def test_what_is_no_image_is_named(tree):
    (tree / "cat/deep/.cache").mkdir()
    (tree / "cat/x.heic").touch()
    images = open_images(tree)
    assert sorted(images.skipped) == [
        ".git/", "README.md", "cat/deep/.cache/", "cat/x.heic", "dog/.hidden.png", "dog/notes.txt",
    ]  # fmt: skip
    assert "x.heic" not in str(images.names)
    words = in_words(images.skipped)
    assert words.startswith("skipped 6 files that are not images: .git/, README.md, cat/")
    assert "and 1 more; to read cat/x.heic: pip install pillow-heif" in words


def test_a_folder_without_an_image_says_what_it_holds(tmp_path):
    (tmp_path / "clip.mp4").touch()
    assert "skipped 1 file that is not an image: clip.mp4" in refusal(tmp_path)


def test_heic_is_read_where_pillow_heif_is(tmp_path, monkeypatch):
    plugin = SimpleNamespace(register_heif_opener=lambda: None)
    monkeypatch.setitem(sys.modules, "pillow_heif", plugin)
    formats.cache_clear()
    try:
        (tmp_path / "x.HEIC").touch()
        assert list(open_images(tmp_path).names) == ["x.HEIC"]
    finally:
        formats.cache_clear()
