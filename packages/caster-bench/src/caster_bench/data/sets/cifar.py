"""CIFAR-10 and CIFAR-100, and their corrupted test sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from caster.io.image_arrays import ArrayImages
from caster_bench.data.cifar_files import open_binary_version, open_python_version
from caster_bench.data.sets.corrupted import open_corrupted
from caster_bench.data.sets.layout import Archive, DataSet, Layout, Part, Splits
from caster_bench.data.sets.names import corrupted, corruption

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
LICENCE = "none stated; the page asks to cite the report"
CC_BY = "CC BY 4.0 on Zenodo"

# Of the files in the Python versions; torchvision's datasets/cifar.py states them.
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

# Of the arrays; MIT's responsible-ai-toolbox and torch-uncertainty state the same.
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


def _opened(opener: Callable[..., ArrayImages]) -> Callable[[Part], ArrayImages]:
    return lambda part: opener(part.name, part.folder, part.files)


def _ten(end: str, meta: str) -> Callable[[str], Sequence[str]]:
    files = {"train": [f"data_batch_{i}{end}" for i in range(1, 6)], "test": [f"test_batch{end}"]}
    return lambda split: (*files[split], meta)


def _hundred(end: str, meta: str) -> Callable[[str], Sequence[str]]:
    return lambda split: (f"{split}{end}", meta)


def _arrays(split: str) -> Sequence[str]:
    return f"{corruption(split)[0]}.npy", "labels.npy"


PYTHON = _opened(open_python_version)
ONE_LABEL, TWO_LABELS = (_opened(partial(open_binary_version, labels=n)) for n in (1, 2))
CLEAN = (Splits(("train",), 50_000), Splits(("test",), 10_000))
CORRUPTED = (Splits(corrupted(), 10_000, "CORRUPTION-SEVERITY"),)

CIFAR = {
    "cifar10": DataSet(
        "CIFAR-10",
        CLEAN,
        10,
        (
            Layout("cifar-10-batches-py", _ten("", "batches.meta"), PYTHON, MD5_10),
            Layout("cifar-10-batches-bin", _ten(".bin", "batches.meta.txt"), ONE_LABEL),
        ),
        PAGE,
        LICENCE,
        (
            Archive(
                "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
                "md5:c58f30108f718f92721af3b95e74349a",
                "the publisher",
                ("cifar-10-batches-py",),
                170_498_071,
            ),
        ),
    ),
    "cifar100": DataSet(
        "CIFAR-100",
        CLEAN,
        100,
        (
            Layout("cifar-100-python", _hundred("", "meta"), PYTHON, MD5_100),
            Layout("cifar-100-binary", _hundred(".bin", "fine_label_names.txt"), TWO_LABELS),
        ),
        PAGE,
        LICENCE,
        (
            Archive(
                "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
                "md5:eb9058c3a382ffc7106e4002c42a8d85",
                "the publisher",
                ("cifar-100-python",),
                169_001_437,
            ),
        ),
    ),
    "cifar10-c": DataSet(
        "CIFAR-10-C",
        CORRUPTED,
        10,
        (Layout("CIFAR-10-C", _arrays, partial(open_corrupted, classes="cifar10"), MD5_10_C),),
        "https://doi.org/10.5281/zenodo.2535967",
        CC_BY,
        (
            Archive(
                "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar",
                "md5:56bf5dcef84df0e2308c6dcbcbbd8499",
                "Zenodo",
                ("CIFAR-10-C",),
                2_918_471_680,
            ),
        ),
    ),
    "cifar100-c": DataSet(
        "CIFAR-100-C",
        CORRUPTED,
        100,
        (Layout("CIFAR-100-C", _arrays, partial(open_corrupted, classes="cifar100"), MD5_100_C),),
        "https://doi.org/10.5281/zenodo.3555552",
        CC_BY,
        (
            Archive(
                "https://zenodo.org/records/3555552/files/CIFAR-100-C.tar",
                "md5:11f0ed0f1191edbf9fa23466ae6021d3",
                "Zenodo",
                ("CIFAR-100-C",),
                2_918_473_216,
            ),
        ),
    ),
}
