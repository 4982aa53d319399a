"""An executor without processes, and small sweeps for it."""

from __future__ import annotations

from pathlib import Path

from caster_bench.engine.executors import Finished, Task, failed, perform
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
LAYERNORM = SMALL.replace("resnet", "convnext").replace('"batch"', '"layer"')  # Tent is inert


class Inline:
    """Performs tasks one by one in this process."""

    workers, helpers = 1, 0

    def __init__(self, context: RunContext) -> None:
        self.context = context
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
            return [Finished(task, perform(self.context, task))]
        except Exception as error:
            return [failed(task, error)]

    def close(self) -> None:
        pass


def sweep_of(folder: Path, text: str = SMALL) -> Sweep:
    path = folder / "sweep.toml"
    path.write_text(text)
    return read(path)


def run_inline(sweep: Sweep, out: Path, root: Path, **options):
    """Run a sweep in this process; return the summary and the executor."""
    context = RunContext.of(sweep, out, root)
    executor = Inline(context)
    watch = options.pop("watch", lambda status: None)
    return run(sweep, context, lambda: executor, watch, **options), executor
