"""The methods command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from caster.cli.console import new_table, output, say

if TYPE_CHECKING:
    from rich.table import Table

    from caster_bench.methods.catalogue import Entry


def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="One method, with its settings.")
    ] = None,
) -> None:
    """List the methods of test-time adaptation, what they need, and whether they use gradients.

    Any of them goes behind a gate by name: `sar+certificate`, `t3a+referee`.
    """
    from caster_bench.methods.registry import entries, find

    if name is None:
        output.print(_table(entries()))
    else:
        _describe(find(name))


def _table(entries: list[Entry]) -> Table:
    table = new_table("method", "what it does", "needs", "gradients")
    table.columns[0].no_wrap = True
    table.columns[2].max_width = 16  # so that the description gets the room
    for entry in entries:
        needs = ", ".join(entry.needs) or "-"
        words = (entry.name, entry.line, needs, "yes" if entry.gradients else "no")
        table.add_row(*map(Text, words))
    return table


def _describe(entry: Entry) -> None:
    from caster_bench.methods.gates import GATES, keywords

    options = entry.options()  # first: it fails where a library is missing
    say(f"{entry.name}: {entry.line}\n")
    say(_words(entry.maker()))
    say(f"\nneeds      {', '.join(entry.needs) or 'nothing but a model'}")
    say(f"gradients  {'yes' if entry.gradients else 'no'}")
    for setting, default in options.items():
        say(f"setting    {setting} = {default!r}")
    for preset, settings in entry.presets.items():
        say(f"preset     {preset}: {', '.join(f'{k} = {v!r}' for k, v in settings.items())}")
    if entry.gate is not None:
        gate = GATES[entry.gate]
        say(f"\nbehind the {entry.gate}: {_words(gate)}")
        for setting, default in keywords(gate).items():
            say(f"gate       {setting} = {default!r}")


def _words(maker: Callable[..., object]) -> str:
    """What its author says of a method or a gate, without the example."""
    text = inspect.getdoc(maker) or ""
    return text.partition(">>>")[0].strip()
