"""CIFAR and pets: the publishers' layouts in miniature, and the real files if present."""

from __future__ import annotations

import os
import pickle
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from caster import CasterError
from caster.io.images import open_images
from tests.support.image_files import noise, rejection
from tests.support.publish import TEN, pets, python_2_batch, python_2_string

PIXELS = {f"data_batch_{i}": noise(4, 32, 32, 3) for i in range(1, 6)}
PIXELS["test_batch"] = PIXELS["test"] = noise(4, 32, 32, 3)
PIXELS["train"] = noise(4, 32, 32, 3)
LABELS = [3, 8, 0, 9]


def rows(images: np.ndarray) -> np.ndarray:
    """CIFAR's rows, pixel by pixel from their description: red, then green, then blue."""
    expected = np.empty((len(images), 3072), dtype=np.uint8)
    for y in range(32):
        for x in range(32):
            for channel in range(3):
                expected[:, channel * 1024 + y * 32 + x] = images[:, y, x, channel]
    return expected


def python_2_names(key: bytes, names: list[str]) -> bytes:
    listed = b"".join(python_2_string(name.encode()) for name in names)
    return b"\x80\x02}q\x01" + python_2_string(key) + b"q\x02](" + listed + b"es."


def cifar10_files() -> list[str]:
    return [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def lay_out(root: Path, version: str) -> None:
    """Write one version of CIFAR-10 or CIFAR-100, four images per file."""
    folder = root / version
    folder.mkdir(parents=True)
    match version:
        case "cifar-10-batches-py":
            for file in cifar10_files():
                (folder / file).write_bytes(python_2_batch(rows(PIXELS[file]), LABELS))
            (folder / "batches.meta").write_bytes(python_2_names(b"label_names", TEN))
        case "cifar-10-batches-bin":
            for file in cifar10_files():
                records = np.column_stack([LABELS, rows(PIXELS[file])]).astype(np.uint8)
                (folder / f"{file}.bin").write_bytes(records.tobytes())
            (folder / "batches.meta.txt").write_text("\n".join(TEN) + "\n\n")
        case "cifar-100-python":  # as Python 3 writes it
            for file in ("train", "test"):
                batch = {b"data": rows(PIXELS[file]), b"fine_labels": LABELS}
                batch[b"coarse_labels"] = [1, 1, 1, 1]
                (folder / file).write_bytes(pickle.dumps(batch, protocol=4))
            meta = {"fine_label_names": TEN, "coarse_label_names": ["thing"]}
            (folder / "meta").write_bytes(pickle.dumps(meta, protocol=4))
        case "cifar-100-binary":
            for file in ("train", "test"):
                records = np.column_stack([[1] * 4, LABELS, rows(PIXELS[file])]).astype(np.uint8)
                (folder / f"{file}.bin").write_bytes(records.tobytes())
            (folder / "fine_label_names.txt").write_text("\n".join(TEN) + "\n")


VERSIONS = ["cifar-10-batches-py", "cifar-10-batches-bin", "cifar-100-python", "cifar-100-binary"]


@pytest.fixture(params=VERSIONS)
def version(request, tmp_path):
    lay_out(tmp_path, request.param)
    return request.param


def name_of(version: str) -> str:
    return "cifar100" if "100" in version else "cifar10"


def test_cifar(version, tmp_path):
    name = f"{name_of(version)}:test"
    images = open_images(name, tmp_path, labelled=True)
    assert images.name == name
    assert len(images) == 4
    assert images.names[2].endswith("[2]")
    assert images.classes.tolist() == TEN
    assert images.labels.tolist() == ["cat", "ship", "airplane", "truck"]
    assert not images.by_class
    for i in range(4):
        image = images.read(i)
        assert image.flags.c_contiguous
        assert np.array_equal(image, PIXELS["test"][i])


def test_cifar_train(version, tmp_path):
    images = open_images(f"{name_of(version)}:train", tmp_path)
    files = ["train"] if "100" in version else cifar10_files()[:5]
    expected = np.concatenate([PIXELS[file] for file in files])
    assert len(images) == len(expected)
    assert images.labels.tolist() == ["cat", "ship", "airplane", "truck"] * len(files)
    assert all(np.array_equal(images.read(i), expected[i]) for i in range(len(expected)))
    assert images.names[-1] in (
        "train[3]",
        "train.bin[3]",
        "data_batch_5[3]",
        "data_batch_5.bin[3]",
    )


def test_cifar_digest(version, tmp_path):
    name = f"{name_of(version)}:test"
    first = open_images(name, tmp_path).sha256
    assert first != open_images(name.replace("test", "train"), tmp_path).sha256
    assert first == open_images(name, tmp_path).sha256
    for path in (tmp_path / version).iterdir():
        os.utime(path, ns=(1, 1))
    assert first != open_images(name, tmp_path).sha256


def test_missing_files_are_named(version, tmp_path):
    folder = tmp_path / version
    for path in folder.iterdir():
        if "test" in path.name or "meta" in path.name or "names" in path.name:
            path.unlink()
    message = rejection(f"{name_of(version)}:test", tmp_path)
    expected = {
        "cifar-10-batches-py": "test_batch, batches.meta",
        "cifar-10-batches-bin": "test_batch.bin, batches.meta.txt",
        "cifar-100-python": "test, meta",
        "cifar-100-binary": "test.bin, fine_label_names.txt",
    }[version]
    assert f"is missing {expected} in {folder}: set CASTER_DATA or pass" in message
    shutil.rmtree(folder)
    message = rejection(f"{name_of(version)}:train", tmp_path)
    both = [v for v in VERSIONS if name_of(v) == name_of(version)]
    assert all(f"in {tmp_path / v}" in message for v in both)


def test_the_version_that_is_complete(tmp_path):
    lay_out(tmp_path, "cifar-10-batches-bin")
    (tmp_path / "cifar-10-batches-py").mkdir()
    assert open_images("cifar10:test", tmp_path).names[0] == "test_batch.bin[0]"


def test_damaged_records(tmp_path):
    lay_out(tmp_path, "cifar-10-batches-bin")
    folder = tmp_path / "cifar-10-batches-bin"
    content = (folder / "test_batch.bin").read_bytes()
    for short in (content[:-1], b""):
        (folder / "test_batch.bin").write_bytes(short)
        assert "not a multiple of 3073 bytes" in rejection("cifar10:test", tmp_path)
    (folder / "test_batch.bin").write_bytes(b"\x0a" + content[1:])
    assert "not one of the 10 classes" in rejection("cifar10:test", tmp_path)
    (folder / "batches.meta.txt").write_bytes(b"\xff")
    assert "not UTF-8 text" in rejection("cifar10:test", tmp_path)


def test_files_that_cannot_be_opened(tmp_path, monkeypatch):
    lay_out(tmp_path, "cifar-10-batches-bin")

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(np, "memmap", denied)
    assert "test_batch.bin: Permission denied" in rejection("cifar10:test", tmp_path)
    read_text = Path.read_text

    def denied_here(path, *arguments, **options):
        inside = path.is_relative_to(tmp_path)
        return (denied if inside else read_text)(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", denied_here)
    assert "batches.meta.txt: Permission denied" in rejection("cifar10:test", tmp_path)
    pets(tmp_path)
    assert "test.txt: Permission denied" in rejection("pets:test", tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("meta", {"label_names": 3}, "not a list of names"),
        ("meta", {"fine_label_names": [b"a", 3]}, "not a list of names"),
        ("meta", {"names": []}, "has no `label_names`"),
        ("meta", [], "has no `label_names`"),
        ("test", {"fine_labels": [1]}, "has no `data`"),
        ("test", {"data": noise(1, 3072)}, "has no `labels`"),
        ("test", {"data": noise(1, 3072), "labels": [1, 2]}, "3072 pixels for every label"),
        ("test", {"data": noise(1, 3071), "labels": [1]}, "3072 pixels for every label"),
        ("test", {"data": noise(1, 3072) / 2, "labels": [1]}, "3072 pixels for every label"),
        ("test", {"data": [1], "labels": [1]}, "3072 pixels for every label"),
        ("test", {"data": noise(1, 3072), "labels": ["cat"]}, "3072 pixels for every label"),
        ("test", {"data": noise(1, 3072), "labels": [10]}, "not one of the 10 classes"),
        ("test", {"data": noise(1, 3072), "labels": [-1]}, "not one of the 10 classes"),
        ("test", Path("x"), "it names 'pathlib"),
    ],
)
def test_pickles_with_other_content(tmp_path, file, content, message):
    lay_out(tmp_path, "cifar-100-python")
    path = tmp_path / "cifar-100-python" / file
    path.write_bytes(pickle.dumps(content))
    assert message in rejection("cifar100:test", tmp_path)
    assert str(path) in rejection("cifar100:test", tmp_path)


def test_pets(tmp_path):
    pets(tmp_path)
    images = open_images("pets:test", tmp_path, labelled=True)
    assert images.name == "pets:test"
    assert images.classes.tolist() == ["Abyssinian", "great_pyrenees", "Bombay"]
    assert images.labels.tolist() == ["Abyssinian", "Abyssinian", "great_pyrenees", "Bombay"]
    assert images.names[2] == "images/great_pyrenees_1.jpg"
    assert images.by_class
    assert [int(images.read(i)[0, 0, 0]) for i in range(4)] == [10, 10, 20, 30]


def test_pets_that_are_missing(tmp_path):
    assert "is missing annotations/trainval.txt in" in rejection("pets:trainval", tmp_path)
    pets(tmp_path, images=False)
    assert "is missing images/Abyssinian_100.jpg, images/Abyssinian_7.jpg" in rejection(
        "pets:test", tmp_path
    )
    pets(tmp_path, {f"pug_{i}": 1 for i in range(30)})
    assert "images/pug_7.jpg and 22 more in" in rejection("pets:test", tmp_path)


@pytest.mark.parametrize(
    "listed",
    [
        {"pug_1": 1, "beagle_1": 1},  # two breeds of one number
        {"pug_1": 1, "pug_2": 2},  # two numbers of one breed
        {"pug_1": 1, "beagle_1": 3},  # a gap
        {"pug_1": 0},
        {"pug_1": "one"},
    ],
)
def test_pets_that_are_damaged(tmp_path, listed):
    pets(tmp_path, listed)
    assert "test.txt is damaged" in rejection("pets:test", tmp_path)


@pytest.mark.parametrize("content", [b"", b"pug_1\n", b"\xff"])
def test_an_empty_or_damaged_listing(tmp_path, content):
    (pets(tmp_path) / "annotations/test.txt").write_bytes(content)
    assert "test.txt is damaged" in rejection("pets:test", tmp_path)


def test_where_the_root_comes_from(tmp_path, monkeypatch):
    pets(tmp_path / "data")
    monkeypatch.delenv("CASTER_DATA", raising=False)
    assert "set CASTER_DATA or pass" in rejection("pets:test")
    monkeypatch.setenv("CASTER_DATA", "")
    assert "set CASTER_DATA or pass" in rejection("pets:test")
    monkeypatch.setenv("CASTER_DATA", str(tmp_path / "data"))
    assert len(open_images("pets:test")) == 4
    monkeypatch.setenv("CASTER_DATA", str(tmp_path))
    assert len(open_images("pets:test", tmp_path / "data")) == 4


def test_splits(tmp_path):
    assert "cifar10 has several splits: choose cifar10:train or cifar10:test" in rejection(
        "cifar10"
    )
    assert "choose pets:trainval or pets:test" in rejection("pets:train", tmp_path)


REAL = os.environ.get("CASTER_DATA")
real = pytest.mark.skipif(not REAL, reason="CASTER_DATA names no folder with the published files")


def published(name: str):
    try:
        return open_images(name)
    except CasterError as error:
        if " is missing " in str(error):
            pytest.skip(str(error))
        raise


@real
@pytest.mark.parametrize(
    ("name", "size", "classes"),
    [
        ("cifar10:train", 50_000, 10),
        ("cifar10:test", 10_000, 10),
        ("cifar100:train", 50_000, 100),
        ("cifar100:test", 10_000, 100),
        ("cifar10-c:fog-3", 10_000, 10),
        ("cifar100-c:fog-3", 10_000, 100),
        ("tiny-imagenet:train", 100_000, 200),
        ("tiny-imagenet:val", 10_000, 200),
        ("imagenet:val", 50_000, 1_000),
        ("imagenet-v2:matched-frequency", 10_000, 1_000),
        ("pets:trainval", 3_680, 37),
        ("pets:test", 3_669, 37),
        ("dtd:test1", 1_880, 47),
        ("flowers102:val", 1_020, 102),
        ("food101:test", 25_250, 101),
        ("fashion-mnist:train", 60_000, 10),
        ("fashion-mnist:test", 10_000, 10),
    ],
)
def test_published(name, size, classes):
    images = published(name)
    assert len(images) == len(images.labels) == len(images.names) == size
    assert len(images.classes) == len(set(images.classes.tolist())) == classes
    if name.startswith(("cifar", "pets")):
        assert images.by_class == name.startswith("pets")
    counts = Counter(images.labels.tolist())
    if not name.startswith("pets"):
        assert set(counts.values()) == {size // classes}
    assert set(counts) == set(images.classes.tolist())
    for i in (0, size // 2, size - 1):
        image = images.read(i)
        assert image.dtype == np.uint8
        assert image.ndim == 3
        assert image.std() > 0


@real
def test_published_order_of_the_ten_classes():
    images = published("cifar10:test")
    assert images.classes.tolist() == TEN
    assert images.labels[:4].tolist() == ["cat", "ship", "ship", "airplane"]
    mean = np.mean([images.read(i) / 255 for i in range(len(images))], axis=(0, 1, 2))
    np.testing.assert_allclose(mean, [0.4942, 0.4851, 0.4504], atol=5e-5)  # known for the test set


@real
def test_published_breeds():
    images = published("pets:test")
    assert images.classes[[0, 1, 36]].tolist() == [
        "Abyssinian",
        "american_bulldog",
        "yorkshire_terrier",
    ]
    for name, label in zip(images.names, images.labels, strict=True):
        assert name.startswith(f"images/{label}_")
