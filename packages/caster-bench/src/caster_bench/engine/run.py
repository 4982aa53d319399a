"""Run a sweep: admit its backbones, then run every group of cells without a record."""

from __future__ import annotations

import json
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from time import perf_counter

from caster.errors import CasterError, DiskFullError, is_disk_full
from caster.io.files import locked
from caster_bench.engine.admit import checkpoint_path
from caster_bench.engine.cell import GroupResult, one_line
from caster_bench.engine.executors import Executor, Finished, Task
from caster_bench.engine.plan import (
    Costs,
    Pair,
    Plan,
    absent_checkpoints,
    groups_of,
    make_plan,
    remove_stale,
)
from caster_bench.engine.run_context import RunContext
from caster_bench.engine.shared_images import CorruptionPrefetcher, Group
from caster_bench.records.store import TEMPORARY, cells_of, remove_leftovers
from caster_bench.sweeps import Spec, Sweep

TICK = 0.5  # seconds between two looks at what has been written
LOG = "runs.jsonl"


@dataclass(frozen=True)
class RunStatus:
    """Progress of a run."""

    done: int  # cells with a record, including earlier runs'
    total: int
    failed: int
    current: tuple[str, ...]  # titles of running cells, or of what precedes them
    rate: float  # images per second
    left: float | None  # seconds; None: not known yet


Watch = Callable[[RunStatus], None]


@dataclass
class Summary:
    """Outcome of a run, and where its time went."""

    cells: int = 0
    rejected: int = 0
    already: int = 0
    foreign: list[str] = field(default_factory=list)  # keys of records of no cell of the sweep
    failures: list[tuple[str, str]] = field(default_factory=list)  # cell or backbone, reason
    rejections: dict[str, str] = field(default_factory=dict)  # backbone on data: reason
    absent: list[str] = field(default_factory=list)  # paths of their checkpoints that do not exist
    workers: int = 0
    seconds: float = 0.0
    busy: float = 0.0  # seconds of workers in tasks
    passes: float = 0.0  # of those, seconds in models and methods

    @property
    def engine(self) -> float | None:
        """Share of the workers' busy time outside models and methods; None if never busy."""
        return None if self.busy == 0 else 1 - self.passes / self.busy


def run(
    sweep: Sweep,
    context: RunContext,
    start: Callable[[], Executor],
    watch: Watch,
    only: Sequence[str] = (),  # studies; empty: all
    backbones: Sequence[str] = (),  # likewise
    methods: Sequence[str] = (),  # likewise
) -> Summary:
    """Run the missing cells of a sweep; cells that fail are in the summary and have no record."""
    replan = partial(make_plan, sweep, context, only, backbones=backbones, methods=methods)
    context.out.mkdir(parents=True, exist_ok=True)
    message = f"another run writes to {context.out}: wait for it, or choose another folder"
    with locked(context.out / "run.lock", message):
        remove_leftovers(context.out)
        for path in context.images.glob(f".*{TEMPORARY}"):
            path.unlink()
        plan = replan()
        if not plan.missing:
            return _conclude(plan, Summary(foreign=remove_stale(plan)))
        try:
            with closing(start()) as executor:
                return _Run(replan, plan, executor, watch).run()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"{_saved(replan, plan)}; run it again to continue") from None
        except (CasterError, OSError) as error:
            if not is_disk_full(error):
                raise
            if isinstance(error, OSError):
                error.filename = error.filename or context.out
            raise DiskFullError(f"{one_line(error)}; {_saved(replan, plan)}") from None


def _saved(replan: Callable[[], Plan], plan: Plan) -> str:
    count = len(plan.wanted)
    return f"{count - len(replan().missing)} of {count} cells are saved"


class _Run:
    """A plan, the executor that carries it out, and the progress so far."""

    def __init__(
        self, replan: Callable[..., Plan], plan: Plan, executor: Executor, watch: Watch
    ) -> None:
        self.replan, self.plan, self.executor, self.watch = replan, plan, executor, watch
        self.summary = Summary(already=len(plan.wanted) - len(plan.missing))
        self.summary.workers = executor.workers
        self.began = perf_counter()
        self.running: list[Task] = []

    def run(self) -> Summary:
        """Admit backbones, then run cells in parallel, then timed cells one by one."""
        self._admit()
        self.plan = self.replan(known=self.plan.admissions)
        self.summary.foreign = remove_stale(self.plan)
        self.costs = Costs(self.plan)
        decided = [spec for spec in self.plan.missing if spec in self.plan.keys]
        groups = list(groups_of(decided))
        ahead = self.executor.helpers > 0
        self.prefetcher = CorruptionPrefetcher(
            self.plan.context, self.plan.admission, groups, ahead
        )
        self.cost = sum(map(self.costs.cell, decided))
        self.written: list[Spec] = []  # cells of finished groups
        self.began_cells = perf_counter()
        self._work(deque(group for group in groups if not group[0].alone), self.executor.workers)
        self._work(deque(group for group in groups if group[0].alone), 1)
        self.summary.seconds = perf_counter() - self.began
        return _conclude(self.replan(known=self.plan.admissions), self.summary)

    def _admit(self) -> None:
        """Admit every backbone that is not decided yet."""
        first: dict[Pair, Spec] = {}
        for spec in self.plan.wanted:
            first.setdefault((spec.backbone, spec.data), spec)
        queue = deque(first[pair] for pair in self.plan.undecided)
        while queue or self.running:
            while queue and len(self.running) < self.executor.workers:
                self._submit(Task("admit", (queue.popleft(),)))
            self._report(0, tuple(f"admitting {_pair(task.specs[0])}" for task in self.running))
            for finished in self.executor.wait(TICK):
                self._remove(finished)
                if finished.error is None:
                    _, passes, seconds = finished.result
                    self.summary.passes += passes
                    self.summary.busy += seconds
                else:
                    self.summary.failures.append((_pair(finished.task.specs[0]), finished.error))

    def _work(self, queue: deque[Group], slots: int) -> None:
        """Run groups in parallel; helpers that are free make images ahead."""
        while queue or self.running:
            busy = sum(task.kind == "group" for task in self.running)
            helping = len(self.running) - busy
            free = self.executor.helpers - helping
            for group in self.prefetcher.to_prefetch(queue, free):
                self._submit(Task("images", group))  # the first group too: workers have a GPU
            while busy < slots and (ready := self.prefetcher.next_ready(queue)) is not None:
                self._submit(Task("group", ready))
                busy += 1
            for finished in self.executor.wait(TICK):
                self._remove(finished)
                self._finish(finished)
            self._report_cells()

    def _submit(self, task: Task) -> None:
        self.running.append(task)
        self.executor.submit(task)

    def _remove(self, finished: Finished) -> None:
        self.running.remove(finished.task)
        if finished.disk_full:
            raise DiskFullError(finished.error or "")

    def _finish(self, finished: Finished) -> None:
        specs = finished.task.specs
        if finished.task.kind == "images":  # a failure there is reported by the group's own worker
            self.prefetcher.prefetched(specs)
            return
        self.prefetcher.release(specs)
        self.written += [spec for spec in specs if self._is_written(spec)]
        if finished.error is not None:  # its completed cells have their records
            lost = [spec for spec in specs if not self._is_written(spec)]
            self.summary.failures += [(spec.title, finished.error) for spec in lost]
            return
        result: GroupResult = finished.result
        self.summary.busy += result.seconds
        self.summary.passes += result.passes
        self.summary.failures += [(spec.title, why) for spec, why in result.failures]

    def _is_written(self, spec: Spec) -> bool:
        return (cells_of(self.plan.context.out) / self.plan.keys[spec]).exists()

    def _report_cells(self) -> None:
        """Report progress from the records on disk, whichever process wrote them."""
        groups = [task.specs for task in self.running if task.kind == "group"]
        current = tuple(
            next((s.title for s in specs if not self._is_written(s)), specs[-1].title)
            for specs in groups
        )
        written = self.written + [s for specs in groups for s in specs if self._is_written(s)]
        seconds = perf_counter() - self.began_cells
        spent = sum(map(self.costs.cell, written))
        rate = sum(map(self.costs.images, written)) / seconds
        left = seconds * (self.cost - spent) / spent if spent else None
        self._report(len(written), current, rate, left)

    def _report(
        self, written: int, current: tuple[str, ...], rate: float = 0.0, left: float | None = None
    ) -> None:
        done, failed = self.summary.already + written, len(self.summary.failures)
        self.watch(RunStatus(done, len(self.plan.wanted), failed, current, rate, left))


def _conclude(plan: Plan, summary: Summary) -> Summary:
    """Fill in the final counts, log the run, and delete the images of a complete sweep."""
    summary.rejected = len(plan.rejected)
    summary.cells = len(plan.wanted) - len(plan.missing) - summary.rejected
    for spec in plan.rejected:
        admission = plan.admission(spec)
        assert admission is not None  # it was rejected
        summary.rejections[_pair(spec)] = str(admission.reason)
    absent = absent_checkpoints(plan.context, (spec.backbone for spec in plan.rejected))
    summary.absent = [str(checkpoint_path(plan.context, own)) for own in absent]
    if plan.is_complete:
        shutil.rmtree(plan.context.images, ignore_errors=True)
    if summary.workers:
        with (plan.context.out / LOG).open("a", encoding="utf-8") as log:
            line = {"ended": int(time.time()), "engine": summary.engine} | asdict(summary)
            log.write(json.dumps(line) + "\n")
    return summary


def _pair(spec: Spec) -> str:
    return f"{spec.backbone} on {spec.data}"
