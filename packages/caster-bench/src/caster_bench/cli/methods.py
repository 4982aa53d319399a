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

    from caster_bench.methods.registry import Entry


def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Describe one method and its settings.")
    ] = None,
) -> None:
    """List test-time adaptation methods, what they need, and whether they use gradients.

    Any of them can be gated by name: `sar+certificate`, `t3a+referee`.
    """
    from caster_bench.methods.registry import entries, find

    if name is None:
        output.print(_table(entries()))
    else:
        _describe(find(name))


def _table(entries: list[Entry]) -> Table:
    table = new_table("method", "what it does", "needs", "gradients")
    table.columns[0].no_wrap = True
    table.columns[2].max_width = 16  # leaves room for the summary
    for entry in entries:
        needs = ", ".join(entry.needs) or "-"
        cells = (entry.name, entry.summary, needs, "yes" if entry.gradients else "no")
        table.add_row(*map(Text, cells))
    return table


def _describe(entry: Entry) -> None:
    from caster_bench.methods.gates import GATES, keywords

    options = entry.options()  # first: fails if the method or a library cannot be loaded
    say(f"{entry.name}: {entry.summary}\n")
    if (description := _description(entry.maker())) != entry.summary:
        say(description)
    say(f"\nneeds      {', '.join(entry.needs) or 'only a model'}")
    say(f"gradients  {'yes' if entry.gradients else 'no'}")
    if entry.revision is not None:
        say(f"revision   {entry.revision}")
    for setting, default in options.items():
        say(f"setting    {setting} = {default!r}")
    for preset, settings in entry.presets.items():
        say(f"preset     {preset}: {', '.join(f'{k} = {v!r}' for k, v in settings.items())}")
    if entry.gate is not None:
        gate = GATES[entry.gate]
        say(f"\nbehind the {entry.gate}: {_description(gate)}")
        for setting, default in keywords(gate).items():
            say(f"gate       {setting} = {default!r}")


def _description(maker: Callable[..., object]) -> str:
    """The docstring of a method or gate, without its example."""
    text = inspect.getdoc(maker) or ""
    return text.partition(">>>")[0].strip()
