"""The command `caster bench train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from caster.cli.console import progress_bar, say
from caster.cli.options import DataRoot

FOLDER = Path("checkpoints")  # where sweeps look for them
Architecture = Annotated[
    str,
    typer.Argument(
        metavar="ARCHITECTURE",
        help="resnet18, resnet50, convnext_tiny, vit_base, deit_base or swin_tiny; or a small one "
        "for tests, such as mini-resnet.",
    ),
]
TrainingData = Annotated[
    str,
    typer.Option(
        "--data",  # explicit, because Typer 0.27 would call it --DATA
        metavar="DATA",
        help="Training images: a set with a train and a test split, such as cifar10, or labelled "
        "images of 32 or 64 pixels, with --test.",
    ),
]
TestData = Annotated[
    str | None,
    typer.Option("--test", metavar="DATA", help="Held-out images, for the curve and the accuracy."),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        help="Checkpoint to write. [default: checkpoints/ARCHITECTURE-DATA-SEED.safetensors, or "
        "ARCHITECTURE-plain-DATA-SEED]",
    ),
]


def train(
    architecture: Architecture,
    data: TrainingData,
    test: TestData = None,
    out: Out = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, order and augmentation.")] = 0,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Number of epochs. [default: the recipe's]")
    ] = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="For ResNets: crops and flips only, without mixup, CutMix, RandAugment, label "
            "smoothing and averaged weights.",
        ),
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:1. [default: the first GPU, or the CPU]")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0, help="Stop after the last epoch that ends within them; run again to continue."
        ),
    ] = None,
    data_root: DataRoot = None,
) -> None:
    """Train a source checkpoint from scratch, with the recipe of its network.

    On a GPU, training is compiled and in bf16. The checkpoint holds the averaged weights, the
    recipe and a digest; its curve is next to it, one line per epoch. Run the same command again to
    continue a run that was stopped.
    """
    from caster_bench.engine.executors.local import select_devices

    first = select_devices(device)[0]  # before torch is imported: it says how to install it
    from caster_bench.engine.train import training_run
    from caster_bench.engine.train.images import read, splits
    from caster_bench.engine.train.recipe import Recipe

    out = out or default_out(architecture, data, seed, plain)
    recipe = Recipe.of(architecture, epochs, plain=plain)
    source, held_out = splits(data, test)
    images = read(source, data_root)
    if out.parent == FOLDER:
        FOLDER.mkdir(exist_ok=True)
    with progress_bar() as progress:
        outcome = training_run.train(
            architecture,
            recipe,
            images,
            read(held_out, data_root, images.classes),
            out,
            seed=seed,
            device=first,
            seconds=seconds,
            progress=progress,
        )
    if outcome.metadata is None:
        say(f"{outcome.epochs} of {outcome.of} epochs done; run it again to continue.")
    else:
        name = outcome.metadata.test["name"]
        say(f"{out}: {outcome.metadata.accuracy:.2%} accuracy on {name}.")


def default_out(architecture: str, data: str, seed: int, plain: bool = False) -> Path:
    """Return the default path of a checkpoint, where sweeps look for it.

    >>> str(default_out("resnet18", "cifar10", 0))
    'checkpoints/resnet18-cifar10-0.safetensors'
    """
    name = Path(data.partition(":")[0]).stem
    kind = f"{architecture}-plain" if plain else architecture
    return FOLDER / f"{kind}-{name}-{seed}.safetensors"
