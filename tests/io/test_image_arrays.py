"""Images in .npz files."""

from __future__ import annotations

import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import numpy as np
import pytest

from caster.io.feature_files import NpzFile
from caster.io.images import open_images
from tests.support.image_files import noise, rejection
from tests.support.messages import flipped_bits

IMAGES = noise(12, 6, 5, 3)
LABELS = np.array(["dog", "cat", "cow"] * 4)


@pytest.fixture(params=[np.savez, np.savez_compressed])
def save(request, tmp_path):
    def save(**members):
        request.param(tmp_path / "images.npz", **members)
        return tmp_path / "images.npz"

    return save


def test_images_and_labels(save):
    path = save(images=IMAGES, labels=LABELS)
    images = open_images(path, labelled=True)
    assert images.name == str(path)
    assert len(images) == 12
    assert images.names[7] == "images.npz[7]"
    assert np.array_equal(images.labels, LABELS)
    assert images.classes.tolist() == ["cat", "cow", "dog"]
    assert not images.by_class
    for i in (7, 0, 11, -1):
        image = images.read(i)
        assert type(image) is np.ndarray
        assert np.array_equal(image, IMAGES[i])
    with pytest.raises(IndexError):
        images.read(12)


def test_without_labels(save):
    path = save(images=IMAGES)
    assert open_images(path).labels is None
    assert open_images(path).classes is None
    assert "an .npz file with `labels`" in rejection(path, labelled=True)
    assert open_images(save(images=IMAGES, classes=["a", "b"])).classes.tolist() == ["a", "b"]


def test_grey(save):
    grey = noise(4, 6, 5)
    image = open_images(save(images=grey)).read(2)
    assert np.array_equal(image, np.stack([grey[2]] * 3, axis=2))


def test_sorted_by_class(save):
    assert open_images(save(images=IMAGES, labels=np.sort(LABELS))).by_class
    assert not open_images(save(images=IMAGES, labels=np.arange(12))).by_class
    assert open_images(save(images=IMAGES, labels=np.zeros(12, dtype=int))).by_class


def test_classes_in_their_own_order(save):
    classes = np.array(["dog", "cat", "cow"])
    by_index = open_images(save(images=IMAGES, labels=[0, 1, 2] * 4, classes=classes))
    by_name = open_images(save(images=IMAGES, labels=LABELS, classes=classes))
    for images in (by_index, by_name):
        assert images.classes.tolist() == ["dog", "cat", "cow"]
        assert np.array_equal(images.labels, LABELS)


def test_integer_labels_without_names(save):
    images = open_images(save(images=IMAGES, labels=[3, 1, 2] * 4))
    assert images.classes.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"pixels": IMAGES}, "has no `images` (it has pixels)"),
        ({"images": IMAGES / 255}, "is float64: save pixels from 0 to 255 as uint8"),
        ({"images": IMAGES.transpose(0, 3, 1, 2).copy()}, "transpose(0, 2, 3, 1)"),
        ({"images": IMAGES[0]}, "one image of shape (6, 5, 3)"),
        ({"images": IMAGES[..., :2]}, "has shape (12, 6, 5, 2)"),
        ({"images": IMAGES[0, 0, 0]}, "has shape (3,)"),
        ({"images": IMAGES[:0]}, "no image in it"),
        ({"images": IMAGES[:, :0]}, "no image in it"),
        ({"images": np.asfortranarray(IMAGES)}, "ascontiguousarray"),
        ({"images": IMAGES, "labels": LABELS[:-1]}, "12 images and 11 labels"),
        ({"images": IMAGES, "labels": np.eye(12)}, "`labels` in"),
        ({"images": IMAGES, "labels": LABELS.astype("S")}, "use numbers or text"),
        ({"images": IMAGES, "labels": LABELS, "classes": ["cat", "dog"]}, "label 'cow' is not"),
        ({"images": IMAGES, "labels": [0, 1, 2] * 4, "classes": ["a", "b"]}, "label 2 in"),
        ({"images": IMAGES, "labels": [0, -1] * 6, "classes": ["a", "b"]}, "label -1 in"),
        ({"images": IMAGES, "classes": ["a", "a"]}, "a class twice"),
    ],
)
def test_rejected(save, members, message):
    assert message in rejection(save(**members))


def test_python_objects_are_never_unpickled(save):
    labels = np.array([1, "x"] * 6, dtype=object)
    assert "never unpickles" in rejection(save(images=IMAGES, labels=labels))
    assert "never unpickles" in rejection(save(images=IMAGES.astype(object)))


def test_uncompressed_images_are_mapped_and_compressed_ones_loaded_once(tmp_path):
    np.savez(tmp_path / "stored.npz", images=IMAGES)
    np.savez_compressed(tmp_path / "compressed.npz", images=IMAGES)
    with patch.object(NpzFile, "read", autospec=True, side_effect=NpzFile.read) as loaded:
        stored = open_images(tmp_path / "stored.npz")
        compressed = open_images(tmp_path / "compressed.npz")
        assert np.array_equal(stored.read(3), IMAGES[3])
        loaded.assert_not_called()
        with ThreadPoolExecutor(8) as pool:
            read = list(pool.map(compressed.read, list(range(12)) * 5))
        loaded.assert_called_once()
    assert np.array_equal(read, np.concatenate([IMAGES] * 5))


def test_a_stored_member_behind_others_and_a_long_header(tmp_path):
    """The local header may be longer than the central directory says."""
    np.savez(tmp_path / "plain.npz", images=IMAGES)
    with (
        zipfile.ZipFile(tmp_path / "plain.npz") as plain,
        zipfile.ZipFile(tmp_path / "images.npz", "w") as archive,
    ):
        archive.writestr("readme.txt", "not an array")
        info = zipfile.ZipInfo("images.npy")
        info.extra = b"\xfe\xca\x04\x00abcd"
        archive.writestr(info, plain.read("images.npy"))
    assert np.array_equal(open_images(tmp_path / "images.npz").read(11), IMAGES[11])


def test_damage(save):
    path = save(images=noise(40, 30, 30, 3), labels=np.arange(40))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert "truncated, damaged" in rejection(path)


@pytest.mark.slow
def test_a_file_with_a_flipped_bit_is_read_or_rejected_in_one_line(save):
    path = save(images=IMAGES, labels=LABELS)
    assert len(flipped_bits(path, lambda path: open_images(path).read(0))) > 20


def test_a_header_that_states_more_than_there_is(tmp_path):
    np.savez(tmp_path / "plain.npz", images=IMAGES)
    with (
        zipfile.ZipFile(tmp_path / "plain.npz") as plain,
        zipfile.ZipFile(tmp_path / "images.npz", "w") as archive,
    ):
        archive.writestr("images.npy", plain.read("images.npy")[:-1])
    assert "does not have the size" in rejection(tmp_path / "images.npz")


def test_digest(save):
    path = save(images=IMAGES)
    first = open_images(path).sha256
    stat = path.stat()
    assert open_images(path).sha256 == first
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert open_images(path).sha256 != first
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    path.rename(path.with_name("other.npz"))
    assert open_images(path.with_name("other.npz")).sha256 != first
