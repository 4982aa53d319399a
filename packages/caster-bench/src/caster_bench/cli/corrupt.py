"""The corrupt command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from caster.cli.console import progress_bar, say, size
from caster.cli.options import DataRoot, MaxOption, limits_of, opened
from caster.errors import CasterError, counted

RESUME = "run it again to resume"


def corrupt(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="Labelled images: a named set such as cifar10:test, an .npz with `images` and "
            "`labels`, or a folder with one folder per class.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write or to resume.")],
    corruption: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="One of the nineteen, or `all`, `reported` (fifteen) or `spare` (four); repeat "
            "it, or separate names by commas. [default: all]",
        ),
    ] = None,
    severity: Annotated[str, typer.Option(help="Such as 1-5, 3 or 1,3,5.")] = "1-5",
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes; the bytes do not depend on it. [default: one per processor]",
            show_default=False,
        ),
    ] = None,
    frost_textures: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Photographs of frost, instead of drawn textures."),
    ] = None,
    data_root: DataRoot = None,
    larger: MaxOption = None,
) -> None:
    """Make a corrupted copy of a set: nineteen corruptions at five severities.

    Arrays become the files of CIFAR-C, image files the folders of ImageNet-C (224 pixels, JPEG).
    A manifest records how they were made, and their digests. The same command resumes an
    interrupted run.
    """
    names, severities = _names(corruption or ["all"]), _severities(severity)
    limits = limits_of(larger)
    from caster.core.threads import available_cores
    from caster_bench.data.corrupt_job import corrupt_images

    with progress_bar() as progress:
        try:
            done = corrupt_images(
                opened(data, data_root, limits),
                out,
                corruptions=names,
                severities=severities,
                seed=seed,
                textures=frost_textures,
                workers=workers or available_cores(),
                progress=progress,
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(RESUME) from None
    existing = f", {done.existing:,} there already" if done.existing else ""
    combinations = f"{counted(done.made, 'combination')} of corruption and severity made{existing}"
    say(f"{counted(done.images, 'image')}: {combinations}")
    say(f"Written: {out}, as {done.layout} ({size(done.size)}); see {out / 'manifest.json'}")


def _names(values: list[str]) -> list[str]:
    from caster_bench.sweeps.spec import GROUPS

    words = [word.strip() for value in values for word in value.split(",")]
    return [name for word in words for name in GROUPS.get(word, (word,))]


def _severities(text: str) -> list[int]:
    """Parse severities such as 1-3,5.

    >>> _severities("1-3,5")
    [1, 2, 3, 5]
    """
    found: list[int] = []
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        try:
            low, high = int(first), int(last if dash else first)
        except ValueError:
            low, high = 0, -1
        if not 1 <= low <= high <= 5:
            raise CasterError(
                f"{text!r} is not a list of severities: give numbers from 1 to 5, as in 1-5, 3 or "
                "1,3,5"
            )
        found += range(low, high + 1)
    return found
