"""A sweep run: backbones admitted, then every group of cells that has no record yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from time import perf_counter

from caster.errors import CasterError, DiskFullError, is_disk_full
from caster.io.lock import locked
from caster_bench.engine.cell import Done, one_line
from caster_bench.engine.cost import Costs
from caster_bench.engine.executors import Executor, Finished, Task
from caster_bench.engine.plan import Group, Pair, Plan, groups_of, make_plan, take_back
from caster_bench.engine.prefetch import CorruptionPrefetcher
from caster_bench.engine.run_context import RunContext
from caster_bench.engine.summary import Standing, Summary, conclude
from caster_bench.records.layout import TEMPORARY, cells_of
from caster_bench.records.writer import remove_leftovers
from caster_bench.sweeps import Spec, Sweep

__all__ = ["Standing", "Summary", "Watch", "run"]

TICK = 0.5  # seconds between two looks at what has been written
Watch = Callable[[Standing], None]


def run(
    sweep: Sweep,
    context: RunContext,
    start: Callable[[], Executor],
    watch: Watch,
    only: str | None = None,  # a study
    backbones: Sequence[str] = (),  # none means all
) -> Summary:
    """Run what is missing of a sweep; cells that fail are in the summary, and have no record."""
    look = partial(make_plan, sweep, context, only, backbones=backbones)
    context.out.mkdir(parents=True, exist_ok=True)
    refusal = f"another run writes to {context.out}: wait for it, or give another --out"
    with locked(context.out / "run.lock", refusal):
        remove_leftovers(context.out)
        for path in context.images.glob(f".*{TEMPORARY}"):
            path.unlink()
        plan = look()
        if not plan.missing:
            return conclude(plan, Summary())
        try:
            with closing(start()) as executor:
                return _Run(look, plan, executor, watch).all()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"{_kept(look, plan)}; run it again to go on") from None
        except (CasterError, OSError) as error:
            if not is_disk_full(error):
                raise
            if isinstance(error, OSError):
                error.filename = error.filename or context.out
            raise DiskFullError(f"{one_line(error)}; {_kept(look, plan)}") from None


def _kept(look: Callable[[], Plan], plan: Plan) -> str:
    count = len(plan.wanted)
    return f"{count - len(look().missing)} of {count} cells are kept"


class _Run:
    """A plan and an executor, and what has been done between them."""

    def __init__(
        self, look: Callable[..., Plan], plan: Plan, executor: Executor, watch: Watch
    ) -> None:
        self.look, self.plan, self.executor, self.watch = look, plan, executor, watch
        self.summary = Summary(already=len(plan.wanted) - len(plan.missing))
        self.summary.workers = executor.workers
        self.began = perf_counter()
        self.running: list[Task] = []

    def all(self) -> Summary:
        """Admissions, then cells side by side, then those that are timed, one by one."""
        self._admit()
        self.plan = self.look(known=self.plan.admissions)
        self.summary.foreign = take_back(self.plan)
        self.costs = Costs(self.plan)
        decided = [spec for spec in self.plan.missing if spec in self.plan.keys]
        self.prefetcher = CorruptionPrefetcher(self.plan, decided, ahead=self.executor.helpers > 0)
        self.cost = sum(map(self.costs.cell, decided))
        self.kept: list[Spec] = []
        self.began_work = perf_counter()
        groups = list(groups_of(decided))
        self._work(deque(group for group in groups if not group[0].alone), self.executor.workers)
        self._work(deque(group for group in groups if group[0].alone), 1)
        self.summary.seconds = perf_counter() - self.began
        return conclude(self.look(known=self.plan.admissions), self.summary)

    def _admit(self) -> None:
        """Decide on every backbone that nobody has looked at."""
        first: dict[Pair, Spec] = {}
        for spec in self.plan.wanted:
            first.setdefault((spec.backbone, spec.data), spec)
        todo = deque(first[pair] for pair in self.plan.unknown)
        while todo or self.running:
            while todo and len(self.running) < self.executor.workers:
                self._submit(Task("admit", (todo.popleft(),)))
            at = [f"admitting {_pair(task.specs[0])}" for task in self.running]
            self._show(0, tuple(at))
            for ended in self.executor.wait(TICK):
                self._leave(ended)
                spec = ended.task.specs[0]
                if ended.error is None:
                    _, passes, seconds = ended.result
                    self.summary.passes += passes
                    self.summary.busy += seconds
                    continue
                self.summary.failures.append((_pair(spec), ended.error))

    def _work(self, queue: deque[Group], room: int) -> None:
        """Groups side by side, their images made a little ahead where helpers are free."""
        while queue or self.running:
            busy = sum(task.kind == "group" for task in self.running)
            helping = len(self.running) - busy
            for early in self.prefetcher.wanted(queue, self.executor.helpers - helping):
                self._submit(Task("images", early))  # of the first ones too: workers have a GPU
            while busy < room and (group := self.prefetcher.ready(queue)) is not None:
                self._submit(Task("group", group))
                busy += 1
            for ended in self.executor.wait(TICK):
                self._leave(ended)
                self._ended(ended)
            self._say()

    def _submit(self, task: Task) -> None:
        self.running.append(task)
        self.executor.submit(task)

    def _leave(self, ended: Finished) -> None:
        self.running.remove(ended.task)
        if ended.disk_full:
            raise DiskFullError(ended.error or "")

    def _ended(self, ended: Finished) -> None:
        specs = ended.task.specs
        if ended.task.kind == "images":  # what failed there fails again in the worker, aloud
            self.prefetcher.made(specs)
            return
        self.prefetcher.over(specs)
        self.kept += [spec for spec in specs if self._is_written(spec)]
        if ended.error is not None:  # cells of it that were complete have their records
            lost = [spec for spec in specs if not self._is_written(spec)]
            self.summary.failures += [(spec.title, ended.error) for spec in lost]
            return
        done: Done = ended.result
        self.summary.busy += done.seconds
        self.summary.passes += done.passes
        self.summary.failures += [(spec.title, why) for spec, why in done.failures]

    def _is_written(self, spec: Spec) -> bool:
        return (cells_of(self.plan.context.out) / self.plan.keys[spec]).exists()

    def _say(self) -> None:
        """Tell where the run stands: records are its progress, whoever wrote them."""
        under_way = [task.specs for task in self.running if task.kind == "group"]
        current = tuple(
            next((s.title for s in specs if not self._is_written(s)), specs[-1].title)
            for specs in under_way
        )
        written = self.kept + [s for specs in under_way for s in specs if self._is_written(s)]
        seconds = perf_counter() - self.began_work
        spent = sum(map(self.costs.cell, written))
        rate = sum(map(self.costs.images, written)) / seconds
        left = seconds * (self.cost - spent) / spent if spent else None
        self._show(len(written), current, rate, left)

    def _show(
        self, written: int, current: tuple[str, ...], rate: float = 0.0, left: float | None = None
    ) -> None:
        done, failed = self.summary.already + written, len(self.summary.failures)
        self.watch(Standing(done, len(self.plan.wanted), failed, current, rate, left))


def _pair(spec: Spec) -> str:
    return f"{spec.backbone} on {spec.data}"
