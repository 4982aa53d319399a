"""Fashion-MNIST: grey images of clothes, of 28 pixels."""

from __future__ import annotations

from collections.abc import Sequence

from caster.errors import CasterError
from caster.io.image_arrays import ArrayImages
from caster.io.labels import as_labels
from caster_bench.data.idx import GreyImages, read_idx
from caster_bench.data.sets.layout import Archive, DataSet, Layout, Part, Splits
from caster_bench.data.sets.names import class_names

PREFIX = {"train": "train", "test": "t10k"}
SERVER = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
FILES = {  # of the publisher: MD5, which torchvision's datasets/mnist.py states too, and bytes
    "train-images-idx3-ubyte.gz": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
    "train-labels-idx1-ubyte.gz": ("25c81989df183df01b3e8a0aad5dffbe", 29_515),
    "t10k-images-idx3-ubyte.gz": ("bef4ecab320f06d8554ea6380940ec79", 4_422_102),
    "t10k-labels-idx1-ubyte.gz": ("bb300cfdad3c16e7a12a480ee83cd310", 5_148),
}


def _needs(split: str) -> Sequence[str]:
    return f"{PREFIX[split]}-images-idx3-ubyte.gz", f"{PREFIX[split]}-labels-idx1-ubyte.gz"


def _open(part: Part) -> ArrayImages:
    pixels, stated = (part.folder / file for file in part.files)
    images, labels = GreyImages(pixels), read_idx(stated, 1)
    classes = as_labels(class_names("fashion-mnist"))
    if len(labels) != images.shape[0]:
        raise CasterError(f"{pixels} holds {images.shape[0]} images, and {stated} {len(labels)}")
    if labels.max(initial=0) >= len(classes):
        raise CasterError(f"{stated} is damaged: a label is none of the {len(classes)} classes")
    names = tuple(f"{part.split}[{i}]" for i in range(len(labels)))
    return ArrayImages(part.name, (pixels, stated), names, classes[labels], classes, images.image)


FASHION = {
    "fashion-mnist": DataSet(
        "Fashion-MNIST",
        (Splits(("train",), 60_000), Splits(("test",), 10_000)),
        10,
        (
            # What `caster data get` and torchvision make; Debian packs the same arrays anew.
            Layout(
                "FashionMNIST/raw", _needs, _open, {name: md5 for name, (md5, _) in FILES.items()}
            ),
            Layout("fashion-mnist", _needs, _open),
        ),
        "https://github.com/zalandoresearch/fashion-mnist",
        "MIT",
        tuple(
            Archive(
                f"{SERVER}/{name}",
                f"md5:{md5}",
                "the publisher",
                (f"FashionMNIST/raw/{name}",),
                size,
            )
            for name, (md5, size) in FILES.items()
        ),
    ),
}
