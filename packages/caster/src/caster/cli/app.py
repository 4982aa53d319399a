"""The application: its commands, and how errors and Ctrl-C end it."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from importlib.metadata import entry_points
from typing import Annotated, Any, NoReturn

import typer

from caster._version import __version__
from caster.cli import cache, demo, evaluate, fit, inspect, predict
from caster.cli.console import Warnings, errors, option_of, say
from caster.errors import MAKE_ROOM, CasterError, is_disk_full, machine_message

app = typer.Typer(
    name="caster",
    help="Adapt a frozen classifier to the data it meets, and say when not to.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _ending_well(command: Callable[..., None]) -> Callable[..., None]:
    """Bad input, a machine at its limits and Ctrl-C end in one line and a non-zero status."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except CasterError as error:
            _end(error.phrased(option_of(error.argument)), error)
        except BrokenPipeError:  # whoever read the output has gone: click ends that quietly
            raise
        except (MemoryError, RecursionError, OSError) as error:
            _end(machine_message(error), error)
        except KeyboardInterrupt as interrupt:
            say(f"caster: interrupted, {str(interrupt) or 'nothing was written'}", errors)
            raise typer.Exit(130) from None

    return run


def _end(message: str, error: BaseException) -> NoReturn:
    """Print why a command failed, and what to do about a full disk; exit with status 1."""
    say(f"caster: {message}{f': {MAKE_ROOM}' if is_disk_full(error) else ''}", errors)
    raise typer.Exit(1) from None


for _command in (
    fit.fit,
    predict.predict,
    evaluate.evaluate,
    inspect.inspect,
    inspect.doctor,
    demo.demo,
):
    app.command()(_ending_well(_command))


_kept = typer.Typer(help="Kept features: list them, clear them.", invoke_without_command=True)
_kept.callback()(_ending_well(cache.show))
_kept.command("clear")(_ending_well(cache.clear))
app.add_typer(_kept, name="cache")


for _plugin in entry_points(group="caster.commands"):  # caster-bench adds its own
    _plugin.load()(app, _ending_well)


logging.getLogger("caster").addHandler(Warnings())


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"caster {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):  # a file name that is not UTF-8 is printed all the same
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Pillow warns of images that caster rejects by its own limit, in a line of its own.
    warnings.filterwarnings("ignore", "Image size .* exceeds limit")
    app()
