"""The commands `caster bench plan` and `caster bench run`, and what they print."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from caster.cli.console import PlainConsole, errors, new_table, output, say
from caster.cli.options import DataRoot
from caster.errors import CasterError, counted

if TYPE_CHECKING:
    from caster_bench.engine.executors import Executor
    from caster_bench.engine.plan import Costs, Plan
    from caster_bench.engine.run import RunStatus, Summary, Watch
    from caster_bench.engine.run_context import RunContext
    from caster_bench.sweeps import Spec, Sweep

SweepFile = Annotated[Path, typer.Argument(metavar="SWEEP", help="TOML file of the sweep.")]
Runs = Annotated[
    Path | None,
    typer.Option("--out", metavar="RUNS", help="Folder of the run. [default: runs/NAME]"),
]
Root = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder that checkpoint paths are relative to. [default: the current folder]",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="STUDY", help="Only the cells of this study; repeat it for several."),
]
Backbones = Annotated[
    list[str] | None,
    typer.Option(
        "--backbone",
        metavar="NAME",
        help="Only the cells of this backbone, by its name in the sweep; repeat it for several. "
        "Checkpoints and records of the others need not exist.",
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        metavar="NAME",
        help="Only the cells of this method, with any settings; repeat it for several.",
    ),
]
WIDE = 180  # characters, for piped output
EVERY = 10.0  # seconds between two lines of piped progress
MAX_SHOWN = 8  # running cells in the live table


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
    method: Methods = None,
    cells: Annotated[bool, typer.Option("--cells", help="List every cell.")] = False,
) -> None:
    """List the cells of a sweep: which have a record, and what the others are expected to cost.

    Costs come from the times of similar cells in this run; without any, they are a guess from the
    method and the number of images. Checkpoints and data that are not there are named; the exit
    status is 1 if data are neither a published set nor a file or folder.
    """
    from caster_bench.engine.executors.local import select_devices
    from caster_bench.engine.plan import Costs, groups_of, make_plan

    known, context = _open(sweep, out, root, data_root, select_devices(None)[0])
    made = make_plan(known, context, only or (), backbones=backbone or (), methods=method or ())
    costs = Costs(made)
    show_plan(made, costs, list(groups_of(made.missing)), by_cell=cells)
    # a checkpoint may be trained and a published set downloaded later, but a wrong name stays wrong
    if any(error.argument != "data_root" for error in costs.unopened.values()):
        raise typer.Exit(1)


def run(
    sweep: SweepFile,
    out: Runs = None,
    root: Root = None,
    data_root: DataRoot = None,
    only: Only = None,
    backbone: Backbones = None,
    method: Methods = None,
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
    on clean images are recorded as rejected. With --backbone, only the named ones are admitted or
    rejected. Run the same command again to continue a run that was stopped; damaged records are
    made again. Cells that fail are listed at the end, and the exit status is then 1; so it is if
    checkpoints are missing and all cells are rejected.
    """
    from caster_bench.engine.run import run as run_sweep

    if address is not None and executor is not Executors.RAY:
        raise CasterError("{argument} requires --executor ray", argument="address")
    first, start = _executor(executor, device, workers, address)
    known, context = _open(sweep, out, root, data_root, first)
    with live_progress() as watch:
        summary = run_sweep(
            known, context, lambda: start(context), watch, only or (), backbone or (), method or ()
        )
    show_summary(summary, context.out)
    if summary.failures or (summary.absent and not summary.cells):
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


# --- output --------------------------------------------------------------------------------------


def show_plan(plan: Plan, costs: Costs, groups: list[tuple[Spec, ...]], by_cell: bool) -> None:
    """Print the cells of a plan and what the missing ones are expected to cost."""
    from caster_bench.data.sets.dataset import first_few

    console = output if output.is_terminal else PlainConsole(width=WIDE)
    console.print((cells_table if by_cell else methods_table)(plan, costs))
    missing, rejected = len(plan.missing), len(plan.rejected)
    done = len(plan.wanted) - missing - rejected
    say(
        f"{counted(len(plan.wanted), 'cell')}: {done:,} done, {rejected:,} rejected, "
        f"{missing:,} missing in {counted(len({spec.stream for spec in plan.missing}), 'stream')}"
    )
    known = [group for group in groups if costs.is_known(group[0])]
    if known:
        seconds = duration(sum(map(costs.group, known)))
        basis = "from the times of this run" if costs.measured else "a guess: nothing measured yet"
        say(f"about {seconds} for one worker, including shared frozen passes ({basis})")
    if len(known) < len(groups):
        unknown = missing - sum(map(len, known))
        cells = counted(unknown, "cell")
        say(f"the cost of {cells} is unknown because these data cannot be opened:")
    for data, error in costs.unopened.items():
        say(f"  {data}: {error.on_command_line}")
    if plan.damaged:
        say(f"damaged, to be run again: {', '.join(sorted(plan.damaged))}")
    if plan.undecided:
        say(f"to be admitted first: {first_few([' on '.join(pair) for pair in plan.undecided])}")
    if plan.absent:
        say(
            f"no such checkpoint: {first_few(plan.absent)}; cells whose checkpoint is still "
            "missing when the sweep runs are rejected"
        )


def methods_table(plan: Plan, costs: Costs) -> Table:
    """Return a row for every method on a backbone and data."""
    rows: dict[tuple[str, str, str], list[Spec]] = {}
    for spec in plan.wanted:
        rows.setdefault((spec.backbone, spec.data, spec.label), []).append(spec)
    table = _table("backbone", "data", "method", "cells", "recorded", "missing", "expected")
    for names, specs in rows.items():
        missing = [spec for spec in specs if not plan.has_record(spec)]
        counts = (len(specs), len(specs) - len(missing), len(missing))
        table.add_row(*map(Text, (*names, *map(str, counts), _expected(missing, costs))))
    return table


def cells_table(plan: Plan, costs: Costs) -> Table:
    """Return a row for every cell."""
    table = _table("cell", "stream", "state", "expected")
    rejected = set(plan.rejected)
    for spec in plan.wanted:
        recorded = plan.has_record(spec)
        state = "rejected" if spec in rejected else "done" if recorded else "missing"
        stream = f"{spec.order}, B {spec.batch_size}, seed {spec.seed}"
        stream += ", alone" if spec.alone else ""
        expected = _expected([] if recorded else [spec], costs)
        table.add_row(*map(Text, (spec.title, stream, state, expected)))
    return table


def _expected(missing: list[Spec], costs: Costs) -> str:
    """Format what cells of one backbone and data cost; "-" if there are none or it is unknown."""
    known = missing and costs.is_known(missing[0])
    return duration(sum(map(costs.cell, missing))) if known else "-"


def _table(*headings: str) -> Table:
    return new_table(*headings, numbers=("cells", "recorded", "missing", "expected"))


@contextmanager
def live_progress() -> Iterator[Watch]:
    """Show a run's progress on standard error: a live table, or a line now and then when piped."""
    if errors.is_terminal:
        from rich.live import Live  # no --help needs it

        with Live(console=errors, transient=True, auto_refresh=False) as live:
            yield lambda status: live.update(status_table(status), refresh=True)
        return
    last = monotonic()

    def print_line(status: RunStatus) -> None:
        nonlocal last
        if monotonic() - last >= EVERY:
            last = monotonic()
            say(status_line(status), errors)

    yield print_line


def status_table(status: RunStatus) -> Table:
    """Return the progress of a run as a table."""
    grid = Table.grid(padding=(0, 2))
    grid.add_row("cells", _counts(status))
    grid.add_row("images/s", f"{status.rate:,.0f}")
    grid.add_row("time left", _left(status))
    for title in status.current[:MAX_SHOWN]:
        grid.add_row("running", title)
    if len(status.current) > MAX_SHOWN:
        grid.add_row("", f"and {len(status.current) - MAX_SHOWN} more")
    return grid


def status_line(status: RunStatus) -> str:
    """Return the progress of a run on one line.

    >>> from caster_bench.engine.run import RunStatus
    >>> status_line(RunStatus(3, 10, 0, ("r on d, fog-1: tent",), 812.3, 75.0))
    '3 of 10 cells, 812 images/s, 1 min 15 s left, at r on d, fog-1: tent'
    """
    at = f", at {status.current[0]}" if status.current else ""
    return f"{_counts(status)} cells, {status.rate:,.0f} images/s, {_left(status)} left{at}"


def _counts(status: RunStatus) -> str:
    failed = f" ({status.failed:,} failed)" if status.failed else ""
    return f"{status.done:,} of {status.total:,}{failed}"


def _left(status: RunStatus) -> str:
    return "unknown time" if status.left is None else duration(status.left)


def show_summary(summary: Summary, out: Path) -> None:
    """Print the outcome of a run."""
    for line in by_reason("rejected", summary.rejections.items()):
        say(line)
    for path in summary.absent:
        say(f"no such file: {path}")
    for line in by_reason("failed", summary.failures):
        say(line, errors)
    before = f", {summary.already:,} of them earlier" if summary.already else ""
    say(
        f"{counted(summary.cells, 'cell')} done and {summary.rejected:,} rejected{before}; "
        f"{len(summary.failures):,} failed. Records are in {out}"
    )
    if summary.engine is not None:
        say(
            f"{duration(summary.seconds)} with {counted(summary.workers, 'worker')}; of their busy "
            f"time {1 - summary.engine:.0%} was models and methods, {summary.engine:.0%} the engine"
        )
    if summary.foreign:
        from caster_bench.cli.data import say_first
        from caster_bench.records.store import cells_of

        say(
            f"{counted(len(summary.foreign), 'record')} of an earlier revision of a method, or of "
            "other checkpoints, data, settings or constants: delete these folders, or run with "
            "another --out"
        )
        say_first([f"  {cells_of(out) / key}" for key in summary.foreign])


def by_reason(what: str, reasons: Iterable[tuple[str, str]]) -> Iterator[str]:
    """List cells or backbones, each reason once.

    >>> print(*by_reason("failed", [("a", "no data"), ("b", "no k"), ("c", "no data")]), sep="\\n")
    failed (2): no data
      a
      c
    failed: b: no k
    """
    groups: dict[str, list[str]] = {}
    for name, why in reasons:
        groups.setdefault(why, []).append(name)
    for why, names in groups.items():
        if len(names) == 1:
            yield f"{what}: {names[0]}: {why}"
        else:
            yield f"{what} ({len(names):,}): {why}"
            yield from (f"  {name}" for name in names)


def duration(seconds: float) -> str:
    """Format a duration.

    >>> duration(0.4), duration(75), duration(7_300)
    ('0.4 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
