"""Image files: every format that Pillow reads, every way to fail, folders and lists."""

from __future__ import annotations

import io
import os
import shutil
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, features

from caster import CasterError
from caster.io import image_files
from caster.io.image_files import UnreadableImage, decode, describe_skipped, formats
from caster.io.images import open_images
from tests.support.image_files import noise, rejection
from tests.support.messages import error_line, flipped_bits

COLOUR = noise(6, 5, 3)


def saved(tmp_path, image, name="image.png", **options):
    image.save(tmp_path / name, **options)
    return tmp_path / name


def unreadable(path) -> str:
    line = error_line(decode, path, kind=UnreadableImage)
    assert str(path) in line
    return line


@pytest.mark.parametrize("suffix", ["png", "PNG", "bmp", "tif", "tiff", "ppm", "webp"])
def test_lossless_formats(tmp_path, suffix):
    path = saved(tmp_path, Image.fromarray(COLOUR), f"a.{suffix}", lossless=True)
    image = decode(path)
    assert image.dtype == np.uint8
    assert np.array_equal(image, COLOUR)


def test_the_content_counts_and_not_the_suffix(tmp_path):
    path = saved(tmp_path, Image.fromarray(COLOUR), "a.jpg", format="WEBP", lossless=True)
    assert np.array_equal(decode(path), COLOUR)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGBA", "CMYK", "YCbCr"])
def test_modes_are_converted_by_pillow(tmp_path, mode):
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
def test_pixels_without_a_range_are_rejected(tmp_path, dtype):
    path = saved(tmp_path, Image.fromarray(np.full((2, 2), 0.5).astype(dtype)), "a.tif")
    assert "no fixed range" in unreadable(path)


@pytest.mark.parametrize("transparency", [0, bytes([0, 128] * 8)])
def test_transparent_palettes_cause_no_warning(tmp_path, transparency):
    image = Image.fromarray(COLOUR).quantize(16)
    path = saved(tmp_path, image, transparency=transparency)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(decode(path), np.asarray(image.convert("RGB")))


def test_exif_orientation_is_ignored(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
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
    unreadable(path)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "tif", "webp", "gif", "ppm"])
def test_an_image_with_a_flipped_bit_is_read_or_rejected_in_one_line(tmp_path, suffix):
    path = saved(tmp_path, Image.fromarray(noise(12, 12, 3)), f"a.{suffix}")
    flipped_bits(path, decode, n=100, kind=UnreadableImage)


def test_not_an_image(tmp_path):
    (tmp_path / "a.jpg").write_text("<html>")
    assert "not allowed" in unreadable(tmp_path / "a.jpg")
    assert "No such file" in unreadable(tmp_path / "gone.jpg")


def test_decompression_bombs(tmp_path, monkeypatch):
    path = saved(tmp_path, Image.fromarray(COLOUR))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert "decompression bomb" in unreadable(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)  # up to twice this is only a warning
    assert "decompression bomb" in unreadable(path)  # these tests turn warnings into errors
    with pytest.warns(Image.DecompressionBombWarning):
        assert np.array_equal(decode(path), COLOUR)


def test_not_enough_memory(tmp_path, monkeypatch):
    def exhausted(*_):
        raise MemoryError

    monkeypatch.setattr(Image.Image, "convert", exhausted)
    assert "memory" in unreadable(saved(tmp_path, Image.fromarray(COLOUR)))


def test_without_pillow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(CasterError, match=r"pip install 'caster-tta\[images\]'"):
        decode(tmp_path / "a.jpg")


def test_decoding_in_several_threads(tmp_path):
    images = [noise(20, 20, 3) for _ in range(60)]
    paths = [
        saved(tmp_path, Image.fromarray(image), f"{i}.{('png', 'bmp', 'tif')[i % 3]}")
        for i, image in enumerate(images)
    ]
    with ThreadPoolExecutor(8) as pool:
        for image, expected in zip(pool.map(decode, paths * 3), images * 3, strict=True):
            assert np.array_equal(image, expected)


def test_pixels_equal_torchvisions(tmp_path):
    buffer = io.BytesIO()
    Image.fromarray(noise(30, 30, 3)).save(buffer, "JPEG")
    (tmp_path / "a.jpg").write_bytes(buffer.getvalue())
    expected = np.asarray(Image.open(buffer).convert("RGB"))  # its `pil_loader`
    assert np.array_equal(decode(tmp_path / "a.jpg"), expected)


# folders and lists


def fill(root: Path, *names: str) -> Path:
    """Save images under these names, each in its own colour."""
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


def test_one_folder_per_class(tree):
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
    assert "has no labels: give a folder with one folder per class" in rejection(
        tmp_path, labelled=True
    )


def test_a_flat_folder_is_listed_in_linear_time(tmp_path, monkeypatch):
    compared = []

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other):
            compared.append(1)
            return super().__eq__(other)

    names = [Name(f"{i}.png") for i in range(2000)]
    monkeypatch.setattr(image_files, "list_folder", lambda folder: names)
    assert len(open_images(tmp_path)) == len(names)
    assert len(compared) < 10 * len(names)


def test_images_next_to_class_folders(tree):
    fill(tree, "stray.png")
    message = rejection(tree)
    assert "both images (stray.png) and class folders (cat)" in message


def test_no_image_anywhere(tmp_path):
    assert "has no image" in rejection(tmp_path)
    (tmp_path / "cat").mkdir()
    (tmp_path / "notes.txt").touch()
    assert "has no image" in rejection(tmp_path)


def test_an_empty_class_is_a_class_and_rejected_if_labels_are_needed(tree):
    (tree / "bird").mkdir()
    (tree / "bird/notes.txt").touch()
    images = open_images(tree)
    assert images.classes.tolist() == ["bird", "cat", "dog"]
    assert images.labels.tolist() == ["cat", "cat", "dog", "dog"]
    assert "class folder bird of" in rejection(tree, labelled=True)


def test_links_are_followed_once(tree, tmp_path):
    (tree / "cat/elsewhere").symlink_to(fill(tmp_path / "elsewhere", "c.png"))
    assert "cat/elsewhere/c.png" in open_images(tree).names
    (tree / "cat/deep/up").symlink_to(tree / "cat")
    assert "a second time" in rejection(tree)


def test_a_broken_link_is_not_skipped(tree):
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
    assert "deep: Permission denied" in rejection(tree)
    monkeypatch.setattr(os, "listdir", denied(listdir, "tree"))
    assert "tree: Permission denied" in rejection(tree)


def test_an_unreadable_image_is_named(tree):
    (tree / "cat/z.jpg").write_bytes(b"")
    images = open_images(tree)
    with pytest.raises(UnreadableImage, match=r"cat/z\.jpg: it is empty"):
        images.read(0)
    assert images.read(1).shape == (4, 6, 3)


def test_digest_of_a_folder(tree, tmp_path):
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
    assert first != changed  # restoring the date does not restore the digest
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
    assert "has no labels" in rejection(listing, labelled=True)
    assert images.sha256 == open_images(listing).sha256
    listing.write_text(f"noending\nb.png\n{tmp_path}/shots/a.png\n")
    assert images.sha256 != open_images(listing).sha256  # cached features are in this order


def test_invalid_lists(listing):
    listing.write_text("b.png\n# no\nc.png\n")
    assert "line 3: there is no file c.png" in rejection(listing)
    listing.write_text("# nothing\n")
    assert "names no file" in rejection(listing)
    listing.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text" in rejection(listing)


def test_lists_that_cannot_be_opened(listing, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("caster.io.image_files.read_regular", denied)
    assert "list.txt: Permission denied" in rejection(listing)


def test_several_files(tmp_path, monkeypatch):
    monkeypatch.chdir(fill(tmp_path, "b.png", "a.png"))
    images = open_images([Path("b.png"), Path("a.png")])
    monkeypatch.chdir("/")
    assert images.name == "b.png and 1 more"
    assert list(images.names) == ["b.png", "a.png"]
    assert [int(images.read(i)[0, 0, 0]) for i in range(2)] == [0, 1]
    assert open_images(tmp_path / "b.png").names == (str(tmp_path / "b.png"),)
    assert "there is no file c.png" in rejection([tmp_path / "b.png", Path("c.png")])
    assert "is a folder" in rejection([tmp_path / "b.png", tmp_path])


def test_a_folder_in_several_threads(tmp_path):
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


def test_files_that_are_not_images_are_named(tree):
    (tree / "cat/deep/.cache").mkdir()
    (tree / "cat/x.heic").touch()
    images = open_images(tree)
    assert sorted(images.skipped) == [
        ".git/", "README.md", "cat/deep/.cache/", "cat/x.heic", "dog/.hidden.png", "dog/notes.txt",
    ]  # fmt: skip
    assert "x.heic" not in str(images.names)
    words = describe_skipped(images.skipped)
    assert words.startswith("skipped 6 files that are not images: .git/, README.md, cat/")
    assert "and 1 more; to read cat/x.heic: pip install pillow-heif" in words


def test_a_folder_without_images_names_its_files(tmp_path):
    (tmp_path / "clip.mp4").touch()
    assert "skipped 1 file that is not an image: clip.mp4" in rejection(tmp_path)


def test_heic_is_read_if_pillow_heif_is_installed(tmp_path, monkeypatch):
    plugin = SimpleNamespace(register_heif_opener=lambda: None)
    monkeypatch.setitem(sys.modules, "pillow_heif", plugin)
    formats.cache_clear()
    try:
        (tmp_path / "x.HEIC").touch()
        assert list(open_images(tmp_path).names) == ["x.HEIC"]
    finally:
        formats.cache_clear()
