"""The published sets: `published.toml`, and how each is laid out on disk.

Class lists that the published files lack are in `classes`, in the order of the class numbers:
CIFAR-C, Flowers-102 and Fashion-MNIST number their classes, ImageNet-V2 names its folders 0 to 999,
and with class folders alone a missing one would renumber all later classes. They come from CIFAR's
own `batches.meta` and `meta`, torchvision's Flowers102 (after the publisher's page), the sorted
WordNet identifiers of ILSVRC 2012 and of Tiny-ImageNet's `wnids.txt`, timm's `imagenet_r_synsets`
and `imagenet_a_synsets`, Office-Home's folders and Fashion-MNIST's README.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.resources import files
from typing import Any

from caster_bench.data.sets.array_loaders import (
    open_cifar_c,
    open_cifar_pickles,
    open_cifar_records,
    open_fashion_mnist,
    parse_condition,
)
from caster_bench.data.sets.dataset import Archive, DataSet, Layout, SplitGroup
from caster_bench.data.sets.file_loaders import (
    open_class_folders,
    open_class_lines,
    open_flowers,
    open_imagenet,
    open_pets,
    open_tiny_imagenet,
)
from caster_bench.sweeps.spec import CORRUPTION_FAMILIES, SEVERITIES, SPARE

ARCHIVE_FAMILIES = CORRUPTION_FAMILIES | {"extra": SPARE}  # ImageNet-C has an archive for each


@cache
def class_names(of: str) -> tuple[str, ...]:
    """Read a class list.

    >>> class_names("cifar10")[:3], len(class_names("imagenet"))
    (('airplane', 'automobile', 'bird'), 1000)
    """
    text = (files(__package__) / "classes" / f"{of}.txt").read_text(encoding="utf-8")
    return tuple(text.splitlines())


def corrupted_splits(*families: str) -> tuple[str, ...]:
    """Name every corruption of some families, or of all, at every severity.

    >>> corrupted_splits("blur")[:2], len(corrupted_splits())
    (('defocus_blur-1', 'defocus_blur-2'), 95)
    """
    chosen = families or ARCHIVE_FAMILIES
    names = sorted(name for family in chosen for name in ARCHIVE_FAMILIES[family])
    return tuple(f"{name}-{severity}" for name in names for severity in SEVERITIES)


# --- layouts -------------------------------------------------------------------------------------


def _severity_folder(split: str) -> tuple[str]:
    """ImageNet-C's folder of a split: "fog-3" is in fog/3."""
    name, severity = parse_condition(split)
    return (f"{name}/{severity}/",)


def _split_folder(split: str) -> tuple[str]:
    return (f"{split}/",)


def _cifar10_files(suffix: str, meta: str) -> Callable[[str], Sequence[str]]:
    train = [f"data_batch_{i}{suffix}" for i in range(1, 6)]
    names = {"train": train, "test": [f"test_batch{suffix}"]}
    return lambda split: (*names[split], meta)


def _cifar100_files(suffix: str, meta: str) -> Callable[[str], Sequence[str]]:
    return lambda split: (f"{split}{suffix}", meta)


def _cifar_c(folder: str, classes: str) -> Layout:
    return Layout(
        folder,
        lambda split: (f"{parse_condition(split)[0]}.npy", "labels.npy"),
        partial(open_cifar_c, classes=class_names(classes)),
    )


def _top_folder(
    folder: str, folders: Sequence[str], classes: Sequence[str] | None = None
) -> Layout:
    """A set of one split whose folder has nothing but class folders."""
    opened = partial(open_class_folders, folders=folders, classes=classes)
    return Layout("", lambda _: (f"{folder}/",), opened)


def _fashion_files(split: str) -> Sequence[str]:
    prefix = {"train": "train", "test": "t10k"}[split]
    return f"{prefix}-images-idx3-ubyte.gz", f"{prefix}-labels-idx1-ubyte.gz"


# WordNet identifiers in sorted order, the order of the outputs of every published model. ImageNet-R
# and ImageNet-A have images of 200 of the 1,000 classes; their publishers compare those outputs.
# Tiny-ImageNet-C is made of ImageNet's val, cut at its boxes, and not of Tiny-ImageNet's: a file
# name is not the same image in both.
WNIDS, TINY_WNIDS = class_names("imagenet"), class_names("tiny-imagenet")
V2 = {  # splits, and how their folders spell them
    "matched-frequency": "matched-frequency",
    "threshold-0.7": "threshold0.7",
    "top-images": "top-images",
}
PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
STYLES = {"art": "Art", "clipart": "Clipart", "product": "Product", "real-world": "Real World"}
_open_fashion = partial(open_fashion_mnist, classes=class_names("fashion-mnist"))

LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "cifar10": (
        Layout("cifar-10-batches-py", _cifar10_files("", "batches.meta"), open_cifar_pickles),
        Layout(
            "cifar-10-batches-bin",
            _cifar10_files(".bin", "batches.meta.txt"),
            partial(open_cifar_records, labels=1),
        ),
    ),
    "cifar100": (
        Layout("cifar-100-python", _cifar100_files("", "meta"), open_cifar_pickles),
        Layout(
            "cifar-100-binary",
            _cifar100_files(".bin", "fine_label_names.txt"),
            partial(open_cifar_records, labels=2),
        ),
    ),
    "cifar10-c": (_cifar_c("CIFAR-10-C", "cifar10"),),
    "cifar100-c": (_cifar_c("CIFAR-100-C", "cifar100"),),
    "tiny-imagenet": (
        Layout(
            "tiny-imagenet-200",
            lambda split: ("val/val_annotations.txt" if split == "val" else f"{split}/",),
            partial(open_tiny_imagenet, classes=TINY_WNIDS),
        ),
    ),
    "tiny-imagenet-c": (
        Layout(
            "Tiny-ImageNet-C", _severity_folder, partial(open_class_folders, folders=TINY_WNIDS)
        ),
    ),
    "imagenet": (
        Layout("imagenet", _split_folder, partial(open_imagenet, classes=WNIDS)),
        Layout(
            "ILSVRC/Data/CLS-LOC",
            _split_folder,
            partial(open_imagenet, classes=WNIDS, labels_folder="../../.."),
        ),
    ),
    "imagenet-c": (
        Layout("ImageNet-C", _severity_folder, partial(open_class_folders, folders=WNIDS)),
    ),
    "imagenet-v2": (
        Layout(
            "",
            lambda split: (f"imagenetv2-{V2[split]}-format-val/",),
            partial(open_class_folders, folders=[str(i) for i in range(1_000)], labels=WNIDS),
        ),
    ),
    "imagenet-r": (_top_folder("imagenet-r", class_names("imagenet-r"), WNIDS),),
    "imagenet-a": (_top_folder("imagenet-a", class_names("imagenet-a"), WNIDS),),
    "imagenet-sketch": (_top_folder("sketch", WNIDS), _top_folder("imagenet-sketch", WNIDS)),
    "pets": (Layout("oxford-iiit-pet", lambda split: (f"annotations/{split}.txt",), open_pets),),
    "dtd": (Layout("dtd", lambda split: (f"labels/{split}.txt", "images/"), open_class_lines),),
    "flowers102": (
        Layout(
            "flowers-102",
            lambda _: ("imagelabels.mat", "setid.mat"),
            partial(open_flowers, classes=class_names("flowers102")),
        ),
    ),
    "food101": (
        Layout("food-101", lambda split: (f"meta/{split}.txt", "images/"), open_class_lines),
    ),
    "fashion-mnist": (
        # What `caster data get` and torchvision make; Debian compresses the same arrays again.
        Layout("FashionMNIST/raw", _fashion_files, _open_fashion),
        Layout("fashion-mnist", _fashion_files, _open_fashion),
    ),
    "pacs": tuple(
        Layout(folder, _split_folder, partial(open_class_folders, folders=PACS_CLASSES))
        for folder in ("PACS", "PACS/kfold", "pacs_data")
    ),
    "office-home": tuple(
        Layout(
            folder,
            lambda split: (f"{STYLES[split]}/",),
            partial(open_class_folders, folders=class_names("office-home")),
        )
        for folder in ("OfficeHomeDataset_10072016", "office_home")
    ),
}


# --- the table -----------------------------------------------------------------------------------

PATTERNS = {  # splits that are not listed one by one
    "CORRUPTION-SEVERITY": corrupted_splits(),
    "train1 to test10": tuple(f"{s}{i}" for i in range(1, 11) for s in ("train", "val", "test")),
}


def _data_set(
    layouts: tuple[Layout, ...],
    title: str,
    splits: list[dict[str, Any]],
    archives: Sequence[dict[str, Any]] = (),
    md5: dict[str, str] | None = None,
    **facts: Any,
) -> DataSet:
    return DataSet(
        title,
        tuple(_split_group(**each) for each in splits),
        layouts=(replace(layouts[0], md5=md5 or {}), *layouts[1:]),
        archives=tuple(_archive(title, **each) for each in archives),
        **facts,
    )


def _split_group(names: Sequence[str] = (), pattern: str = "", **facts: Any) -> SplitGroup:
    return SplitGroup(names or PATTERNS[pattern], pattern=pattern, **facts)


def _archive(title: str, families: Sequence[str] = (), **facts: Any) -> Archive:
    if families:
        names = (name for family in families for name in ARCHIVE_FAMILIES[family])
        facts["contents"] = tuple(f"{title}/{name}" for name in names)
        facts["splits"] = corrupted_splits(*families)
    return Archive(**facts)


SETS: dict[str, DataSet] = {
    name: _data_set(LAYOUTS[name], **table)
    for name, table in tomllib.loads(
        (files(__package__) / "published.toml").read_text(encoding="utf-8")
    ).items()
}
