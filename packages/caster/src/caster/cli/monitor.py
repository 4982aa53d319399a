"""The monitor command."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from caster.cli.console import errors, new_table, output, say
from caster.errors import CasterError, counted
from caster.io.files import check_writable

if TYPE_CHECKING:
    from rich.table import Table

MAX_SHOWN_RATIO = 1000  # ratio above which its size does not matter


def monitor(
    log: Annotated[
        Path,
        typer.Argument(
            metavar="LOG", help="Folder with logs, from `caster predict --log` or `caster serve`."
        ),
    ],
    stream: Annotated[str | None, typer.Option(metavar="ID", help="Show this stream only.")] = None,
    page: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PAGE", help="HTML page to write."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show the status of streams: verdicts, drift, risk, estimated accuracy and alarms.

    Every alarm is explained, with what to do about it. The page is self-contained and works on a
    phone.
    """
    from caster.monitor.page import from_folder, render

    if page is not None:
        check_writable(page)
    data = from_folder(log, stream, time.time())
    if not data["streams"]:
        raise CasterError(f"{log} has no stream logs: pass the folder of `caster predict --log`")
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
            "" if each["acceptance"] is None else f"{each['acceptance']:.0%}",
            _ratio(each["ratio"]),
            "" if drift is None else f"{drift['given_mixture']['wasserstein']:.2f}",
            "" if served is None else _span(served),
            "" if risk is None else f"{risk['mean']:.0%} (limit {risk['limit']:.0%})",
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
    return f"{ratio:.2f}" if ratio < MAX_SHOWN_RATIO else f">{MAX_SHOWN_RATIO}"


def _span(values: list[float]) -> str:
    """Format the interval of an estimated accuracy."""
    return f"{100 * values[1]:.0f}-{values[2]:.0%}"
