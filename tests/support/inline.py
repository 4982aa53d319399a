"""An executor without processes, and small sweeps for it."""

from __future__ import annotations

from pathlib import Path

from caster_bench.engine.cell import one_line
from caster_bench.engine.executors import Finished, Task, perform
from caster_bench.engine.run import run
from caster_bench.engine.run_context import RunContext
from caster_bench.sweeps import Sweep, read

SMALL = """
name = "small"
[backbones.resnet]
family = "batch"
checkpoint = "checkpoints/resnet.safetensors"
[data.digits]
source = "digits:train"
target = "digits:test"
threshold = 0.85
source_limit = 300
target_limit = 96
[[grid]]
study = "corruption"
corruptions = ["clean", "contrast"]
severities = [3]
batch_sizes = [32]
methods = ["frozen", "caster", "tent"]
"""


class Inline:
    """Tasks one by one in this very process."""

    workers, helpers = 1, 0

    def __init__(self, place: RunContext) -> None:
        self.place = place
        self.queue: list[Task] = []
        self.performed: list[Task] = []

    def submit(self, task: Task) -> None:
        self.queue.append(task)

    def wait(self, seconds: float) -> list[Finished]:
        if not self.queue:
            return []
        task = self.queue.pop(0)
        self.performed.append(task)
        try:
            return [Finished(task, perform(self.place, task))]
        except Exception as error:
            return [Finished(task, error=one_line(error))]

    def close(self) -> None:
        pass


def sweep_of(folder: Path, text: str = SMALL) -> Sweep:
    path = folder / "sweep.toml"
    path.write_text(text)
    return read(path)


def run_inline(sweep: Sweep, out: Path, root: Path, **options):
    """The summary of a run in this process, and its executor."""
    place = RunContext.of(sweep, out, root)
    executor = Inline(place)
    watch = options.pop("watch", lambda standing: None)
    return run(sweep, place, lambda: executor, watch, **options), executor
