"""Small trees in the publishers' layouts, written from their own descriptions."""

from __future__ import annotations

import hashlib
import io
import struct
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

from caster_bench.data.sets.published import class_names

WNIDS = class_names("imagenet")
CAT, GOLDFISH = "n02124075", "n01443537"
TEN = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


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
    splits = {"train1": names[:2], "val1": names[1:2], "test1": names[1:], "test10": names[1:]}
    for split, listed in splits.items():
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


def md5(content: bytes) -> str:
    return "md5:" + hashlib.md5(content, usedforsecurity=False).hexdigest()


def tar(files: dict[str, bytes], mode: str = "w:gz", extra: list[tarfile.TarInfo] | None = None):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as archive:
        for info in extra or []:
            archive.addfile(info)
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def zipped(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return packed.getvalue()


def python_2_string(content: bytes) -> bytes:
    if len(content) < 256:
        return b"U" + bytes([len(content)]) + content
    return b"T" + struct.pack("<i", len(content)) + content


def python_2_batch(pixels: np.ndarray, labels: list[int], key: bytes = b"labels") -> bytes:
    """What cPickle of Python 2 and NumPy 1 wrote: protocol 2, text as bytes, memo from 1."""
    rows = struct.pack("<H", len(pixels))
    return b"".join(
        [
            b"\x80\x02}q\x01(",
            python_2_string(b"batch_label") + b"q\x02",
            python_2_string(b"testing batch 1 of 1") + b"q\x03",
            python_2_string(key)
            + b"q\x04]q\x05("
            + bytes(x for y in labels for x in (75, y))
            + b"e",
            python_2_string(b"data") + b"q\x06",
            b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08",
            b"K\x00\x85U\x01b\x87Rq\x09(K\x01M" + rows + b"M\x00\x0c\x86",
            b"cnumpy\ndtype\nq\x0aU\x02u1K\x00K\x01\x87Rq\x0b(K\x03U\x01|NNNJ\xff\xff\xff\xff",
            b"J\xff\xff\xff\xffK\x00tb\x89" + python_2_string(pixels.tobytes()) + b"tb",
            python_2_string(b"filenames") + b"q\x0c]q\x0d(",
            b"".join(python_2_string(b"f%d.png" % i) for i in range(len(labels))) + b"eu.",
        ]
    )


PETS = {"Abyssinian_100": 1, "Abyssinian_7": 1, "great_pyrenees_1": 2, "Bombay_2": 3}


def pets(root: Path, listed: dict[str, int] | None = None, images: bool = True) -> Path:
    folder = root / "oxford-iiit-pet"
    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / "annotations").mkdir(exist_ok=True)
    lines = [f"{name} {number} 1 1" for name, number in (listed or PETS).items()]
    (folder / "annotations/test.txt").write_text("# name id\n" + "\n".join(lines) + "\n")
    for name, number in PETS.items() if images else ():
        image = Image.fromarray(np.full((3, 4, 3), 10 * number, dtype=np.uint8))
        image.save(folder / f"images/{name}.jpg")
    return folder
