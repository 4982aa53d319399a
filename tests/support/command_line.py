"""The `caster` command, as a user types it."""

from __future__ import annotations

from typer.testing import CliRunner

from caster.cli.app import app


def cli(*words, columns=None):
    """Run the command; words are anything that reads as it is typed."""
    environment = {} if columns is None else {"COLUMNS": str(columns)}
    return CliRunner().invoke(app, [str(word) for word in words], env=environment)


def refusal(result) -> str:
    """The one line that a command ended in, without its name."""
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("caster: ")
    return line.removeprefix("caster: ")
