"""The networks that are adapted, their source, and streams of images past them."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import caster
from caster import state as states
from caster.adapt.source import Source
from caster.io.files import move_into_place
from caster.models.preprocessing import Preprocessing
from caster.models.protocol import FrozenModel
from caster_bench.methods.catalogue import Entry

sys.path.append(str(Path(__file__).parents[1]))

from networks import convnext12, resnet18, resnet50, vit_s4
from training import ADAMW, ADAMW_VIT, DEVICE, SGD, Recipe, normalise, train

Array = NDArray[Any]
BATCH, SEED, N_CLASSES = 64, 0, 10
TINY = {"train": 500, "test": 128}  # images
HALVES = Preprocessing(range=1.0, mean=(0.5,) * 3, std=(0.5,) * 3, layout="NCHW")  # `normalise`


@dataclass(frozen=True)
class Subject:
    """A network to adapt."""

    name: str
    key: str  # of its files
    build: Callable[..., nn.Module]
    recipe: Recipe
    epochs: int
    tiny: dict[str, int]  # what makes it a tiny one
    transformer: bool = False

    def suits(self, entry: Entry) -> bool:
        """Whether a method is for such a network at all."""
        return self.transformer or "transformer" not in entry.needs


RESNET18 = Subject("ResNet-18", "resnet18", resnet18, SGD, 30, {"width": 8})
CONVNEXT = Subject("ConvNeXt-12", "convnext12", convnext12, ADAMW, 30, {"width": 8})
VIT = Subject("ViT-S/4", "vit_s4", vit_s4, ADAMW_VIT, 30, {"width": 24, "depth": 4}, True)
RESNET50 = Subject("ResNet-50", "resnet50", resnet50, SGD, 8, {"width": 4})
SUBJECTS = {s.name: s for s in (RESNET18, CONVNEXT, VIT, RESNET50)}


@dataclass(frozen=True)
class Run:
    """Where a run reads and writes, and whether it is a rehearsal."""

    data: Path
    out: Path
    tiny: bool


class Images:
    """CIFAR-10 in memory, as uint8."""

    def __init__(self, run: Run) -> None:
        with np.load(run.data / "cifar10.npz", allow_pickle=False) as arrays:

            def read(part: str) -> tuple[Array, Array]:
                rows = slice(TINY[part] if run.tiny else None)
                return arrays[f"{part}_images"][rows], arrays[f"{part}_labels"][rows]

            self.train_images, self.train_labels = read("train")
            self.test_images, self.test_labels = read("test")


@dataclass(frozen=True)
class Batches:
    """Labelled source batches, made anew whenever they are read: they stay on the host."""

    images: Array
    labels: Array

    def __iter__(self) -> Iterator[tuple[Tensor, Array]]:
        for at in range(0, len(self.labels), BATCH):
            yield as_batch(self.images[at : at + BATCH]), self.labels[at : at + BATCH]


def as_batch(images: Array | Tensor) -> Tensor:
    """Images as the networks take them, on the device."""
    return normalise(torch.as_tensor(images).to(DEVICE)).contiguous()


def trained(subject: Subject, image_set: Images, run: Run) -> FrozenModel:
    """A network from its file, or trained and kept there."""
    build = partial(subject.build, N_CLASSES, **(subject.tiny if run.tiny else {}))
    path = run.out / f"{subject.key}.safetensors"
    if not path.exists():
        began = time.perf_counter()
        size = {"epochs": 1, "batch": 50} if run.tiny else {"epochs": subject.epochs}
        images, labels = image_set.train_images, image_set.train_labels
        net = train(build, images, labels, subject.recipe, seed=SEED, **size)
        values = {name: value.cpu().contiguous() for name, value in net.state_dict().items()}
        part = path.with_suffix(".part")
        save_file(values, part)
        move_into_place(part, path)
        print(f"{subject.name}: {time.perf_counter() - began:.0f} s of training", flush=True)
    net = build().eval()
    net.load_state_dict(load_file(path))
    return caster.wrap(net, device=DEVICE, preprocessing=HALVES)


def prepare(subject: Subject, image_set: Images, run: Run) -> tuple[FrozenModel, Source]:
    """A trained network and its source, whose state is kept in a file too."""
    model = trained(subject, image_set, run)
    batches = Batches(image_set.train_images, image_set.train_labels)
    path = run.out / f"{subject.key}.caster"
    if path.exists():
        return model, Source(state=states.load(path), batches=batches)
    began = time.perf_counter()
    source = Source.fit(model, batches)
    states.save(source.require_state(subject.name), path)
    print(f"{subject.name}: {time.perf_counter() - began:.0f} s of fitting", flush=True)
    return model, source


def shuffled(n: int) -> list[Array]:
    """Rows of every batch of a shuffled stream; of the last one, what is left."""
    order = np.random.default_rng(SEED).permutation(n)
    return [order[at : at + BATCH] for at in range(0, n, BATCH)]


def synchronise() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def setup(run: Run, how: str) -> str:
    """Where and how it is measured, in words."""
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else platform.machine() + " CPU"
    tf32 = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    on, off = ("on" if allowed and DEVICE == "cuda" else "off" for allowed in tf32)
    precision = f"float32 with TF32 {on} in convolutions and {off} in matrix products"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    size = "; TINY: a rehearsal, which measures nothing" if run.tiny else ""
    return f"{where}, {versions}, {precision}, B {BATCH}, seed {SEED}, {how}{size}"
