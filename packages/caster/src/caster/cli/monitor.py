"""The monitor command."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from caster.cli.console import counted, errors, new_table, output, say
from caster.errors import CasterError
from caster.io.files import check_writable

if TYPE_CHECKING:
    from rich.table import Table

LARGE = 1000  # a ratio from which on its size says nothing


def monitor(
    log: Annotated[
        Path, typer.Argument(metavar="LOG", help="Folder of logs, as of `caster predict --log`.")
    ],
    stream: Annotated[str | None, typer.Option(metavar="ID", help="Show this stream only.")] = None,
    page: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="PAGE", help="Write an HTML page.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show where streams stand: verdicts, drift, risk, estimated accuracy and alarms.

    The page needs no network and works on a phone. Every alarm comes with what it means and what
    to do.
    """
    from caster.monitor.page import from_folder, render

    if page is not None:
        check_writable(page)
    data = from_folder(log, stream, time.time())
    if not data["streams"]:
        raise CasterError(f"{log} has no logs of streams: pass the folder of `predict --log`")
    if as_json:
        typer.echo(json.dumps(data))
    else:
        output.print(_table(data))
        for each in data["streams"]:
            _say_alarms(each, data["texts"])
    for problem in data["damaged"]:
        say(f"caster: {problem}", errors)
    if page is not None:
        from caster.io.files import replacing

        with replacing(page) as temporary:
            temporary.write_text(render(data), encoding="utf-8")
        say(f"Written: {page}", errors if as_json else output)


def _table(data: dict[str, Any]) -> Table:
    title = f"{counted(len(data['streams']), 'stream')}, {counted(data['samples'], 'sample')}"
    numbers = ("samples", "accepted", "ratio", "drift", "accuracy", "uncertain")
    table = new_table("stream", "alarms", *numbers, numbers=numbers, title=title)
    for each in data["streams"]:
        served, risk, drift = each["accuracy"].get("served"), each["risk"], each["drift"]
        table.add_row(
            Text(each["name"]),
            ", ".join(each["active"]) or "none",
            f"{each['samples']:,}",
            _percent(each["acceptance"], 0),
            _ratio(each["ratio"]),
            "" if drift is None else f"{drift['given_mixture']['wasserstein']:.2f}",
            "" if served is None else _span(served),
            "" if risk is None else f"{100 * risk['mean']:.0f} of {_percent(risk['limit'], 0)}",
        )
    return table


def _say_alarms(stream: dict[str, Any], texts: dict[str, tuple[str, str]]) -> None:
    for alarm in stream["alarms"]:
        if alarm["until"] is None:
            meaning, action = texts[alarm["kind"]]
            say(f"{stream['name']}, since sample {alarm['position']:,}: {meaning} {action}")
    if not stream["calibrated"]:
        say(
            f"caster: {stream['name']} was logged without a sketch of the source: drift, risk and "
            "estimated accuracy need a state fitted without --no-sketch",
            errors,
        )


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.2f}" if ratio < LARGE else f">{LARGE}"


def _span(values: list[float]) -> str:
    """An interval of the estimated accuracy."""
    return f"{100 * values[1]:.0f}-{100 * values[2]:.0f} %"


def _percent(share: float | None, digits: int) -> str:
    return "" if share is None else f"{100 * share:.{digits}f} %"
