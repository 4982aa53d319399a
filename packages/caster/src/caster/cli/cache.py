"""Commands on kept features: cache, cache clear."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from caster.cli.console import errors, new_table, output, say, size

if TYPE_CHECKING:
    from caster.io.cache import Kept

DAY = 86_400  # seconds
Folder = Annotated[
    Path | None,
    typer.Option("--cache", metavar="FOLDER", help="The folder, instead of ~/.cache/caster."),
]


def show(context: typer.Context, store: Folder = None) -> None:
    """List the features that are kept: of which model and images, their size and age."""
    from caster.io.cache import entries
    from caster.io.feature_cache import default_store

    context.obj = store
    if context.invoked_subcommand is not None:
        return
    root = store or default_store()
    kept = entries(root)
    if not kept:
        say(f"No features are kept in {root}.")
        return
    table = new_table("features of", "images", "size", "age", numbers=("images", "size", "age"))
    for entry in kept:
        images = "" if entry.note is None else f"{entry.note.seen:,}"
        table.add_row(Text(_what(entry)), images, size(entry.bytes), _age(entry.age))
    output.print(table)
    say(f"{_total(kept)} in {root}.")


def clear(
    context: typer.Context,
    older_than: Annotated[
        float,
        typer.Option(
            metavar="DAYS", min=0, help="Only features that were last written so many days ago."
        ),
    ] = 0.0,
    store: Folder = None,
) -> None:
    """Remove kept features; those that another caster is using stay. Nothing else is removed."""
    from caster.io import cache
    from caster.io.feature_cache import default_store

    root = store or context.obj or default_store()
    removed, in_use = cache.clear(root, older_than * DAY)
    for entry in in_use:
        say(f"caster: left, as another caster is using it: {_what(entry)}", errors)
    say(f"Removed {_total(removed)} from {root}.")


def _what(entry: Kept) -> str:
    of = (entry.note and entry.note.of) or f"entry {entry.key[:12]}"
    state = "" if entry.complete else " (damaged)" if entry.note is None else " (unfinished)"
    return f"{of}{state}"


def _total(kept: list[Kept]) -> str:
    entries = "1 entry" if len(kept) == 1 else f"{len(kept):,} entries"
    return f"{entries}, {size(sum(entry.bytes for entry in kept))}"


def _age(seconds: float) -> str:
    """Seconds in the largest unit there is one of.

    >>> _age(59), _age(7_200), _age(90_000)
    ('0 min', '2 h', '1 d')
    """
    for unit, length in (("d", DAY), ("h", 3600)):
        if seconds >= length:
            return f"{seconds // length:,.0f} {unit}"
    return f"{seconds // 60:.0f} min"
