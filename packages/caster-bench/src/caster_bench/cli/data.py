"""Commands on published sets: list, check, get."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import DownloadColumn

from caster.cli.console import output, progress_bar, say
from caster.cli.image_options import DataRoot

if TYPE_CHECKING:
    from caster_bench.data.sets.check import Checked
    from caster_bench.data.sets.layout import Splits

SHOWN = 8  # lines of a kind on a terminal
SetName = Annotated[
    str, typer.Argument(metavar="NAME", help="A set, or one of its splits: cifar10, pacs:sketch.")
]


def list_sets() -> None:
    """List the published sets that have a loader, where they come from, and their licences.

    Besides, any folder with one folder a class, and any .npz file with `images` and `labels`, is
    a set: give its path.
    """
    from caster_bench.data.sets import SETS

    for name, data in SETS.items():
        splits = ", ".join(map(_spelt, data.splits))
        classes = f"{data.present} of {data.classes:,}" if data.present else f"{data.classes:,}"
        say(f"{name:<16} {data.title}: {splits} images, {classes} classes")
        how = f"caster data get {name}" if data.archives else "by hand"
        say(f"{'':<16} {data.source} ({how})")
        say(f"{'':<16} licence: {data.licence}")


def check(name: SetName, data_root: DataRoot = None) -> None:
    """Say whether a set is there, and all of it: files, counts, and digests where they are known.

    Ends with status 1 where something is missing or not as it was published.
    """
    from caster_bench.data.sets import check as checks

    with progress_bar() as report:
        checked = checks.check(name, data_root, report)
    _show(checked)
    if not checked.complete:
        raise typer.Exit(1)


def get(name: SetName, data_root: DataRoot = None) -> None:
    """Download a set, or what is missing of it, where its publisher lets anyone do so.

    A download that was interrupted goes on where it stopped, and every file is compared with its
    published digest. Sets that need their publisher's leave say where to ask.
    """
    from caster_bench.data.sets import check as checks
    from caster_bench.data.sets import get as gets

    with progress_bar(DownloadColumn()) as report:
        try:
            taken = gets.get(name, data_root, report)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("what came is kept: run it again to go on") from None
    with progress_bar() as report:
        checked = checks.check(name, data_root, report)
    for archive in taken:
        kind = archive.digest.partition(":")[0].upper()
        say(f"{archive.file}: its {kind} is the one that {archive.stated_by} states")
    _show(checked)
    if not checked.complete:
        say("what was there before is left as it is: remove what is amiss, and get it anew")
        raise typer.Exit(1)


def _show(checked: Checked) -> None:
    if not checked.begun:
        say(f"{checked.name} is not there")
        _list(_missing(checked))
        return
    for split in checked.splits if len(checked.splits) <= SHOWN else ():
        counted = "cannot be opened" if split.images is None else f"{split.images:,}"
        say(f"  {split.split:<18} {counted} of {split.expected:,} images")
    whole = sum(split.complete for split in checked.splits)
    say(f"{checked.name} in {_places(checked)}: {whole} of {len(checked.splits)} splits complete")
    _list(_missing(checked))
    _list(checked.wrong())
    changed = checked.changed()
    _list([f"not the published file, for its MD5 is another: {path}" for path in changed])
    if checked.published and not changed:
        say(f"{len(checked.published)} files have the published MD5")
    say("complete" if checked.complete else "not complete, or not as published")


def _missing(checked: Checked) -> list[str]:
    gaps = checked.gaps().items()
    return [f"missing: {os.path.join(folder, file)}" for folder, files in gaps for file in files]


def _list(lines: list[str]) -> None:
    """Every line where the output is piped, and on a terminal the first of them."""
    shown = lines[:SHOWN] if output.is_terminal else lines
    for line in shown:
        say(line)
    if more := len(lines) - len(shown):
        say(f"and {more:,} more: pipe the output to see them")


def _places(checked: Checked) -> str:
    return ", ".join(dict.fromkeys(str(split.folder) for split in checked.splits if split.begun))


def _spelt(splits: Splits) -> str:
    names = f"{len(splits.names)} of {splits.spelt}" if splits.spelt else ", ".join(splits.names)
    return f"{names} {'each ' if len(splits.names) > 1 else ''}{splits.images:,}"
