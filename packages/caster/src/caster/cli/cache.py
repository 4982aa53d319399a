"""Commands on the feature cache: cache, cache clear."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from caster.cli.console import errors, new_table, output, say, size

if TYPE_CHECKING:
    from caster.io.feature_cache import EntryInfo

DAY = 86_400  # seconds
Folder = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="FOLDER",
        help="Cache folder. [default: caster in the user's cache folder]",
    ),
]


def show(context: typer.Context, store: Folder = None) -> None:
    """List cached features: model and images, size and age."""
    from caster.io.feature_cache import default_store, list_entries

    context.obj = store
    if context.invoked_subcommand is not None:
        return
    root = store or default_store()
    entries = list_entries(root)
    if not entries:
        say(f"No features are cached in {root}.")
        return
    table = new_table("features of", "images", "size", "age", numbers=("images", "size", "age"))
    for entry in entries:
        images = "" if entry.manifest is None else f"{entry.manifest.seen:,}"
        table.add_row(Text(_title(entry)), images, size(entry.bytes), _age(entry.age))
    output.print(table)
    say(f"{_total(entries)} in {root}.")


def clear(
    context: typer.Context,
    older_than: Annotated[
        float,
        typer.Option(
            metavar="DAYS",
            min=0,
            help="Only remove features last written at least this many days ago.",
        ),
    ] = 0.0,
    store: Folder = None,
) -> None:
    """Remove cached features, and nothing else; those in use by another process stay."""
    from caster.io.feature_cache import default_store, remove_entries

    root = store or context.obj or default_store()
    removed, in_use = remove_entries(root, older_than * DAY)
    for entry in in_use:
        say(f"caster: not removed, because another caster is using it: {_title(entry)}", errors)
    say(f"Removed {_total(removed)} from {root}.")


def _title(entry: EntryInfo) -> str:
    title = (entry.manifest and entry.manifest.description) or f"entry {entry.key[:12]}"
    state = "" if entry.complete else " (damaged)" if entry.manifest is None else " (unfinished)"
    return f"{title}{state}"


def _total(entries: list[EntryInfo]) -> str:
    count = "1 entry" if len(entries) == 1 else f"{len(entries):,} entries"
    return f"{count}, {size(sum(entry.bytes for entry in entries))}"


def _age(seconds: float) -> str:
    """Format a duration in its largest unit.

    >>> _age(59), _age(7_200), _age(90_000)
    ('0 min', '2 h', '1 d')
    """
    for unit, length in (("d", DAY), ("h", 3600)):
        if seconds >= length:
            return f"{seconds // length:,.0f} {unit}"
    return f"{seconds // 60:.0f} min"
