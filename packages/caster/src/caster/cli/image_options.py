"""Options and messages that the commands on images share."""

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
        help="Skip images that cannot be decoded, instead of stopping at the first.",
        rich_help_panel=PANEL,
    ),
]
DataRoot = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder of the published sets, instead of $CASTER_DATA.",
        rich_help_panel=PANEL,
    ),
]
Store = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="FOLDER",
        help="Folder for cached features, instead of the user's cache folder.",
        rich_help_panel=PANEL,
    ),
]
LIMITS = tuple(field.name for field in fields(Limits))
MaxOption = Annotated[
    list[str] | None,
    typer.Option(
        "--max",
        metavar="NAME=NUMBER",
        help=f"Raise a limit on the input; repeatable. Limits: {', '.join(LIMITS)}.",
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Samples per batch.")]
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
        help="Use a state that was fitted with other preprocessing.",
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
        help="Disable the safeguards of feature transport, as in the paper: it then also adapts "
        "with small sources and on batches sorted by class, where it does harm.",
    ),
]
MechanismOption = Annotated[
    Literal["auto", "layers", "features"],
    typer.Option(
        "--mechanism",
        help="Align the layers inside the network, or transport its last features. auto: layers, "
        "if the state has them and the model exposes them.",
    ),
]


def limit_option(which: str) -> Any:
    """The option --limit; `which` says how the samples are chosen."""
    return typer.Option(
        "--limit",
        metavar="N",
        min=1,
        help=f"Use only N samples: {which}.",
        rich_help_panel=SAMPLES,
    )


def limits_of(given: list[str] | None) -> Limits:
    """Parse the options --max.

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
    """The feature file of a command without --model."""
    from caster.io.image_files import formats

    path = Path(source)
    images = path.is_dir() or (path.exists() and path.suffix.lower() in (".txt", *formats()))
    if images or (":" in source and not path.exists()):
        raise CasterError(f"{source} is not a feature file: give a model for images with --model")
    if path.suffix == ".npz" and path.is_file():
        from caster.io.feature_files import NpzFile

        names = NpzFile(path).names
        if "images" in names and "features" not in names:
            raise CasterError(f"{source} holds images: give a model for them with --model")
    return path


def opened(
    source: str | Path | Sequence[Path], root: Path | None, limits: Limits, labelled: bool = True
) -> Images:
    """Open images, and print which files of a folder are not images."""
    from caster.io.image_files import describe_skipped
    from caster.io.images import open_images

    images = open_images(source, root, labelled, limits)
    if images.skipped:
        say(f"caster: {describe_skipped(images.skipped)}", errors)
    return images


def say_skipped(unreadable: list[str]) -> None:
    """Print the images that were skipped."""
    if not unreadable:
        return
    say(f"caster: skipped {counted(len(unreadable), 'unreadable image')}:", errors)
    for line in unreadable[:NAMED]:
        say(f"  {line}", errors)
    if len(unreadable) > NAMED:
        say(f"  and {len(unreadable) - NAMED:,} more", errors)
