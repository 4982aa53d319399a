"""The application: its commands, and how they end on errors and Ctrl-C."""

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
from typer.core import TyperGroup

from caster._version import __version__
from caster.cli import cache, compile, demo, evaluate, fit, inspect, monitor, predict, serve
from caster.cli.console import Warnings, errors, say
from caster.errors import MAKE_ROOM, CasterError, is_disk_full, machine_message

PURPOSE = "Adapt a frozen classifier to shifted data, with a verdict on every batch."
FIRST_STEPS = f"""\
{PURPOSE}

  caster demo                                       see it work, in seconds
  caster fit --model M TRAIN -o m.caster            measure the source, once
  caster doctor m.caster                            see what to expect
  caster evaluate --model M m.caster TEST           measure whether it helps
  caster predict --model M m.caster NEW -o out.csv  predict, with verdicts

M is an .onnx file (with --preprocessing FILE.toml), timm:NAME, hf:FOLDER or
FILE.py:FACTORY. TRAIN and TEST contain one folder of images per class.
The demo needs two extras: pip install 'caster-tta[onnx,report]'
All commands: caster --help"""


BENCH = ("bench", "corrupt", "data", "methods")  # commands that caster-bench adds


class _Commands(TyperGroup):
    """All commands, without Typer's check of files and the types that its help gives flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        _adjust_parameters(self)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Find a command; if it belongs to caster-bench and is missing, say how to install it."""
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in BENCH:
            ctx.fail(f"`caster {cmd_name}` needs caster-bench: pip install caster-bench")
        return found


def _adjust_parameters(command: Any) -> None:
    for parameter in command.get_params(typer.Context(command)):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""  # Typer 0.29 prints `<bool>`
        # Typer would end with its usage for a file that it cannot read, even one to replace.
        before_typer_0_29 = getattr(parameter, "type", None)
        (before_typer_0_29 or parameter.type_descriptor.parameter_info).readable = False
    for inner in getattr(command, "commands", {}).values():
        _adjust_parameters(inner)


app = typer.Typer(
    name="caster",
    cls=_Commands,
    help=PURPOSE,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _safely(command: Callable[..., None]) -> Callable[..., None]:
    """Exit with one line and a non-zero status on bad input, a failing machine or Ctrl-C."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except CasterError as error:
            _end(error.on_command_line, error)
        except BrokenPipeError:  # nobody reads the output any more: click exits quietly
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
    compile.compile,
    serve.serve,
    inspect.inspect,
    inspect.doctor,
    monitor.monitor,
    demo.demo,
):
    app.command()(_safely(_command))


_cache = typer.Typer(help="List cached features, or clear them.", invoke_without_command=True)
_cache.callback()(_safely(cache.show))
_cache.command("clear")(_safely(cache.clear))
app.add_typer(_cache, name="cache")


for _plugin in entry_points(group="caster.commands"):  # caster-bench adds its own
    _plugin.load()(app, _safely)


logging.getLogger("caster").addHandler(Warnings())


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"caster {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        say(FIRST_STEPS)


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):  # file names may not be UTF-8
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # caster has its own limit on image size.
    warnings.filterwarnings("ignore", "Image size .* exceeds limit")
    app()
