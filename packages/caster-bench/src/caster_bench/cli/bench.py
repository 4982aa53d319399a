"""The commands `caster bench plan` and `caster bench run`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from caster.cli.console import PlainConsole, counted, errors, output, say
from caster.cli.image_options import DataRoot
from caster.errors import CasterError
from caster_bench.cli.bench_options import Backbones, Only, Root, Runs, SweepFile
from caster_bench.cli.bench_tables import by_cell, by_method
from caster_bench.cli.live import duration, watching

if TYPE_CHECKING:
    from collections.abc import Callable

    from caster_bench.engine.executors import Executor
    from caster_bench.engine.run import Summary
    from caster_bench.engine.run_context import RunContext
    from caster_bench.sweeps import Sweep

WIDE = 180  # characters, enough for every row

Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, or cuda:1. [default: every GPU there is, or the CPU]")
]


class Executors(StrEnum):
    """Who runs the cells."""

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

    Costs are by what cells like them took in this run; where there are none, a guess by the kind
    of method and the number of images.
    """
    from caster_bench.data.sets.layout import some
    from caster_bench.engine.cost import Costs
    from caster_bench.engine.plan import groups_of, make_plan

    known, place = _opened(sweep, out, root, data_root)
    made = make_plan(known, place, only, backbones=backbone or ())
    costs = Costs(made)
    console = output if output.is_terminal else PlainConsole(width=WIDE)
    console.print((by_cell if cells else by_method)(made, costs.cell))
    missing = made.missing
    groups = list(groups_of(missing))
    seconds = sum(map(costs.group, groups))
    basis = "by what cells took here" if costs.measured else "a guess: nothing has been measured"
    there = len(made.wanted) - len(missing)
    say(
        f"{counted(len(made.wanted), 'cell')}: {there - len(made.refused):,} done, "
        f"{len(made.refused):,} refused, {len(missing):,} missing in "
        f"{counted(len(groups), 'stream')}"
    )
    if missing:
        say(f"about {duration(seconds)} for one worker, shared frozen passes included ({basis})")
    for data, why in costs.unopened.items():
        say(f"not counted: {data}: {why}")
    if made.damaged:
        say(f"damaged, to be run again: {', '.join(sorted(made.damaged))}")
    if made.unknown:
        say(f"to be admitted first: {some([' on '.join(pair) for pair in made.unknown])}")


def run(
    sweep: SweepFile,
    out: Runs = None,
    root: Root = None,
    data_root: DataRoot = None,
    only: Only = None,
    backbone: Backbones = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes. [default: one a core; on GPUs, up to 6 each]"),
    ] = None,
    device: Device = None,
    executor: Annotated[
        Executors, typer.Option(help="This machine's processes, or a Ray cluster.")
    ] = Executors.LOCAL,
    address: Annotated[
        str | None,
        typer.Option(
            help="Of the Ray cluster, every node of which must see the same folders; without one, "
            "Ray is started here."
        ),
    ] = None,
) -> None:
    """Run the cells of a sweep that have no record yet.

    Backbones are admitted first: a checkpoint that is not there, damaged or too weak on clean
    images has its cells recorded as refused. A run that was stopped goes on when the same command
    is given again, and damaged records are made anew. Cells that fail are listed at the end, and
    the exit status is then 1.
    """
    from caster_bench.engine.executors.devices import AUTO, chosen
    from caster_bench.engine.run import run as run_sweep

    if address is not None and executor is not Executors.RAY:
        raise CasterError("--address is of a Ray cluster: say --executor ray as well")
    # Of a cluster nobody here knows what devices it has.
    at = (device or AUTO) if executor is Executors.RAY else chosen(device)[0]
    known, place = _opened(sweep, out, root, data_root, at)
    start = _starting(place, device, workers, address, executor)
    with watching() as watch:
        summary = run_sweep(known, place, start, watch, only, backbone or ())
    _tell(summary, place)
    if summary.failures:
        raise typer.Exit(1)


def _opened(
    sweep: Path,
    out: Path | None,
    root: Path | None,
    data_root: Path | None,
    device: str | None = None,
) -> tuple[Sweep, RunContext]:
    from caster_bench.engine.executors.devices import chosen
    from caster_bench.engine.run_context import RunContext
    from caster_bench.sweeps import read

    known = read(sweep)
    folder = out or Path("runs") / known.name
    return known, RunContext.of(known, folder, root, data_root, device or chosen(None)[0])


def _starting(
    place: RunContext,
    device: str | None,
    workers: int | None,
    address: str | None,
    executor: Executors,
) -> Callable[[], Executor]:
    """What starts an executor, once it is known that there is work for it."""
    from caster_bench.engine.executors.devices import EACH_GPU, chosen, share_out

    def start() -> Executor:
        if executor is Executors.RAY:
            from caster_bench.engine.executors.ray import OnRay

            return OnRay(place, address, workers, EACH_GPU)
        from caster_bench.engine.executors.local import Local

        devices = chosen(device)
        return Local(place, devices, *share_out(devices, workers))

    return start


def _tell(summary: Summary, place: RunContext) -> None:
    for what, why in summary.refusals.items():
        say(f"refused: {what}: {why}")
    for what, why in summary.failures:
        say(f"failed: {what}: {why}", errors)
    before = f", {summary.already:,} of them earlier" if summary.already else ""
    say(
        f"{counted(summary.cells, 'cell')} done and {summary.refused:,} refused{before}; "
        f"{len(summary.failures):,} failed. Records are in {place.out}"
    )
    if summary.engine is not None:
        say(
            f"{duration(summary.seconds)} with {counted(summary.workers, 'worker')}; of their time "
            f"at work {1 - summary.engine:.0%} were passes and methods, {summary.engine:.0%} the "
            "engine"
        )
    if summary.foreign:
        say(
            f"{counted(summary.foreign, 'record')} of another checkpoint, data, settings or "
            "constants lie there too: delete the folders that `caster bench verify` lists, or run "
            "with another --out"
        )
