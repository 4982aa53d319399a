"""Commands on published sets: list, check, get."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from caster.cli.console import output, progress_bar, say
from caster.cli.options import DataRoot

if TYPE_CHECKING:
    from caster_bench.data.sets.check import SetStatus
    from caster_bench.data.sets.dataset import SplitGroup

MAX_SHOWN = 8  # lines of a kind on a terminal
SetName = Annotated[
    str, typer.Argument(metavar="NAME", help="A set, or one of its splits: cifar10, pacs:sketch.")
]


def list_sets() -> None:
    """List the published sets that have a loader, their sources and licences.

    Any folder with one folder per class, and any .npz file with `images` and `labels`, can be used
    too: give its path.
    """
    from caster_bench.data.sets import SETS

    for name, data in SETS.items():
        splits = ", ".join(map(_describe, data.splits))
        classes = f"{data.classes:,}"
        if data.classes_present:
            classes = f"{data.classes_present} of {classes}"
        say(f"{name:<16} {data.title}: {splits} images, {classes} classes")
        how = f"caster data get {name}" if data.archives else "by hand"
        say(f"{'':<16} {data.page} ({how})")
        say(f"{'':<16} licence: {data.licence}")


def check(name: SetName, data_root: DataRoot = None) -> None:
    """Check that a set is complete: files, counts, and published digests.

    Exits with status 1 if anything is missing or differs from what was published.
    """
    from caster_bench.data.sets.check import check as check_set

    with progress_bar() as progress:
        status = check_set(name, data_root, progress)
    _show(status)
    if not status.complete:
        raise typer.Exit(1)


def get(name: SetName, data_root: DataRoot = None) -> None:
    """Download a set, or what is missing of it, if its publisher allows anyone to.

    Interrupted downloads are resumed, and every file is verified against its published digest. For
    other sets, prints where to request access.
    """
    from rich.progress import DownloadColumn

    from caster_bench.data.sets import download
    from caster_bench.data.sets.check import check as check_set

    with progress_bar(DownloadColumn()) as progress:
        try:
            archives = download.get(name, data_root, progress)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(download.RESUME) from None
    with progress_bar() as progress:
        status = check_set(name, data_root, progress)
    for archive in archives:
        kind = archive.digest.partition(":")[0].upper()
        say(f"{archive.file_name}: its {kind} matches the one from {archive.digest_source}")
    _show(status)
    if not status.complete:
        say("existing files were left as they are: remove the wrong ones and get the set again")
        raise typer.Exit(1)


def _show(status: SetStatus) -> None:
    if not status.present:
        say(f"{status.name} is not there")
        say_first(_missing(status))
        return
    for split in status.splits if len(status.splits) <= MAX_SHOWN else ():
        count = "cannot be opened" if split.images is None else f"{split.images:,}"
        say(f"  {split.split:<18} {count} of {split.expected:,} images")
    complete = sum(split.complete for split in status.splits)
    folders = ", ".join(dict.fromkeys(str(s.folder) for s in status.splits if s.present))
    say(f"{status.name} in {folders}: {complete} of {len(status.splits)} splits complete")
    say_first(_missing(status))
    say_first(status.problems())
    changed = status.changed()
    say_first([f"not the published file, its MD5 differs: {path}" for path in changed])
    if status.digests_match and not changed:
        say(f"{len(status.digests_match)} files have the published MD5")
    say("complete" if status.complete else "not complete, or not as published")


def _missing(status: SetStatus) -> list[str]:
    return [
        f"missing: {os.path.join(folder, file)}"
        for folder, files in status.missing().items()
        for file in files
    ]


def say_first(lines: list[str]) -> None:
    """Print the first lines on a terminal, and all of them to a pipe."""
    shown = lines[:MAX_SHOWN] if output.is_terminal else lines
    for line in shown:
        say(line)
    if more := len(lines) - len(shown):
        say(f"and {more:,} more: pipe the output to see them")


def _describe(group: SplitGroup) -> str:
    names = f"{len(group.names)} of {group.pattern}" if group.pattern else ", ".join(group.names)
    return f"{names} {'each ' if len(group.names) > 1 else ''}{group.images:,}"
