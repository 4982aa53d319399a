"""Arguments and options that several commands of `caster bench` have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SweepFile = Annotated[Path, typer.Argument(metavar="SWEEP", help="TOML file of the sweep.")]
Runs = Annotated[
    Path | None,
    typer.Option("--out", metavar="RUNS", help="Folder of the run; runs/NAME of the sweep."),
]
Root = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="What checkpoints are relative to; the current folder."),
]
Only = Annotated[str | None, typer.Option(metavar="STUDY", help="The cells of one study only.")]
Backbones = Annotated[
    list[str] | None,
    typer.Option(
        "--backbone",
        metavar="NAME",
        help="The cells of this backbone only, as the sweep names it; give it several times for "
        "several. The others need not be there, and are not refused.",
    ),
]
