"""The commands `caster bench plan` and `caster bench run`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from caster.cli.options import DataRoot
from caster.errors import CasterError
from caster_bench.cli.bench_options import Backbones, Only, Root, Runs, SweepFile

if TYPE_CHECKING:
    from collections.abc import Callable

    from caster_bench.engine.executors import Executor
    from caster_bench.engine.run_context import RunContext
    from caster_bench.sweeps import Sweep


class Executors(StrEnum):
    """What runs the cells."""

    LOCAL = "local"
    RAY = "ray"


def plan(
    sweep: SweepFile,
    out: Runs = None,
    root: Root = None,
    data_root: DataRoot = None,
    only: Only = None,
    backbone: Backbones = None,
    cells: Annotated[bool, typer.Option("--cells", help="List every cell.")] = False,
) -> None:
    """List the cells of a sweep: which have a record, and what the others are expected to cost.

    Costs come from the times of similar cells in this run; without any, they are a guess from the
    method and the number of images.
    """
    from caster_bench.cli.bench_view import show_plan
    from caster_bench.engine.executors.local import select_devices
    from caster_bench.engine.plan import Costs, groups_of, make_plan

    known, context = _open(sweep, out, root, data_root, select_devices(None)[0])
    made = make_plan(known, context, only, backbones=backbone or ())
    show_plan(made, Costs(made), list(groups_of(made.missing)), by_cell=cells)


def run(
    sweep: SweepFile,
    out: Runs = None,
    root: Root = None,
    data_root: DataRoot = None,
    only: Only = None,
    backbone: Backbones = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes. [default: one per core; up to 6 per GPU]"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:1. [default: every GPU, or the CPU]")
    ] = None,
    executor: Annotated[
        Executors, typer.Option(help="Processes of this machine, or a Ray cluster.")
    ] = Executors.LOCAL,
    address: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of the Ray cluster, whose nodes must all see the same folders. "
            "[default: start Ray on this machine]"
        ),
    ] = None,
) -> None:
    """Run the cells of a sweep that have no record yet.

    Backbones are admitted first; the cells of a checkpoint that is missing, damaged or inaccurate
    on clean images are recorded as rejected. Run the same command again to continue a run that was
    stopped; damaged records are made again. Cells that fail are listed at the end, and the exit
    status is then 1.
    """
    from caster_bench.cli.bench_view import live_progress, show_summary
    from caster_bench.engine.run import run as run_sweep

    if address is not None and executor is not Executors.RAY:
        raise CasterError("{argument} requires --executor ray", argument="address")
    first, start = _executor(executor, device, workers, address)
    known, context = _open(sweep, out, root, data_root, first)
    with live_progress() as watch:
        summary = run_sweep(known, context, lambda: start(context), watch, only, backbone or ())
    show_summary(summary, context.out)
    if summary.failures:
        raise typer.Exit(1)


def _open(
    sweep: Path, out: Path | None, root: Path | None, data_root: Path | None, device: str
) -> tuple[Sweep, RunContext]:
    from caster_bench.engine.run_context import RunContext
    from caster_bench.sweeps import read

    known = read(sweep)
    folder = out or Path("runs") / known.name
    return known, RunContext.of(known, folder, root, data_root, device)


def _executor(
    executor: Executors, device: str | None, workers: int | None, address: str | None
) -> tuple[str, Callable[[RunContext], Executor]]:
    """Return the device of the run, and how to start the executor once there is work for it."""
    if executor is Executors.RAY:
        from caster_bench.engine.executors.ray import AUTO, RayExecutor

        return device or AUTO, lambda context: RayExecutor(context, address, workers)
    from caster_bench.engine.executors.local import LocalExecutor, allocate_cores, select_devices

    devices = select_devices(device)
    cores = allocate_cores(devices, workers)
    return devices[0], lambda context: LocalExecutor(context, devices, *cores)
