"""The commands that caster-bench adds to `caster`: bench, corrupt, data and methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from caster_bench.cli import bench, bench_report, bench_train, corrupt, data, methods

Command = Callable[..., Any]


def register(app: typer.Typer, safely: Callable[[Command], Command]) -> None:
    """Add every command of the benchmark to the application."""
    app.command()(safely(corrupt.corrupt))
    app.command()(safely(methods.methods))
    _add_group(
        app,
        "data",
        "Published data sets: list, check and download them.",
        {"list": data.list_sets, "check": data.check, "get": data.get},
        safely,
    )
    _add_group(
        app,
        "bench",
        "Benchmark sweeps: plan, run, verify, report, pack, rank.",
        {
            "plan": bench.plan,
            "run": bench.run,
            "verify": bench_report.verify,
            "report": bench_report.report,
            "pack": bench_report.pack,
            "claims": bench_report.claims,
            "leaderboard": bench_report.leaderboard,
            "train": bench_train.train,
        },
        safely,
    )


def _add_group(
    app: typer.Typer,
    name: str,
    help_text: str,
    commands: dict[str, Command],
    safely: Callable[[Command], Command],
) -> None:
    group = typer.Typer(help=help_text, no_args_is_help=True)
    for command_name, command in commands.items():
        group.command(command_name)(safely(command))
    app.add_typer(group, name=name)
