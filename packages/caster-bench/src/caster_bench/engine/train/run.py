"""A training run from its settings to its checkpoint, in as many calls as it takes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from caster.errors import CasterError
from caster.io.files import check_writable, replacing
from caster.io.lock import locked
from caster.io.progress import Progress, silent
from caster_bench.engine.describe import software
from caster_bench.engine.train import checkpoint, work
from caster_bench.engine.train.augment import Pool
from caster_bench.engine.train.checkpoint import Metadata
from caster_bench.engine.train.images import Labelled
from caster_bench.engine.train.learner import Learner, accuracy
from caster_bench.engine.train.recipe import Recipe

KEEP_EVERY = 60.0  # seconds: what a crash costs at most, and an epoch
MEASURE_EVERY = 5  # epochs


@dataclass(frozen=True)
class Outcome:
    """Where a call of `train` left off."""

    epochs: int  # done, by all calls
    of: int
    metadata: Metadata | None  # of the checkpoint; None while there is none


def train(
    architecture: str,
    recipe: Recipe,
    data: Labelled,
    test: Labelled,
    out: Path,
    *,
    seed: int = 0,
    device: str = "cpu",
    seconds: float | None = None,  # stop after the last epoch that ends within them
    keep_every: float = KEEP_EVERY,
    progress: Progress = silent,
) -> Outcome:
    """Train a network and write its checkpoint, going on from an earlier call that was stopped.

    Beside the checkpoint lie its curve, a line of JSON an epoch, and, until it is there, the run
    under way. Accuracies are those of the average of weights, which is what is kept; the last one
    is, and no earlier one is chosen for its accuracy.
    """
    check_writable(out)
    if out.suffix != ".safetensors":
        raise CasterError(f"a checkpoint is a .safetensors file, and {out.name} is none")
    planned = _planned(architecture, recipe, data, test, seed)
    if out.exists():
        return Outcome(recipe.epochs, recipe.epochs, _same(out, planned))
    gpus = [device] if torch.device(device).type == "cuda" else []
    with (
        locked(out.with_suffix(".lock"), f"another process is training {out}"),
        torch.random.fork_rng(gpus),
    ):
        return _Run(planned, recipe, data, test, out, device, keep_every, progress).go(seconds)


def files_of(out: Path) -> tuple[Path, Path]:
    """The curve of a checkpoint, and the run under way.

    >>> [path.name for path in files_of(Path("resnet18.safetensors"))]
    ['resnet18.curve.jsonl', 'resnet18.work.safetensors']
    """
    return out.with_suffix(".curve.jsonl"), out.with_suffix(".work.safetensors")


def expected(curve: list[work.Row], recipe: Recipe) -> float:
    """Seconds the next epoch takes at most: as long as the longest, or its share of the patches.

    >>> expected([{"seconds": 3.0}, {"seconds": 2.0}], Recipe.of("resnet18"))
    3.0
    """
    longest: float = max(row["seconds"] for row in curve)
    done = len(curve)
    if recipe.drops(done) and not recipe.drops(done + 1):
        longest /= 1 - recipe.drop_patches
    return longest


class _Run:
    def __init__(
        self,
        planned: Metadata,
        recipe: Recipe,
        data: Labelled,
        test: Labelled,
        out: Path,
        device: str,
        keep_every: float,
        progress: Progress,
    ) -> None:
        context = torch.device(device)
        self.began = time.monotonic()
        self.planned, self.out, self.progress = planned, out, progress
        self.keep_every = keep_every
        self.curve_path, self.work_path = files_of(out)
        pixels, codes = (torch.from_numpy(part).to(context) for part in (data.pixels, data.codes))
        pool = Pool.of(pixels, codes, planned.mean, planned.std)
        self.test = [torch.from_numpy(part).to(context) for part in (test.pixels, test.codes)]
        self.learner = Learner(
            planned.architecture, recipe, pool, len(planned.classes), planned.seed
        )
        self.curve: list[work.Row] = []
        if self.work_path.exists():
            self.curve = work.restore(self.work_path, self.learner, planned.origin)
        self.kept = len(self.curve)  # epochs that the file holds
        if context.type == "cuda":
            self.learner.compile(done=len(self.curve))

    def go(self, seconds: float | None) -> Outcome:
        """Epochs until the last one, or until the time is up."""
        total = self.learner.recipe.epochs
        with replacing(self.curve_path) as temporary:  # without epochs that were lost
            temporary.write_text("".join(map(_line, self.curve)))
        saved = time.monotonic()
        with self._saying_what_is_kept():
            while len(self.curve) < total:
                self._epoch(len(self.curve) + 1)
                late = seconds is not None and self._would_pass(seconds)
                if late or time.monotonic() - saved >= self.keep_every:
                    work.save(self.work_path, self.learner, self.planned.origin, self.curve)
                    self.kept, saved = len(self.curve), time.monotonic()
                if late and len(self.curve) < total:
                    return Outcome(len(self.curve), total, None)
            return Outcome(total, total, self._finish())

    def _epoch(self, number: int) -> None:
        recipe, steps = self.learner.recipe, self.learner.steps
        began = time.monotonic()
        stage = f"training {self.planned.architecture}"
        mean, lr = self.learner.epoch(
            number, lambda step: self.progress(stage, step, recipe.epochs * steps)
        )
        measured = number % MEASURE_EVERY == 0 or number == recipe.epochs
        row = {
            "epoch": number,
            "loss": mean,
            "accuracy": self._accuracy(bf16=True) if measured else None,
            "lr": lr,
            "seconds": round(time.monotonic() - began, 3),
        }
        self.curve.append(row)
        with self.curve_path.open("a") as file:
            file.write(_line(row))

    def _accuracy(self, bf16: bool) -> float:
        learner = self.learner
        fast = bf16 and learner.device.type == "cuda"
        return accuracy(learner.average.net, self.test[0], self.test[1], learner.pool, fast)

    def _would_pass(self, seconds: float) -> bool:
        """Whether another epoch would end too late."""
        passed = time.monotonic() - self.began
        return passed + expected(self.curve, self.learner.recipe) > seconds

    def _finish(self) -> Metadata:
        metadata = replace(self.planned, accuracy=self._accuracy(bf16=False))
        checkpoint.save(self.learner.average.net, metadata, self.out)
        self.work_path.unlink(missing_ok=True)
        return checkpoint.inspect(self.out)  # read back: what is on the disk is what counts

    @contextmanager
    def _saying_what_is_kept(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            kept = f"{self.kept} of {self.learner.recipe.epochs} epochs are kept"
            raise KeyboardInterrupt(f"{kept}: the same command goes on from there") from None


def _planned(
    architecture: str, recipe: Recipe, data: Labelled, test: Labelled, seed: int
) -> Metadata:
    if data.size != test.size:
        raise CasterError(f"{data.name} and {test.name} have images of different sizes")
    mean, std = data.normalisation()
    return Metadata(
        architecture=architecture,
        classes=data.classes,
        size=data.size,
        mean=mean,
        std=std,
        recipe=recipe,
        data=data.described(),
        test=test.described(),
        seed=seed,
        accuracy=math.nan,
        software=software(),
    )


def _same(out: Path, planned: Metadata) -> Metadata:
    """The checkpoint that is there, if it is the one that would be made."""
    found = checkpoint.inspect(out)
    other = [name for name, value in planned.origin.items() if found.origin[name] != value]
    if other:
        raise CasterError(
            f"{out} is a finished checkpoint with another {', '.join(other)}: name another file, "
            "or remove it"
        )
    return found


def _line(row: work.Row) -> str:
    return json.dumps(row) + "\n"
