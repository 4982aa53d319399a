"""Breeds, textures, flowers and dishes: sets whose lists say which image is in which split."""

from __future__ import annotations

from functools import partial

from caster_bench.data.sets.layout import Archive, DataSet, Layout, Splits
from caster_bench.data.sets.lists import open_class_lines, open_pets
from caster_bench.data.sets.matlab import open_flowers
from caster_bench.data.sets.names import class_names

VGG = "https://www.robots.ox.ac.uk/~vgg/data"
TORCHVISION = "torchvision"
DTD_SPLITS = tuple(f"{split}{i}" for i in range(1, 11) for split in ("train", "val", "test"))

FINE = {
    "pets": DataSet(
        "Oxford-IIIT Pets",
        (
            Splits(("trainval",), 3_680, balanced=False),
            Splits(("test",), 3_669, balanced=False),
        ),
        37,
        (Layout("oxford-iiit-pet", lambda split: (f"annotations/{split}.txt",), open_pets),),
        f"{VGG}/pets/",
        "CC BY-SA 4.0",
        (
            Archive(
                f"{VGG}/pets/data/images.tar.gz",
                "md5:5c4f3ee8e5d25df40f4fd59a7f44e54c",
                TORCHVISION,
                ("oxford-iiit-pet/images",),
                791_918_971,
            ),
            Archive(
                f"{VGG}/pets/data/annotations.tar.gz",
                "md5:95a8c909bbe2e81eed6a22bccdf3f68f",
                TORCHVISION,
                ("oxford-iiit-pet/annotations",),
                19_173_078,
            ),
        ),
    ),
    "dtd": DataSet(
        "Describable Textures (DTD)",
        (Splits(DTD_SPLITS, 1_880, "train1 to test10"),),
        47,
        (Layout("dtd", lambda split: (f"labels/{split}.txt", "images/"), open_class_lines),),
        f"{VGG}/dtd/",
        "for research",
        (
            Archive(
                f"{VGG}/dtd/download/dtd-r1.0.1.tar.gz",
                "sha256:e42855a52a4950a3b59612834602aa253914755c95b0cff9ead6d07395f8e205",
                "TensorFlow Datasets",
                ("dtd",),
                625_239_812,
            ),
        ),
    ),
    "flowers102": DataSet(
        "Flowers-102",
        (Splits(("train", "val"), 1_020), Splits(("test",), 6_149, balanced=False)),
        102,
        (
            Layout(
                "flowers-102",
                lambda _: ("imagelabels.mat", "setid.mat"),
                partial(open_flowers, classes=class_names("flowers102")),
                {
                    "imagelabels.mat": "e0620be6f572b9609742df49c70aed4d",
                    "setid.mat": "a5357ecc9cb78c4bef273ce3793fc85c",
                },
            ),
        ),
        f"{VGG}/flowers/102/",
        "none stated",
        (
            Archive(
                f"{VGG}/flowers/102/102flowers.tgz",
                "sha256:2d01ecc807db462958cfe3d92f57a8c252b4abd240eb955770201e45f783b246",
                "TensorFlow Datasets",
                ("flowers-102/jpg",),
                344_862_509,
            ),
            Archive(
                f"{VGG}/flowers/102/imagelabels.mat",
                "sha256:4903e94206bac23bf772aadf06451916df56b58fc483a62db32a97b82656651d",
                "TensorFlow Datasets",
                ("flowers-102/imagelabels.mat",),
                502,
            ),
            Archive(
                f"{VGG}/flowers/102/setid.mat",
                "sha256:46b8678f91fd95d3c8f4feab80d271a6c834a1dd896fe29fd3e6ad9ce5c8dccd",
                "TensorFlow Datasets",
                ("flowers-102/setid.mat",),
                14_989,
            ),
        ),
    ),
    "food101": DataSet(
        "Food-101",
        (Splits(("train",), 75_750), Splits(("test",), 25_250)),
        101,
        (Layout("food-101", lambda split: (f"meta/{split}.txt", "images/"), open_class_lines),),
        "https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/",
        "the images are Foodspotting's: beyond scientific fair use ask their owners",
        (
            Archive(
                "http://data.vision.ee.ethz.ch/cvl/food-101.tar.gz",
                "sha256:d97d15e438b7f4498f96086a4f7e2fa42a32f2712e87d3295441b2b6314053a4",
                "TensorFlow Datasets",
                ("food-101",),
                4_996_278_331,
            ),
        ),
    ),
}
