"""The training command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from caster.cli.console import progress_bar, say
from caster.cli.image_options import DataRoot


def train(
    architecture: Annotated[
        str,
        typer.Argument(
            metavar="ARCHITECTURE",
            help="resnet18, resnet50, convnext_tiny, vit_base, deit_base or swin_tiny; or a small "
            "one for tests, such as mini-resnet.",
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            "--data",  # said, for Typer 0.27 would call it --DATA
            metavar="DATA",
            help="What to learn from: a set with a train and a test split, such as cifar10, or "
            "labelled images of 32 or 64 pixels, with --test.",
        ),
    ],
    test: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="Held-out images, for the curve and the accuracy."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Checkpoint to write. [default: checkpoints/ARCHITECTURE-DATA-SEED.safetensors]",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, order and augmentation.")] = 0,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Instead of as many as the recipe has.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda or cuda:1. [default: the first GPU there is, or the CPU]"),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0, help="Stop after the epoch that ends within them; the next call goes on."
        ),
    ] = None,
    data_root: DataRoot = None,
) -> None:
    """Train a source checkpoint from nothing, with the recipe of its network.

    On a GPU in bf16 and compiled. The checkpoint holds the average of the weights, the recipe and
    a digest; its curve is beside it, a line an epoch. A run that was stopped goes on when the same
    command is given again.
    """
    from caster_bench.engine.executors.devices import chosen
    from caster_bench.engine.train.images import read, splits
    from caster_bench.engine.train.recipe import Recipe

    at = chosen(device)[0]  # which tells, where there is no torch, that it is needed
    from caster_bench.engine.train.run import train as run

    recipe = Recipe.of(architecture, epochs)
    source, target = splits(data, test)
    images = read(source, data_root)
    if out is None:
        out = default_out(architecture, data, seed)
        out.parent.mkdir(exist_ok=True)
    with progress_bar() as progress:
        outcome = run(
            architecture,
            recipe,
            images,
            read(target, data_root, images.classes),
            out,
            seed=seed,
            device=at,
            seconds=seconds,
            progress=progress,
        )
    if outcome.metadata is None:
        say(f"{outcome.epochs} of {outcome.of} epochs: the same command goes on from there.")
    else:
        say(f"{out}: {outcome.metadata.accuracy:.2%} of {outcome.metadata.test['name']} right.")


def default_out(architecture: str, data: str, seed: int) -> Path:
    """Where a checkpoint goes unless told otherwise: where sweeps look for it.

    >>> str(default_out("resnet18", "cifar10", 0))
    'checkpoints/resnet18-cifar10-0.safetensors'
    """
    return (
        Path("checkpoints")
        / f"{architecture}-{Path(data.partition(':')[0]).stem}-{seed}.safetensors"
    )
