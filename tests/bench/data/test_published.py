"""The sets' loaders, on small trees in the publishers' layouts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from caster import CasterError
from caster.io.images import open_images
from caster_bench.data.corruptions import CORRUPTIONS
from caster_bench.data.sets import SETS, find, open_set
from caster_bench.data.sets.published import ARCHIVE_FAMILIES, class_names, corrupted_splits
from caster_bench.engine.cell_settings import check_settings
from caster_bench.sweeps import read
from caster_bench.sweeps.spec import REPORTED
from tests.support import publish
from tests.support.image_files import rejection
from tests.support.publish import CAT, GOLDFISH, TEN, WNIDS

FIRST, SECOND = WNIDS[:2]
PACS = ["dog", "elephant", "giraffe", "guitar", "horse", "house", "person"]


@pytest.mark.parametrize("name", SETS)
def test_the_table_is_consistent(name):
    data = SETS[name]
    names = data.names()
    assert len(names) == len(set(names)) > 0
    assert data.page.startswith("http")
    assert data.licence
    for splits in data.splits:
        assert splits.images > 0
        if splits.balanced:
            assert splits.images % (data.classes_present or data.classes) == 0
        assert splits.pattern or len(splits.names) <= 4
    for layout in data.layouts:
        needed = {file for split in names for file in layout.needs(split)}
        assert set(layout.md5) <= needed
    for archive in data.archives:
        kind, _, digest = archive.digest.partition(":")
        assert len(digest) == {"md5": 32, "sha256": 64}[kind]
        assert int(digest, 16) > 0
        assert archive.url.startswith("http")
        assert archive.digest_source
        assert set(archive.splits) <= set(names)
        assert archive.size is None or archive.size > 100
    served = {s for archive in data.archives for s in archive.splits or names}
    assert served in (set(), set(names))


SIZES = {  # as the publishers count them: (images of each split, classes)
    "cifar10": ({"train": 50_000, "test": 10_000}, 10),
    "cifar100": ({"train": 50_000, "test": 10_000}, 100),
    "cifar10-c": (dict.fromkeys(corrupted_splits(), 10_000), 10),
    "cifar100-c": (dict.fromkeys(corrupted_splits(), 10_000), 100),
    "tiny-imagenet": ({"train": 100_000, "val": 10_000}, 200),
    "tiny-imagenet-c": (dict.fromkeys(corrupted_splits(), 10_000), 200),
    "imagenet": ({"train": 1_281_167, "val": 50_000}, 1_000),
    "imagenet-c": (dict.fromkeys(corrupted_splits(), 50_000), 1_000),
    "imagenet-v2": (
        {"matched-frequency": 10_000, "threshold-0.7": 10_000, "top-images": 10_000},
        1_000,
    ),
    "imagenet-r": ({"test": 30_000}, 200),
    "imagenet-a": ({"test": 7_500}, 200),
    "imagenet-sketch": ({"test": 50_889}, 1_000),
    "pets": ({"trainval": 3_680, "test": 3_669}, 37),
    "dtd": ({f"{x}{i}": 1_880 for x in ("train", "val", "test") for i in range(1, 11)}, 47),
    "flowers102": ({"train": 1_020, "val": 1_020, "test": 6_149}, 102),
    "food101": ({"train": 75_750, "test": 25_250}, 101),
    "fashion-mnist": ({"train": 60_000, "test": 10_000}, 10),
    "pacs": ({"art_painting": 2_048, "cartoon": 2_344, "photo": 1_670, "sketch": 3_929}, 7),
    "office-home": ({"art": 2_427, "clipart": 4_365, "product": 4_439, "real-world": 4_357}, 65),
}


def test_sizes():
    found = {
        name: (
            {split: data.group(split).images for split in data.names()},
            data.classes_present or data.classes,
        )
        for name, data in SETS.items()
    }
    assert found == SIZES
    assert {name for name, data in SETS.items() if data.classes_present} == {
        "imagenet-r",
        "imagenet-a",
    }
    uneven = {
        f"{name}:{split}"
        for name, data in SETS.items()
        for split in data.names()
        if not data.group(split).balanced
    }
    assert uneven == {
        *("imagenet:train", "imagenet-r:test", "imagenet-a:test", "imagenet-sketch:test"),
        *("pets:trainval", "pets:test", "flowers102:test"),
        *(f"{name}:{split}" for name in ("pacs", "office-home") for split in SIZES[name][0]),
    }


def test_the_corruptions_are_the_nineteen():
    assert {name for group in ARCHIVE_FAMILIES.values() for name in group} == set(CORRUPTIONS)
    assert len(set(corrupted_splits())) == 95


def test_lists_of_classes():
    assert len(set(WNIDS)) == 1000
    assert list(WNIDS) == sorted(WNIDS)
    assert [WNIDS[i] for i in (0, 1, 207, 999)] == [
        "n01440764",  # tench
        "n01443537",  # goldfish
        "n02099601",  # golden retriever
        "n15075141",  # toilet tissue
    ]
    for letter, first in (("r", "n01443537"), ("a", "n01498041")):
        names = class_names(f"imagenet-{letter}")
        assert len(names) == 200
        assert list(names) == sorted(names)
        assert set(names) < set(WNIDS)
        assert names[0] == first
    tiny = class_names("tiny-imagenet")
    assert len(set(tiny)) == 200
    assert list(tiny) == sorted(tiny)
    assert set(tiny) < set(WNIDS)
    assert [tiny[i] for i in (0, 32, 199)] == ["n01443537", "n02124075", "n12267677"]
    home = class_names("office-home")
    assert len(set(home)) == 65
    assert list(home) == sorted(home)  # as ImageFolder does: capitals before small letters
    assert [home[i] for i in (0, 58, 59, 64)] == ["Alarm_Clock", "TV", "Table", "Webcam"]
    assert class_names("cifar10") == tuple(TEN)
    hundred = class_names("cifar100")
    assert len(hundred) == 100
    assert list(hundred) == sorted(hundred)
    flowers = class_names("flowers102")
    assert len(set(flowers)) == 102
    assert (flowers[0], flowers[76], flowers[101]) == (
        "pink primrose",
        "passion flower",
        "blackberry lily",
    )


@pytest.mark.parametrize(
    ("name", "folder"), [("cifar10", "CIFAR-10-C"), ("cifar100", "CIFAR-100-C")]
)
def test_corrupted_arrays(tmp_path, name, folder):
    publish.corrupted_arrays(tmp_path, folder, ["fog", "zoom_blur"])
    for severity in range(1, 6):
        images = open_images(f"{name}-c:fog-{severity}", tmp_path, labelled=True)
        assert len(images) == 4
        shades = [10 * severity + i for i in range(4)]
        assert [int(images.read(i).mean()) for i in range(4)] == shades
        assert images.read(0).shape == (32, 32, 3)
        assert images.labels.tolist() == [class_names(name)[i] for i in (3, 8, 0, 9)]
        assert images.classes.tolist() == list(class_names(name))
        assert images.names[0] == f"fog.npy[{4 * (severity - 1)}]"
        assert not images.by_class


def test_a_read_image_is_a_copy(tmp_path):
    publish.corrupted_arrays(tmp_path, "CIFAR-10-C", ["fog"])
    images = open_set("cifar10-c:fog-1", tmp_path)
    image = images.read(0)
    image[:] = 255
    assert images.read(0).max() == 10
    with pytest.raises(IndexError):  # of the next severity
        images.read(4)


def test_every_severity_has_its_own_digest(tmp_path):
    """Features are cached by digest, and one file has all five severities."""
    publish.corrupted_arrays(tmp_path, "CIFAR-10-C", ["fog", "snow"])
    names = [f"cifar10-c:{c}-{s}" for c in ("fog", "snow") for s in range(1, 6)]
    digests = [open_set(name, tmp_path).sha256 for name in names]
    assert len(set(digests)) == 10
    assert digests == [open_set(name, tmp_path).sha256 for name in names]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("fog.npy", np.zeros((20, 32, 32, 3)), "is not uint8 (N, H, W, 3)"),
        ("fog.npy", np.zeros((20, 3, 32, 32), np.uint8), "is not uint8 (N, H, W, 3)"),
        ("fog.npy", np.zeros((19, 32, 32, 3), np.uint8), "does not have a label for every image"),
        ("labels.npy", np.zeros(20), "does not have a label for every image"),
        ("labels.npy", np.full(20, 10), "a label is not one of the 10 classes"),
        ("labels.npy", np.full(20, -1), "a label is not one of the 10 classes"),
        ("labels.npy", b"", "truncated, damaged or not a .npy file"),
        ("fog.npy", b"\x93NUMPY", "truncated, damaged or not a .npy file"),
        ("fog.npy", slice(-1), "truncated, damaged or not a .npy file"),
        ("labels.npy", np.array([{}] * 20), "truncated, damaged or not a .npy file"),
    ],
)
def test_arrays_that_are_damaged(tmp_path, file, content, message):
    publish.corrupted_arrays(tmp_path, "CIFAR-10-C", ["fog"])
    path = tmp_path / "CIFAR-10-C" / file
    if isinstance(content, np.ndarray):
        np.save(path, content, allow_pickle=True)
    else:
        path.write_bytes(path.read_bytes()[content] if isinstance(content, slice) else content)
    error = rejection("cifar10-c:fog-3", tmp_path)
    assert message in error
    assert str(tmp_path / "CIFAR-10-C") in error


def test_arrays_that_are_not_five_severities(tmp_path):
    publish.corrupted_arrays(tmp_path, "CIFAR-10-C", ["fog"])
    folder = tmp_path / "CIFAR-10-C"
    np.save(folder / "fog.npy", np.zeros((19, 32, 32, 3), np.uint8))
    np.save(folder / "labels.npy", np.zeros(19, np.uint8))
    assert "has 19 images: not five severities" in rejection("cifar10-c:fog-1", tmp_path)


def test_tiny_imagenet(tmp_path):
    publish.tiny_imagenet(tmp_path)
    tiny = class_names("tiny-imagenet")
    train = open_set("tiny-imagenet:train", tmp_path)
    assert train.labels.tolist() == train.classes.tolist() == list(tiny)
    assert train.names[0] == f"train/{GOLDFISH}/images/{GOLDFISH}_0.JPEG"
    val = open_set("tiny-imagenet:val", tmp_path)
    assert val.classes.tolist() == list(tiny)
    assert val.labels.tolist() == [CAT, GOLDFISH, CAT]
    assert val.names == tuple(f"val/images/val_{i}.JPEG" for i in range(3))
    assert val.read(0).shape == (8, 8, 3)


def test_tiny_imagenet_that_is_damaged(tmp_path):
    publish.tiny_imagenet(tmp_path)
    listing = tmp_path / "tiny-imagenet-200/val/val_annotations.txt"
    (tmp_path / "tiny-imagenet-200/val/images/val_1.JPEG").unlink()
    assert "is missing val/images/val_1.JPEG in" in rejection("tiny-imagenet:val", tmp_path)
    publish.put_text(listing, ["val_0.JPEG\tn00000000\t0"])
    assert "'n00000000' is not one of the 200 classes" in rejection("tiny-imagenet:val", tmp_path)
    publish.put_text(listing, ["val_0.JPEG n01443537"])
    assert "val_annotations.txt is damaged" in rejection("tiny-imagenet:val", tmp_path)


def test_tiny_imagenet_c(tmp_path):
    """A missing class folder would renumber all later classes."""
    tiny = class_names("tiny-imagenet")
    publish.class_folders(tmp_path / "Tiny-ImageNet-C/fog/3", tiny, 2)
    images = open_set("tiny-imagenet-c:fog-3", tmp_path)
    assert images.classes.tolist() == list(tiny)
    assert images.labels.tolist() == [wnid for wnid in tiny for _ in range(2)]
    shutil.rmtree(tmp_path / "Tiny-ImageNet-C/fog/3" / CAT)
    assert f"is missing fog/3/{CAT}/* in" in rejection("tiny-imagenet-c:fog-3", tmp_path)
    assert "is missing fog/4/ in" in rejection("tiny-imagenet-c:fog-4", tmp_path)
    (tmp_path / "Tiny-ImageNet-C/fog/4").mkdir()
    assert f"is missing fog/4/{GOLDFISH}/*, " in rejection("tiny-imagenet-c:fog-4", tmp_path)


@pytest.fixture(scope="module")
def thousand(tmp_path_factory):
    root = tmp_path_factory.mktemp("thousand")
    publish.class_folders(root / "imagenet/train", WNIDS)
    publish.class_folders(root / "imagenet/val", WNIDS)
    publish.class_folders(root / "sketch", WNIDS)
    return root


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("imagenet:train", "train/"),
        ("imagenet:val", "val/"),
        ("imagenet-sketch:test", "sketch/"),
        ("imagenet-sketch", "sketch/"),
    ],
)
def test_a_thousand_class_folders(thousand, name, where):
    images = open_set(name, thousand)
    assert images.labels.tolist() == images.classes.tolist() == list(WNIDS)
    assert images.names[7] == f"{where}{WNIDS[7]}/{WNIDS[7]}_0.JPEG"
    assert images.read(999).max() == 0


def test_class_folders_that_are_missing_or_strange(tmp_path):
    publish.class_folders(tmp_path / "ImageNet-C/fog/3", WNIDS[12:])
    (tmp_path / "ImageNet-C/fog/3" / FIRST).mkdir()  # without an image
    error = rejection("imagenet-c:fog-3", tmp_path)
    assert f"is missing fog/3/{FIRST}/*, fog/3/{SECOND}/*" in error
    assert "and 4 more in" in error
    publish.class_folders(tmp_path / "ImageNet-C/fog/3", ["dogs"])
    assert "has the folder dogs, which is not a class of" in rejection("imagenet-c:fog-3", tmp_path)


def test_imagenet_c(tmp_path):
    """Files have the names of ImageNet's val, as its publishers wrote them."""
    for wnid in WNIDS:
        publish.put(tmp_path / "ImageNet-C/fog/5" / wnid, ["ILSVRC2012_val_00000001.JPEG"])
    images = open_set("imagenet-c:fog-5", tmp_path)
    assert images.labels.tolist() == images.classes.tolist() == list(WNIDS)
    assert images.names[7] == f"fog/5/{WNIDS[7]}/ILSVRC2012_val_00000001.JPEG"


def test_imagenet_v2_folders_are_numbers(tmp_path):
    """Folder 2 is the third class: sorted as text it would be the 112th."""
    folder = tmp_path / "imagenetv2-threshold0.7-format-val"
    publish.class_folders(folder, map(str, range(1000)), suffix="jpeg")
    images = open_set("imagenet-v2:threshold-0.7", tmp_path)
    assert images.labels.tolist() == images.classes.tolist() == list(WNIDS)
    assert images.names[2] == f"{folder.name}/2/2_0.jpeg"
    assert "is missing imagenetv2-top-images-format-val/" in rejection(
        "imagenet-v2:top-images", tmp_path
    )


@pytest.mark.parametrize("letter", ["r", "a"])
def test_subsets_are_mapped_into_the_thousand(tmp_path, letter):
    name = f"imagenet-{letter}"
    publish.class_folders(tmp_path / name, class_names(name), suffix="jpg")
    publish.put_text(tmp_path / name / "README.txt", ["about"])
    images = open_set(name, tmp_path)
    assert images.name == f"{name}:test"
    assert images.classes.tolist() == list(WNIDS)
    assert images.labels.tolist() == list(class_names(name))


def test_flat_validation_with_kaggles_listing(tmp_path):
    labels = [SECOND, FIRST, SECOND]
    folder = tmp_path / "ILSVRC/Data/CLS-LOC"
    listed = publish.imagenet_validation(folder, labels)
    assert "put LOC_val_solution.csv" in rejection("imagenet:val", tmp_path)
    publish.solution(tmp_path / "LOC_val_solution.csv", listed)
    images = open_set("imagenet:val", tmp_path)
    assert images.labels.tolist() == labels
    assert images.classes.tolist() == list(WNIDS)
    assert images.names == tuple(f"val/{name}" for name in listed)
    (folder / "val/ILSVRC2012_val_00000002.JPEG").unlink()
    assert "is missing val/ILSVRC2012_val_00000002.JPEG in" in rejection("imagenet:val", tmp_path)


def test_flat_validation_with_the_development_kit(tmp_path):
    labels = [SECOND, FIRST, SECOND, WNIDS[500]]
    publish.imagenet_validation(tmp_path / "imagenet", labels)
    numbered = [WNIDS[500], SECOND, FIRST]  # the kit's numbers are in no order
    publish.devkit(tmp_path / "imagenet", labels, numbered)
    images = open_set("imagenet:val", tmp_path)
    assert images.labels.tolist() == labels
    assert images.classes.tolist() == list(WNIDS)
    truth = tmp_path / "imagenet/ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"
    for wrong in (["1", "9"], ["one"]):
        publish.put_text(truth, wrong)
        assert "ILSVRC2012_devkit_t12 is damaged" in rejection("imagenet:val", tmp_path)
    (truth.parent / "meta.mat").write_bytes(b"no such thing" * 20)
    assert "meta.mat is damaged" in rejection("imagenet:val", tmp_path)


@pytest.mark.parametrize("rows", [["a,b"], ["ImageId,PredictionString", "x,"], []])
def test_kaggles_listing_that_is_damaged(tmp_path, rows):
    publish.imagenet_validation(tmp_path / "imagenet", [FIRST])
    publish.put_text(tmp_path / "imagenet/LOC_val_solution.csv", rows)
    assert "LOC_val_solution.csv is damaged" in rejection("imagenet:val", tmp_path)


def test_dtd(tmp_path):
    publish.dtd(tmp_path)
    images = open_set("dtd:test10", tmp_path)
    assert images.labels.tolist() == ["zigzagged", "banded"]
    assert images.classes.tolist() == ["banded", "zigzagged"]
    assert images.names[0] == "images/zigzagged/zigzagged_0001.jpg"
    assert "is missing labels/test2.txt in" in rejection("dtd:test2", tmp_path)


def test_food101(tmp_path):
    publish.food101(tmp_path)
    images = open_set("food101:test", tmp_path)
    assert images.labels.tolist() == ["waffles", "apple_pie"]
    assert images.classes.tolist() == ["apple_pie", "waffles"]
    assert images.names == ("images/waffles/9.jpg", "images/apple_pie/7.jpg")
    (tmp_path / "food-101/images/waffles/9.jpg").unlink()
    assert "is missing images/waffles/9.jpg in" in rejection("food101:test", tmp_path)


@pytest.mark.parametrize("line", ["waffles", "../../etc/passwd", "/x", "x/", "a/b/c", "../x"])
def test_lists_that_are_damaged(tmp_path, line):
    publish.food101(tmp_path)
    publish.put_text(tmp_path / "food-101/meta/test.txt", [line])
    assert "meta/test.txt is damaged" in rejection("food101:test", tmp_path)


def test_flowers(tmp_path):
    publish.flowers(tmp_path)
    train = open_set("flowers102:train", tmp_path)
    assert train.names == ("jpg/image_00002.jpg", "jpg/image_00001.jpg")
    assert train.labels.tolist() == ["pink primrose", "passion flower"]
    assert train.classes.tolist() == list(class_names("flowers102"))
    assert open_set("flowers102:val", tmp_path).labels.tolist() == ["blackberry lily"]
    test = open_set("flowers102:test", tmp_path)
    assert test.labels.tolist() == ["english marigold", "english marigold", "pink primrose"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("setid.mat", {"trnid": [[7]]}, "images that have no label"),
        ("setid.mat", {"trnid": [[0]]}, "images that have no label"),
        ("setid.mat", {"valid": [[1]]}, "has no `trnid`"),
        ("imagelabels.mat", {"labels": [[103] * 6]}, "not from 1 to 102"),
        ("imagelabels.mat", {"labels": [[0] * 6]}, "not from 1 to 102"),
        ("imagelabels.mat", {"labels": [[0.5] * 6]}, "not a list of integers"),
        ("imagelabels.mat", None, "not a file of MATLAB"),
    ],
)
def test_flowers_that_are_damaged(tmp_path, file, content, message):
    from scipy.io import savemat

    publish.flowers(tmp_path)
    path = tmp_path / "flowers-102" / file
    if content is None:
        path.write_bytes(b"\x00" * 3)
    else:
        savemat(path, {k: np.array(v) for k, v in content.items()})
    error = rejection("flowers102:train", tmp_path)
    assert message in error
    assert str(path) in error


@pytest.mark.parametrize("folder", ["PACS", "PACS/kfold", "pacs_data"])
def test_pacs(tmp_path, folder):
    publish.class_folders(tmp_path / folder / "sketch", PACS, 2, "png")
    images = open_set("pacs:sketch", tmp_path)
    assert images.classes.tolist() == PACS
    assert images.labels.tolist() == [c for c in PACS for _ in range(2)]
    assert "is missing photo/ in" in rejection("pacs:photo", tmp_path)


STYLES = {
    "art": "Art",
    "clipart": "Clipart",
    "product": "Product",
    "real-world": "Real World",
}


@pytest.mark.parametrize("folder", ["OfficeHomeDataset_10072016", "office_home"])
@pytest.mark.parametrize("split", STYLES)
def test_office_home(tmp_path, folder, split):
    classes = class_names("office-home")
    publish.class_folders(tmp_path / folder / STYLES[split], classes, suffix="jpg")
    images = open_set(f"office-home:{split}", tmp_path)
    assert images.classes.tolist() == images.labels.tolist() == list(classes)
    shutil.rmtree(tmp_path / folder / STYLES[split] / "Mug")
    assert f"is missing {STYLES[split]}/Mug/* in" in rejection(f"office-home:{split}", tmp_path)


@pytest.fixture(scope="module")
def every_set(thousand, tmp_path_factory):
    """Miniatures of all sets that the sweep on published files names, with one corruption."""
    root = tmp_path_factory.mktemp("every")
    for name in ("imagenet", "sketch"):
        (root / name).symlink_to(thousand / name)
    publish.dtd(root)
    publish.food101(root)
    publish.flowers(root)
    publish.tiny_imagenet(root)
    publish.class_folders(root / "ImageNet-C/fog/5", WNIDS)
    folder = root / "imagenetv2-matched-frequency-format-val"
    publish.class_folders(folder, map(str, range(1000)), suffix="jpeg")
    publish.class_folders(root / "imagenet-r", class_names("imagenet-r"), suffix="jpg")
    for style in ("art_painting", "cartoon", "photo", "sketch"):
        publish.class_folders(root / "PACS" / style, PACS, suffix="png")
    for style in STYLES.values():
        folder = root / "OfficeHomeDataset_10072016" / style
        publish.class_folders(folder, class_names("office-home"), suffix="jpg")
    return root


def test_the_sweep_on_published_files_opens_every_set(every_set):
    """Source and target have the same classes, and their images can be read."""
    sweep = read(Path(__file__).parents[3] / "reproduction" / "sweeps" / "published.toml")
    check_settings(sweep)
    names = {name for data in sweep.data.values() for name in (data.source, data.target)}
    opened = {}
    for name in names:
        data, _, split = name.partition(":")
        assert find(name)[2] == [split]
        made = data != "pets" and (data != "imagenet-c" or split == "fog-5")  # pets: test_sets
        if made:
            opened[name] = open_set(name, every_set)
    wanted = {"flowers102", "dtd", "food101", "tiny-imagenet", "imagenet-v2", "imagenet-r"}
    wanted |= {"imagenet-sketch", "imagenet-c", "pacs", "office-home", "imagenet"}
    assert {name.partition(":")[0] for name in opened} == wanted
    for data in sweep.data.values():
        if data.source in opened and data.target in opened:
            source, target = opened[data.source], opened[data.target]
            assert source.classes.tolist() == target.classes.tolist(), data.name
            assert set(target.labels.tolist()) <= set(source.classes.tolist())
            assert source.read(0).ndim == target.read(0).ndim == 3
    corruptions = {data.target for data in sweep.data.values() if "imagenet-c:" in data.target}
    assert corruptions == {f"imagenet-c:{name}-5" for name in REPORTED}


def test_no_image_is_read_to_open_a_set(tmp_path, monkeypatch):
    publish.food101(tmp_path)
    publish.put(tmp_path / "food-101/images", ["waffles/9.jpg"], b"no image")
    monkeypatch.setattr("caster.io.image_files.decode", lambda path: pytest.fail("decoded"))
    assert len(open_set("food101:test", tmp_path)) == 2


def test_names():
    assert find("cifar10-c")[2] == list(corrupted_splits())
    for name, message in {
        "cifar10-c:fgo-3": "choose cifar10-c:CORRUPTION-SEVERITY, such as cifar10-c:brightness-1",
        "cifar10-c": "such as cifar10-c:brightness-1",
        "imagenet:test": "choose imagenet:train or imagenet:val",
        "imagenet": "choose imagenet:train or imagenet:val",
        "dtd:train": "choose dtd:train1 to test10, such as dtd:train1",
    }.items():
        with pytest.raises(CasterError, match=r"has (no split|several splits)") as caught:
            open_set(name, Path())
        assert message in str(caught.value)
    with pytest.raises(CasterError, match="there is no set 'mnist': choose from cifar10, "):
        find("mnist:test")


def test_what_to_do_about_a_missing_set(tmp_path):
    assert "or run `caster data get imagenet-r`" in rejection("imagenet-r", tmp_path)
    assert "or get it from https://image-net.org" in rejection("imagenet:val", tmp_path)


REAL = os.environ.get("CASTER_DATA")


@pytest.mark.skipif(not REAL, reason="CASTER_DATA names no folder with the published files")
def test_real_validation_images_have_the_thousand_classes():
    folder = Path(str(REAL), "imagenet-val5k")
    if not folder.exists():
        pytest.skip("CASTER_DATA has no imagenet-val5k")
    assert open_images(folder).classes.tolist() == list(WNIDS)
