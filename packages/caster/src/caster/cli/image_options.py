"""What the commands on images share: their options, and one line for what was skipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from caster.cli.console import counted, errors, say
from caster.cli.model_options import PANEL as MODEL_PANEL
from caster.config import Limits
from caster.errors import CasterError

if TYPE_CHECKING:
    from caster.io.images import Images

PANEL = "Images"
SAMPLES = "Samples"
NAMED = 5  # skipped images named one by one

SkipUnreadable = Annotated[
    bool,
    typer.Option(
        "--skip-unreadable",
        help="Leave out images that cannot be decoded, instead of stopping at the first.",
        rich_help_panel=PANEL,
    ),
]
DataRoot = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Where named sets lie, instead of $CASTER_DATA.",
        rich_help_panel=PANEL,
    ),
]
Store = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="FOLDER",
        help="Where features are kept, instead of ~/.cache/caster.",
        rich_help_panel=PANEL,
    ),
]
LIMITS = tuple(field.name for field in fields(Limits))
MaxOption = Annotated[
    list[str] | None,
    typer.Option(
        "--max",
        metavar="NAME=NUMBER",
        help=f"Allow larger input; repeat it for several of {', '.join(LIMITS)}.",
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Samples adapted to together.")]
OtherModel = Annotated[
    bool,
    typer.Option(
        "--allow-other-model",
        help="Use a state that was fitted with another model.",
        rich_help_panel=MODEL_PANEL,
    ),
]
OtherPreprocessing = Annotated[
    bool,
    typer.Option(
        "--allow-other-preprocessing",
        help="Use one that was fitted with other preprocessing.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Tau = Annotated[
    float | None,
    typer.Option(help="Largest accepted ratio. [default: the state's; 1 for layers]"),
]
NoSafeguards = Annotated[
    bool,
    typer.Option(
        "--no-safeguards",
        rich_help_panel=SAMPLES,
        help="Let the certificate alone decide on last-layer transport, also for sources and "
        "class-ordered batches that it is known to harm.",
    ),
]
MechanismOption = Annotated[
    Literal["auto", "layers", "features"],
    typer.Option(
        "--mechanism",
        help="Align the layers inside the network, or transport its last features. auto: layers, "
        "if the state has them and the model shows them.",
    ),
]


def limit_option(which: str) -> Any:
    """The option --limit of a command, which takes these samples."""
    return typer.Option(
        "--limit",
        metavar="N",
        min=1,
        help=f"Use N samples only: {which}.",
        rich_help_panel=SAMPLES,
    )


def limits_of(given: list[str] | None) -> Limits:
    """The limits that a command works under.

    >>> limits_of(["pixels=200000000"]).pixels
    200000000
    """
    changed = {}
    for text in given or ():
        name, _, number = text.partition("=")
        if name not in LIMITS or not number.isascii() or not number.isdigit():
            names = ", ".join(LIMITS)
            raise CasterError(f"--max {text}: say NAME=NUMBER, with NAME one of {names}")
        changed[name] = int(number)
    return Limits(**changed)


def features_path(source: str) -> Path:
    """The feature file that a command without a model is given."""
    from caster.io.image_files import formats

    path = Path(source)
    images = path.is_dir() or (path.exists() and path.suffix.lower() in (".txt", *formats()))
    if images or (":" in source and not path.exists()):
        raise CasterError(f"{source} holds no features: name the model for images with --model")
    if path.suffix == ".npz" and path.is_file():
        from caster.io.feature_files import NpzFile

        names = NpzFile(path).names
        if "images" in names and "features" not in names:
            raise CasterError(f"{source} holds images: name the model they go to with --model")
    return path


def opened(
    source: str | Path | Sequence[Path], root: Path | None, limits: Limits, labelled: bool = True
) -> Images:
    """Open images, and name the files in a folder that are not."""
    from caster.io.image_files import describe_skipped
    from caster.io.images import open_images

    images = open_images(source, root, labelled, limits)
    if images.skipped:
        say(f"caster: {describe_skipped(images.skipped)}", errors)
    return images


def say_skipped(unreadable: list[str]) -> None:
    """Name the images that were left out."""
    if not unreadable:
        return
    say(f"caster: skipped {counted(len(unreadable), 'unreadable image')}:", errors)
    for line in unreadable[:NAMED]:
        say(f"  {line}", errors)
    if len(unreadable) > NAMED:
        say(f"  and {len(unreadable) - NAMED:,} more", errors)
