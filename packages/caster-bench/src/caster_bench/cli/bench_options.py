"""Arguments and options shared by several commands of `caster bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SweepFile = Annotated[Path, typer.Argument(metavar="SWEEP", help="TOML file of the sweep.")]
Runs = Annotated[
    Path | None,
    typer.Option("--out", metavar="RUNS", help="Folder of the run. [default: runs/NAME]"),
]
Root = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder that checkpoint paths are relative to. [default: the current folder]",
    ),
]
Only = Annotated[str | None, typer.Option(metavar="STUDY", help="Only the cells of one study.")]
Backbones = Annotated[
    list[str] | None,
    typer.Option(
        "--backbone",
        metavar="NAME",
        help="Only the cells of this backbone, by its name in the sweep; repeat it for several. "
        "The others need not exist and are not rejected.",
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        metavar="NAME",
        help="Only the cells of this method, with any settings; repeat it for several.",
    ),
]
