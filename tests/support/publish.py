"""Small trees in the layouts of the publishers, as their own descriptions give them."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

from caster_bench.data.sets.names import class_names

WNIDS = class_names("imagenet")
CAT, GOLDFISH = "n02124075", "n01443537"


def jpeg(shade: int = 0) -> bytes:
    """An image of one shade of grey."""
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), shade, dtype=np.uint8)).save(file, "JPEG")
    return file.getvalue()


BLACK = jpeg()


def put(folder: Path, names: Iterable[str], content: bytes = BLACK) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def put_text(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def corrupted_arrays(root: Path, folder: str, corruptions: Iterable[str], each: int = 4) -> None:
    """An array a corruption: image i of severity s is all 10 * s + i."""
    (root / folder).mkdir(parents=True)
    shades = [10 * severity + i for severity in range(1, 6) for i in range(each)]
    pixels = np.repeat(np.array(shades, dtype=np.uint8), 32 * 32 * 3).reshape(-1, 32, 32, 3)
    for name in corruptions:
        np.save(root / folder / f"{name}.npy", pixels)
    labels = np.tile(np.array([3, 8, 0, 9, 6, 1])[:each], 5)
    np.save(root / folder / "labels.npy", labels.astype(np.uint8))


def class_folders(folder: Path, names: Iterable[str], each: int = 1, suffix: str = "JPEG") -> None:
    for name in names:
        put(folder / name, [f"{name}_{i}.{suffix}" for i in range(each)])


def tiny_imagenet(root: Path) -> None:
    """An image a class for training, three for validation; wnids.txt is in no order."""
    folder, wnids = root / "tiny-imagenet-200", class_names("tiny-imagenet")
    put_text(folder / "wnids.txt", reversed(wnids))
    for wnid in wnids:
        put(folder / "train" / wnid / "images", [f"{wnid}_0.JPEG"])
        put_text(folder / "train" / wnid / f"{wnid}_boxes.txt", [f"{wnid}_0.JPEG\t0\t10\t63\t58"])
    listed = {"val_0.JPEG": CAT, "val_1.JPEG": GOLDFISH, "val_2.JPEG": CAT}
    put(folder / "val/images", listed)
    put_text(
        folder / "val/val_annotations.txt", [f"{k}\t{v}\t0\t32\t44\t62" for k, v in listed.items()]
    )
    put(folder / "test/images", ["test_0.JPEG"])


def imagenet_validation(folder: Path, labels: Iterable[str]) -> dict[str, str]:
    """val as image-net.org packs it: one folder, numbered from 1."""
    listed = {f"ILSVRC2012_val_{i:08d}.JPEG": wnid for i, wnid in enumerate(labels, start=1)}
    put(folder / "val", listed)
    return listed


def solution(path: Path, listed: dict[str, str]) -> None:
    """Kaggle's listing, in another order than the files'."""
    rows = [f"{name.removesuffix('.JPEG')},{wnid} 85 1 499 272 " for name, wnid in listed.items()]
    put_text(path, ["ImageId,PredictionString", *reversed(rows)])


def devkit(folder: Path, labels: Iterable[str], wnids: list[str]) -> None:
    """The development kit: its numbers count `wnids` from 1, and inner synsets follow them."""
    rows = [*wnids, "n00001740"]
    synsets = np.array(
        [(i, wnid, "a word", "a gloss", 0) for i, wnid in enumerate(rows, start=1)],
        dtype=[
            ("ILSVRC2012_ID", object),
            ("WNID", object),
            ("words", object),
            ("gloss", object),
            ("num_children", object),
        ],
    ).reshape(-1, 1)
    data = folder / "ILSVRC2012_devkit_t12/data"
    data.mkdir(parents=True)
    savemat(data / "meta.mat", {"synsets": synsets})
    numbers = [str(wnids.index(wnid) + 1) for wnid in labels]
    put_text(data / "ILSVRC2012_validation_ground_truth.txt", numbers)


def dtd(root: Path) -> None:
    names = ["banded/banded_0002.jpg", "zigzagged/zigzagged_0001.jpg", "banded/banded_0009.jpg"]
    put(root / "dtd/images", names)
    for split, listed in {"train1": names[:1], "val1": names[1:2], "test10": names[1:]}.items():
        put_text(root / f"dtd/labels/{split}.txt", listed)


def food101(root: Path) -> None:
    names = ["apple_pie/1005649", "waffles/9", "apple_pie/7"]
    put(root / "food-101/images", [f"{name}.jpg" for name in names])
    put_text(root / "food-101/meta/train.txt", names[:2])
    put_text(root / "food-101/meta/test.txt", names[1:])
    put_text(root / "food-101/meta/classes.txt", ["apple_pie", "waffles"])


def flowers(root: Path) -> None:
    """Six images; their labels count from 1, and so do the numbers of the images."""
    folder = root / "flowers-102"
    put(folder / "jpg", [f"image_{i:05d}.jpg" for i in range(1, 7)])
    labels = np.array([[77, 1, 102, 5, 5, 1]], dtype=np.uint8)
    savemat(folder / "imagelabels.mat", {"labels": labels})
    splits = {"trnid": [[2, 1]], "valid": [[3]], "tstid": [[4, 5, 6]]}
    savemat(folder / "setid.mat", {k: np.array(v, dtype=np.uint16) for k, v in splits.items()})
