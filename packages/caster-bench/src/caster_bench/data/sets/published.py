"""The table of published sets.

Class lists that the published files lack are in `classes`, in the order of the class numbers:
CIFAR-C, Flowers-102 and Fashion-MNIST number their classes, ImageNet-V2 names its folders 0 to 999,
and with class folders alone a missing one would renumber all later classes. They come from CIFAR's
own `batches.meta` and `meta`, torchvision's Flowers102 (after the publisher's page), the sorted
WordNet identifiers of ILSVRC 2012 and of Tiny-ImageNet's `wnids.txt`, timm's `imagenet_r_synsets`
and `imagenet_a_synsets`, Office-Home's folders and Fashion-MNIST's README.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.resources import files

from caster_bench.data.corruptions.constants import FAMILIES, SEVERITIES, SPARE
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

PUBLISHER, ZENODO, TFDS = "the publisher", "Zenodo", "TensorFlow Datasets"  # of digests
ARCHIVE_FAMILIES = FAMILIES | {"extra": SPARE}  # ImageNet-C has an archive for each


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


def _severity_folder(split: str) -> tuple[str]:
    """ImageNet-C's folder of a split: "fog-3" is in fog/3."""
    name, severity = parse_condition(split)
    return (f"{name}/{severity}/",)


def _split_folder(split: str) -> tuple[str]:
    return (f"{split}/",)


def _corrupted(images: int) -> tuple[SplitGroup]:
    return (SplitGroup(corrupted_splits(), images, "CORRUPTION-SEVERITY"),)


# CIFAR

CIFAR_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
CIFAR_LICENCE = "none stated; the page asks to cite the report"
CIFAR_SPLITS = (SplitGroup(("train",), 50_000), SplitGroup(("test",), 10_000))

# Files of the Python versions, as in torchvision's datasets/cifar.py.
MD5_10 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
}
MD5_100 = {
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "meta": "7973b15100ade9c7d40fb424638fde48",
}

# Arrays, as in MIT's responsible-ai-toolbox and torch-uncertainty.
MD5_10_C = {
    "brightness.npy": "0a81ef75e0b523c3383219c330a85d48",
    "contrast.npy": "3c8262171c51307f916c30a3308235a8",
    "defocus_blur.npy": "7d1322666342a0702b1957e92f6254bc",
    "elastic_transform.npy": "9421657c6cd452429cf6ce96cc412b5f",
    "fog.npy": "7b397314b5670f825465fbcd1f6e9ccd",
    "frost.npy": "31f6ab3bce1d9934abfb0cc13656f141",
    "gaussian_blur.npy": "c33370155bc9b055fb4a89113d3c559d",
    "gaussian_noise.npy": "ecaf8b9a2399ffeda7680934c33405fd",
    "glass_blur.npy": "7361fb4019269e02dbf6925f083e8629",
    "impulse_noise.npy": "2090e01c83519ec51427e65116af6b1a",
    "jpeg_compression.npy": "2b9cc4c864e0193bb64db8d7728f8187",
    "labels.npy": "c439b113295ed5254878798ffe28fd54",
    "motion_blur.npy": "fffa5f852ff7ad299cfe8a7643f090f4",
    "pixelate.npy": "0f14f7e2db14288304e1de10df16832f",
    "saturate.npy": "1cfae0964219c5102abbb883e538cc56",
    "shot_noise.npy": "3a7239bb118894f013d9bf1984be7f11",
    "snow.npy": "bb238de8555123da9c282dea23bd6e55",
    "spatter.npy": "8a5a3903a7f8f65b59501a6093b4311e",
    "speckle_noise.npy": "ef00b87611792b00df09c0b0237a1e30",
    "zoom_blur.npy": "6ea8e63f1c5cdee1517533840641641b",
}
MD5_100_C = {
    "brightness.npy": "f22d7195aecd6abb541e27fca230c171",
    "contrast.npy": "322bb385f1d05154ee197ca16535f71e",
    "defocus_blur.npy": "d923e3d9c585a27f0956e2f2ad832564",
    "elastic_transform.npy": "a0792bd6581f6810878be71acedfc65a",
    "fog.npy": "4efc7ebd5e82b028bdbe13048e3ea564",
    "frost.npy": "3a39c6823bdfaa0bf8b12fe7004b8117",
    "gaussian_blur.npy": "5204ba0d557839772ef5a4196a052c3e",
    "gaussian_noise.npy": "ecc4d366eac432bdf25c024086f5e97d",
    "glass_blur.npy": "0bf384f38e5ccbf8dd479d9059b913e1",
    "impulse_noise.npy": "3b3c210ddfa0b5cb918ff4537a429fef",
    "jpeg_compression.npy": "c851b7f1324e1d2ffddeb76920576d11",
    "labels.npy": "bb4026e9ce52996b95f439544568cdb2",
    "motion_blur.npy": "732a7e2e54152ff97c742d4c388c5516",
    "pixelate.npy": "96c00c60f144539e14cffb02ddbd0640",
    "saturate.npy": "c0697e9fdd646916a61e9c312c77bf6b",
    "shot_noise.npy": "b0a1fa6e1e465a747c1b204b1914048a",
    "snow.npy": "0237be164583af146b7b144e73b43465",
    "spatter.npy": "12ccf41d62564d36e1f6a6ada5022728",
    "speckle_noise.npy": "e3f215b1a0f9fd9fd6f0d1cf94a7ce99",
    "zoom_blur.npy": "0204613400c034a81c4830d5df81cb82",
}


def _cifar10_files(suffix: str, meta: str) -> Callable[[str], Sequence[str]]:
    train = [f"data_batch_{i}{suffix}" for i in range(1, 6)]
    names = {"train": train, "test": [f"test_batch{suffix}"]}
    return lambda split: (*names[split], meta)


def _cifar100_files(suffix: str, meta: str) -> Callable[[str], Sequence[str]]:
    return lambda split: (f"{split}{suffix}", meta)


def _cifar_c(
    name: str, title: str, record: int, md5: Mapping[str, str], archive: Archive
) -> DataSet:
    layout = Layout(
        title,
        lambda split: (f"{parse_condition(split)[0]}.npy", "labels.npy"),
        partial(open_cifar_c, classes=class_names(name)),
        md5,
    )
    return DataSet(
        title,
        _corrupted(10_000),
        len(class_names(name)),
        (layout,),
        f"https://doi.org/10.5281/zenodo.{record}",
        "CC BY 4.0 on Zenodo",
        (archive,),
    )


CIFAR = {
    "cifar10": DataSet(
        "CIFAR-10",
        CIFAR_SPLITS,
        10,
        (
            Layout(
                "cifar-10-batches-py",
                _cifar10_files("", "batches.meta"),
                open_cifar_pickles,
                MD5_10,
            ),
            Layout(
                "cifar-10-batches-bin",
                _cifar10_files(".bin", "batches.meta.txt"),
                partial(open_cifar_records, labels=1),
            ),
        ),
        CIFAR_PAGE,
        CIFAR_LICENCE,
        (
            Archive(
                "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
                "md5:c58f30108f718f92721af3b95e74349a",
                PUBLISHER,
                ("cifar-10-batches-py",),
                170_498_071,
            ),
        ),
    ),
    "cifar100": DataSet(
        "CIFAR-100",
        CIFAR_SPLITS,
        100,
        (
            Layout("cifar-100-python", _cifar100_files("", "meta"), open_cifar_pickles, MD5_100),
            Layout(
                "cifar-100-binary",
                _cifar100_files(".bin", "fine_label_names.txt"),
                partial(open_cifar_records, labels=2),
            ),
        ),
        CIFAR_PAGE,
        CIFAR_LICENCE,
        (
            Archive(
                "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
                "md5:eb9058c3a382ffc7106e4002c42a8d85",
                PUBLISHER,
                ("cifar-100-python",),
                169_001_437,
            ),
        ),
    ),
    "cifar10-c": _cifar_c(
        "cifar10",
        "CIFAR-10-C",
        2535967,
        MD5_10_C,
        Archive(
            "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar",
            "md5:56bf5dcef84df0e2308c6dcbcbbd8499",
            ZENODO,
            ("CIFAR-10-C",),
            2_918_471_680,
        ),
    ),
    "cifar100-c": _cifar_c(
        "cifar100",
        "CIFAR-100-C",
        3555552,
        MD5_100_C,
        Archive(
            "https://zenodo.org/records/3555552/files/CIFAR-100-C.tar",
            "md5:11f0ed0f1191edbf9fa23466ae6021d3",
            ZENODO,
            ("CIFAR-100-C",),
            2_918_473_216,
        ),
    ),
}


# Tiny-ImageNet. Tiny-ImageNet-C is not made of its val, but of ImageNet's val cut at its boxes: a
# file name is not the same image in both.

TINY_WNIDS = class_names("tiny-imagenet")


def _tiny_archive(file: str, md5: str, families: Sequence[str], size: int | None) -> Archive:
    return Archive(
        f"https://zenodo.org/records/8206060/files/{file}.tar",
        f"md5:{md5}",
        ZENODO,
        tuple(f"Tiny-ImageNet-C/{name}" for f in families for name in ARCHIVE_FAMILIES[f]),
        size,
        corrupted_splits(*families),
    )


TINY = {
    "tiny-imagenet": DataSet(
        "Tiny-ImageNet",
        (SplitGroup(("train",), 100_000), SplitGroup(("val",), 10_000)),
        200,
        (
            Layout(
                "tiny-imagenet-200",
                lambda split: ("val/val_annotations.txt" if split == "val" else f"{split}/",),
                partial(open_tiny_imagenet, classes=TINY_WNIDS),
            ),
        ),
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
        _corrupted(10_000),
        200,
        (
            Layout(
                "Tiny-ImageNet-C",
                _severity_folder,
                partial(open_class_folders, folders=TINY_WNIDS),
            ),
        ),
        "https://doi.org/10.5281/zenodo.8206060",
        "CC BY 4.0 on Zenodo; made of images of ImageNet",
        (
            _tiny_archive(
                "Tiny-ImageNet-C",
                "f9c9a9dbdc11469f0b850190f7ad8be1",
                tuple(FAMILIES),
                1_794_775_040,
            ),
            _tiny_archive(
                "Tiny-ImageNet-C-extra", "0db0588d243cf403ef93449ec52b70eb", ("extra",), None
            ),
        ),
    ),
}


# ImageNet of ILSVRC 2012, and test sets with its classes: WordNet identifiers in sorted order,
# the order of the outputs of every published model. ImageNet-R and ImageNet-A have images of 200 of
# them, and `classes` is all 1,000 all the same; their publishers' tables compare the 200 outputs.

TERMS = "ImageNet's terms of access: research and education, not commercial"
AUTHORS = "the images belong to their authors"
MIT = f"MIT for the repository; {AUTHORS}"
WNIDS = class_names("imagenet")
HENDRYCKS = "https://people.eecs.berkeley.edu/~hendrycks"
V2 = {  # splits, and how their files spell them
    "matched-frequency": "matched-frequency",
    "threshold-0.7": "threshold0.7",
    "top-images": "top-images",
}


def _top_folder(folder: str) -> Layout:
    """A set of one split whose folder has nothing but class folders."""
    return Layout("", lambda _: (f"{folder}/",), partial(open_class_folders, folders=WNIDS))


def _v2_archive(split: str, digest: str, size: int) -> Archive:
    return Archive(
        f"https://huggingface.co/datasets/vaishaal/ImageNetV2/resolve/main/imagenetv2-{V2[split]}"
        ".tar.gz",
        f"sha256:{digest}",
        TFDS,
        (f"imagenetv2-{V2[split]}-format-val",),
        size,
        (split,),
    )


def _imagenet_c_archive(family: str, digest: str, size: int) -> Archive:
    return Archive(
        f"https://zenodo.org/records/2235448/files/{family}.tar",
        f"md5:{digest}",
        ZENODO,
        tuple(f"ImageNet-C/{name}" for name in ARCHIVE_FAMILIES[family]),
        size,
        corrupted_splits(family),
    )


def _two_hundred(
    letter: str, title: str, images: int, page: str, licence: str, archive: Archive
) -> DataSet:
    name = f"imagenet-{letter}"
    opener = partial(open_class_folders, folders=class_names(name), classes=WNIDS)
    return DataSet(
        title,
        (SplitGroup(("test",), images, balanced=False),),
        1_000,
        (Layout("", lambda _: (f"{name}/",), opener),),
        page,
        licence,
        (archive,),
        classes_present=200,
    )


IMAGENET = {
    "imagenet": DataSet(
        "ImageNet (ILSVRC 2012)",
        (SplitGroup(("train",), 1_281_167, balanced=False), SplitGroup(("val",), 50_000)),
        1_000,
        (
            Layout("imagenet", _split_folder, partial(open_imagenet, classes=WNIDS)),
            Layout(
                "ILSVRC/Data/CLS-LOC",
                _split_folder,
                partial(open_imagenet, classes=WNIDS, labels_folder="../../.."),
            ),
        ),
        "https://image-net.org/challenges/LSVRC/2012/",
        TERMS,
    ),
    "imagenet-c": DataSet(
        "ImageNet-C",
        _corrupted(50_000),
        1_000,
        (Layout("ImageNet-C", _severity_folder, partial(open_class_folders, folders=WNIDS)),),
        "https://doi.org/10.5281/zenodo.2235448",
        f"CC BY 4.0 on Zenodo; made of images under {TERMS}",
        (
            _imagenet_c_archive("blur", "2d8e81fdd8e07fef67b9334fa635e45c", 7_112_704_951),
            _imagenet_c_archive("digital", "89157860d7b10d5797849337ca2e5c03", 7_757_510_705),
            _imagenet_c_archive("extra", "d492dfba5fc162d8ec2c3cd8ee672984", 15_789_490_144),
            _imagenet_c_archive("noise", "e80562d7f6c3f8834afb1ecf27252745", 22_565_673_785),
            _imagenet_c_archive("weather", "33ffea4db4d93fe4a428c40a6ce0c25d", 12_797_438_995),
        ),
    ),
    "imagenet-v2": DataSet(
        "ImageNet-V2",
        (SplitGroup(tuple(V2), 10_000),),
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
            TFDS,
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
            TFDS,
            ("imagenet-a",),
            687_552_512,
        ),
    ),
    "imagenet-sketch": DataSet(
        "ImageNet-Sketch",
        (SplitGroup(("test",), 50_889, balanced=False),),
        1_000,
        (_top_folder("sketch"), _top_folder("imagenet-sketch")),
        "https://github.com/HaohanWang/ImageNet-Sketch",
        MIT,
    ),
}


# Breeds, textures, flowers and dishes: lists say which image is in which split

VGG = "https://www.robots.ox.ac.uk/~vgg/data"
TORCHVISION = "torchvision"
DTD_SPLITS = tuple(f"{split}{i}" for i in range(1, 11) for split in ("train", "val", "test"))

FINE = {
    "pets": DataSet(
        "Oxford-IIIT Pets",
        (
            SplitGroup(("trainval",), 3_680, balanced=False),
            SplitGroup(("test",), 3_669, balanced=False),
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
        (SplitGroup(DTD_SPLITS, 1_880, "train1 to test10"),),
        47,
        (Layout("dtd", lambda split: (f"labels/{split}.txt", "images/"), open_class_lines),),
        f"{VGG}/dtd/",
        "for research",
        (
            Archive(
                f"{VGG}/dtd/download/dtd-r1.0.1.tar.gz",
                "sha256:e42855a52a4950a3b59612834602aa253914755c95b0cff9ead6d07395f8e205",
                TFDS,
                ("dtd",),
                625_239_812,
            ),
        ),
    ),
    "flowers102": DataSet(
        "Flowers-102",
        (SplitGroup(("train", "val"), 1_020), SplitGroup(("test",), 6_149, balanced=False)),
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
                TFDS,
                ("flowers-102/jpg",),
                344_862_509,
            ),
            Archive(
                f"{VGG}/flowers/102/imagelabels.mat",
                "sha256:4903e94206bac23bf772aadf06451916df56b58fc483a62db32a97b82656651d",
                TFDS,
                ("flowers-102/imagelabels.mat",),
                502,
            ),
            Archive(
                f"{VGG}/flowers/102/setid.mat",
                "sha256:46b8678f91fd95d3c8f4feab80d271a6c834a1dd896fe29fd3e6ad9ce5c8dccd",
                TFDS,
                ("flowers-102/setid.mat",),
                14_989,
            ),
        ),
    ),
    "food101": DataSet(
        "Food-101",
        (SplitGroup(("train",), 75_750), SplitGroup(("test",), 25_250)),
        101,
        (Layout("food-101", lambda split: (f"meta/{split}.txt", "images/"), open_class_lines),),
        "https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/",
        "the images are Foodspotting's: beyond scientific fair use ask their owners",
        (
            Archive(
                "http://data.vision.ee.ethz.ch/cvl/food-101.tar.gz",
                "sha256:d97d15e438b7f4498f96086a4f7e2fa42a32f2712e87d3295441b2b6314053a4",
                TFDS,
                ("food-101",),
                4_996_278_331,
            ),
        ),
    ),
}


# Fashion-MNIST: grey images of clothes, 28 pixels

FASHION_SERVER = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
FASHION_FILES = {  # MD5, as in torchvision's datasets/mnist.py, and size
    "train-images-idx3-ubyte.gz": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
    "train-labels-idx1-ubyte.gz": ("25c81989df183df01b3e8a0aad5dffbe", 29_515),
    "t10k-images-idx3-ubyte.gz": ("bef4ecab320f06d8554ea6380940ec79", 4_422_102),
    "t10k-labels-idx1-ubyte.gz": ("bb300cfdad3c16e7a12a480ee83cd310", 5_148),
}


def _fashion_files(split: str) -> Sequence[str]:
    prefix = {"train": "train", "test": "t10k"}[split]
    return f"{prefix}-images-idx3-ubyte.gz", f"{prefix}-labels-idx1-ubyte.gz"


_open_fashion = partial(open_fashion_mnist, classes=class_names("fashion-mnist"))

FASHION = {
    "fashion-mnist": DataSet(
        "Fashion-MNIST",
        (SplitGroup(("train",), 60_000), SplitGroup(("test",), 10_000)),
        10,
        (
            # What `caster data get` and torchvision make; Debian compresses the same arrays again.
            Layout(
                "FashionMNIST/raw",
                _fashion_files,
                _open_fashion,
                {name: md5 for name, (md5, _) in FASHION_FILES.items()},
            ),
            Layout("fashion-mnist", _fashion_files, _open_fashion),
        ),
        "https://github.com/zalandoresearch/fashion-mnist",
        "MIT",
        tuple(
            Archive(
                f"{FASHION_SERVER}/{name}",
                f"md5:{md5}",
                PUBLISHER,
                (f"FashionMNIST/raw/{name}",),
                size,
            )
            for name, (md5, size) in FASHION_FILES.items()
        ),
    ),
}


# Domains: the same classes in four styles, one split per style

PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
STYLES = {"art": "Art", "clipart": "Clipart", "product": "Product", "real-world": "Real World"}


def _uneven(sizes: Mapping[str, int]) -> tuple[SplitGroup, ...]:
    return tuple(SplitGroup((name,), images, balanced=False) for name, images in sizes.items())


DOMAINS = {
    "pacs": DataSet(
        "PACS",
        _uneven({"art_painting": 2_048, "cartoon": 2_344, "photo": 1_670, "sketch": 3_929}),
        7,
        tuple(
            Layout(
                folder,
                _split_folder,
                partial(open_class_folders, folders=PACS_CLASSES),
            )
            for folder in ("PACS", "PACS/kfold", "pacs_data")
        ),
        "https://dali-dl.github.io/project_iccv2017.html",
        "none stated",
    ),
    "office-home": DataSet(
        "Office-Home",
        _uneven({"art": 2_427, "clipart": 4_365, "product": 4_439, "real-world": 4_357}),
        65,
        tuple(
            Layout(
                folder,
                lambda split: (f"{STYLES[split]}/",),
                partial(open_class_folders, folders=class_names("office-home")),
            )
            for folder in ("OfficeHomeDataset_10072016", "office_home")
        ),
        "https://www.hemanthdv.org/officeHomeDataset.html",
        "a notice of fair use: research and education, not commercial",
    ),
}


SETS: dict[str, DataSet] = CIFAR | TINY | IMAGENET | FINE | FASHION | DOMAINS
