"""ImageNet of ILSVRC 2012, and the test sets that share its classes.

Classes are WordNet identifiers in sorted order, which is the order of the outputs of every
published model. The images of ImageNet-R and ImageNet-A are of 200 of them, and `classes` is all
1,000 all the same. Their publishers' tables compare the 200 outputs only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from caster.errors import CasterError
from caster.io.image_folder import FileImages, listed
from caster_bench.data.sets.folders import open_class_folders
from caster_bench.data.sets.layout import Archive, DataSet, Layout, Part, Splits
from caster_bench.data.sets.lists import Listed, assembled, read_solution
from caster_bench.data.sets.matlab import read_devkit
from caster_bench.data.sets.names import GROUPS, class_names, corrupted, severity_folder

TERMS = "ImageNet's terms of access: research and education, not commercial"
AUTHORS = "the images belong to their authors"
MIT = f"MIT for the repository; {AUTHORS}"
WNIDS = class_names("imagenet")
DEVKIT, SOLUTION = "ILSVRC2012_devkit_t12", "LOC_val_solution.csv"
HENDRYCKS = "https://people.eecs.berkeley.edu/~hendrycks"
V2 = {  # a split, and how its files spell it
    "matched-frequency": "matched-frequency",
    "threshold-0.7": "threshold0.7",
    "top-images": "top-images",
}


def open_imagenet(part: Part, beside: str = ".") -> FileImages:
    """train or val in class folders; or val in one folder, as it is published, with its labels.

    Those are in Kaggle's LOC_val_solution.csv or in the development kit, beside the set.
    """
    (where,) = part.files
    inside = listed(part.folder / where)
    flat = any(name.endswith(".JPEG") for name in inside)
    if not flat:
        return open_class_folders(part, WNIDS)
    images = _ground_truth(part, beside)
    return assembled(part, [(f"{where}{image}", label) for image, label in images], WNIDS)


def _ground_truth(part: Part, beside: str) -> Listed:
    for folder in (part.folder / beside, part.folder):
        if os.path.isfile(folder / SOLUTION):
            return read_solution(folder / SOLUTION)
        if os.path.isdir(folder / DEVKIT):
            return read_devkit(folder / DEVKIT)
    raise CasterError(
        f"{part.folder / part.files[0]} holds images and no class folders: put {SOLUTION} (from "
        f"Kaggle) or {DEVKIT} (from image-net.org) into {part.folder}, or sort them into folders"
    )


def _split_folder(split: str) -> Sequence[str]:
    return (f"{split}/",)


def _named(folder: str) -> Layout:
    """A set of one split, whose class folders are all there is in it."""
    return Layout("", lambda _: (f"{folder}/",), partial(open_class_folders, folders=WNIDS))


def _v2_archive(split: str, digest: str, size: int) -> Archive:
    return Archive(
        f"https://huggingface.co/datasets/vaishaal/ImageNetV2/resolve/main/imagenetv2-{V2[split]}"
        ".tar.gz",
        f"sha256:{digest}",
        "TensorFlow Datasets",
        (f"imagenetv2-{V2[split]}-format-val",),
        size,
        (split,),
    )


def _corrupted_archive(group: str, digest: str, size: int) -> Archive:
    return Archive(
        f"https://zenodo.org/records/2235448/files/{group}.tar",
        f"md5:{digest}",
        "Zenodo",
        tuple(f"ImageNet-C/{name}" for name in GROUPS[group]),
        size,
        corrupted(group),
    )


def _two_hundred(
    letter: str, title: str, images: int, page: str, licence: str, archive: Archive
) -> DataSet:
    name = f"imagenet-{letter}"
    opener = partial(open_class_folders, folders=class_names(name), classes=WNIDS)
    return DataSet(
        title,
        (Splits(("test",), images, balanced=False),),
        1_000,
        (Layout("", lambda _: (f"{name}/",), opener),),
        page,
        licence,
        (archive,),
        present=200,
    )


IMAGENET = {
    "imagenet": DataSet(
        "ImageNet (ILSVRC 2012)",
        (Splits(("train",), 1_281_167, balanced=False), Splits(("val",), 50_000)),
        1_000,
        (
            Layout("imagenet", _split_folder, open_imagenet),
            Layout("ILSVRC/Data/CLS-LOC", _split_folder, partial(open_imagenet, beside="../../..")),
        ),
        "https://image-net.org/challenges/LSVRC/2012/",
        TERMS,
    ),
    "imagenet-c": DataSet(
        "ImageNet-C",
        (Splits(corrupted(), 50_000, "CORRUPTION-SEVERITY"),),
        1_000,
        (Layout("ImageNet-C", severity_folder, partial(open_class_folders, folders=WNIDS)),),
        "https://doi.org/10.5281/zenodo.2235448",
        f"CC BY 4.0 on Zenodo; made of images under {TERMS}",
        (
            _corrupted_archive("blur", "2d8e81fdd8e07fef67b9334fa635e45c", 7_112_704_951),
            _corrupted_archive("digital", "89157860d7b10d5797849337ca2e5c03", 7_757_510_705),
            _corrupted_archive("extra", "d492dfba5fc162d8ec2c3cd8ee672984", 15_789_490_144),
            _corrupted_archive("noise", "e80562d7f6c3f8834afb1ecf27252745", 22_565_673_785),
            _corrupted_archive("weather", "33ffea4db4d93fe4a428c40a6ce0c25d", 12_797_438_995),
        ),
    ),
    "imagenet-v2": DataSet(
        "ImageNet-V2",
        (Splits(tuple(V2), 10_000),),
        1_000,
        (
            Layout(
                "",
                lambda split: (f"imagenetv2-{V2[split]}-format-val/",),
                partial(open_class_folders, folders=[str(i) for i in range(1_000)], labels=WNIDS),
            ),
        ),
        "https://github.com/modestyachts/ImageNetV2",
        MIT,
        (
            _v2_archive(
                "matched-frequency",
                "f0c37fdf925916b19ea1323cd9a2208cdb6959ba2c32eef2a7fc393835c9ca7c",
                1_264_079_360,
            ),
            _v2_archive(
                "threshold-0.7",
                "32142bfe998f9cfa4141be691f6a80eeb1e27b24bd532a668eb08c26d98897a2",
                1_249_906_176,
            ),
            _v2_archive(
                "top-images",
                "85e4ace30f3f0d660152062254b8759dda66267b27f7ec0fd8d5768f1073a04b",
                1_245_927_936,
            ),
        ),
    ),
    "imagenet-r": _two_hundred(
        "r",
        "ImageNet-R",
        30_000,
        "https://github.com/hendrycks/imagenet-r",
        f"none in the repository; {AUTHORS}",
        Archive(
            f"{HENDRYCKS}/imagenet-r.tar",
            "sha256:18c6bf493b39a0d975d48e587437f562caab9c52ae6327dcfa9dd8eb54aa1b52",
            "TensorFlow Datasets",
            ("imagenet-r",),
            2_191_079_936,
        ),
    ),
    "imagenet-a": _two_hundred(
        "a",
        "ImageNet-A",
        7_500,
        "https://github.com/hendrycks/natural-adv-examples",
        MIT,
        Archive(
            f"{HENDRYCKS}/imagenet-a.tar",
            "sha256:3bb3632277e6ba6392ea64c02ddbf4dd2266c9caffd6bc09c9656d28f012589e",
            "TensorFlow Datasets",
            ("imagenet-a",),
            687_552_512,
        ),
    ),
    "imagenet-sketch": DataSet(
        "ImageNet-Sketch",
        (Splits(("test",), 50_889, balanced=False),),
        1_000,
        (_named("sketch"), _named("imagenet-sketch")),
        "https://github.com/HaohanWang/ImageNet-Sketch",
        MIT,
    ),
}
