"""Tiny-ImageNet: 200 classes of ImageNet at 64 pixels, and a corrupted test set of theirs.

Tiny-ImageNet-C is made of other images than Tiny-ImageNet's val: those of ImageNet's val, cut at
their boxes. A file of one name is not the same image in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from caster.io.image_folder import FileImages
from caster_bench.data.sets.folders import open_class_folders
from caster_bench.data.sets.layout import Archive, DataSet, Layout, Part, Splits
from caster_bench.data.sets.lists import open_tiny_validation
from caster_bench.data.sets.names import GROUPS, class_names, corrupted, severity_folder

WNIDS = class_names("tiny-imagenet")
REPORTED = ("blur", "digital", "noise", "weather")  # groups in the first of the two archives


def open_tiny(part: Part) -> FileImages:
    """train in class folders, val in one folder with a list; classes in sorted order."""
    if part.split == "val":
        return open_tiny_validation(part, WNIDS)
    return open_class_folders(part, WNIDS)


def _files(split: str) -> Sequence[str]:
    return ("val/val_annotations.txt" if split == "val" else f"{split}/",)


def _archive(file: str, digest: str, groups: Sequence[str], size: int | None) -> Archive:
    return Archive(
        f"https://zenodo.org/records/8206060/files/{file}.tar",
        f"md5:{digest}",
        "Zenodo",
        tuple(f"Tiny-ImageNet-C/{name}" for group in groups for name in GROUPS[group]),
        size,
        corrupted(*groups),
    )


TINY = {
    "tiny-imagenet": DataSet(
        "Tiny-ImageNet",
        (Splits(("train",), 100_000), Splits(("val",), 10_000)),
        200,
        (Layout("tiny-imagenet-200", _files, open_tiny),),
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "none stated; made of images of ImageNet",
        (
            Archive(
                "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
                "md5:90528d7ca1a48142e341f4ef8d21d0de",
                "avalanche and others",
                ("tiny-imagenet-200",),
                248_100_043,
            ),
        ),
    ),
    "tiny-imagenet-c": DataSet(
        "Tiny-ImageNet-C",
        (Splits(corrupted(), 10_000, "CORRUPTION-SEVERITY"),),
        200,
        (Layout("Tiny-ImageNet-C", severity_folder, partial(open_class_folders, folders=WNIDS)),),
        "https://doi.org/10.5281/zenodo.8206060",
        "CC BY 4.0 on Zenodo; made of images of ImageNet",
        (
            _archive(
                "Tiny-ImageNet-C", "f9c9a9dbdc11469f0b850190f7ad8be1", REPORTED, 1_794_775_040
            ),
            _archive("Tiny-ImageNet-C-extra", "0db0588d243cf403ef93449ec52b70eb", ("extra",), None),
        ),
    ),
}
