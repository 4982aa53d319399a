"""A training run, from its settings to its checkpoint, in as many calls as it takes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from caster.errors import CasterError
from caster.io import Progress, silent
from caster.io.files import check_writable, locked, replacing
from caster_bench.engine.record import software
from caster_bench.engine.train import checkpoint
from caster_bench.engine.train.augmentation import Pool
from caster_bench.engine.train.checkpoint import Metadata
from caster_bench.engine.train.images import LabelledImages
from caster_bench.engine.train.recipe import Recipe
from caster_bench.engine.train.trainer import Trainer, accuracy

SAVE_EVERY = 60.0  # seconds; a crash loses at most that and an epoch
COPY_EVERY = 10.0  # seconds, likewise for Ctrl-C; a copy of a large network takes a part of one
MEASURE_EVERY = 5  # epochs
FORMAT = "caster-training-1"
Row = dict[str, Any]  # of the curve: epoch, loss, accuracy, lr, seconds


@dataclass(frozen=True)
class Outcome:
    """Where a call of `train` stopped."""

    epochs: int  # done, by all calls
    of: int
    metadata: Metadata | None  # of the finished checkpoint


def train(
    architecture: str,
    recipe: Recipe,
    data: LabelledImages,
    test: LabelledImages,
    out: Path,
    *,
    seed: int = 0,
    device: str = "cpu",
    seconds: float | None = None,  # stop after the last epoch that ends within them
    save_every: float = SAVE_EVERY,
    progress: Progress = silent,
) -> Outcome:
    """Train a network and write its checkpoint, resuming an earlier call that was stopped.

    Next to the checkpoint are its curve, one line of JSON per epoch, and until it is finished the
    state of the run. The checkpoint holds the averaged weights after the last epoch, and
    accuracies are those of averaged weights; no epoch is selected by its accuracy.
    """
    check_writable(out)
    if out.suffix != ".safetensors":
        raise CasterError(f"a checkpoint is a .safetensors file, and {out.name} is not")
    planned = _planned(architecture, recipe, data, test, seed)
    if out.exists():
        finished = _finished(out, planned)
        files_of(out)[1].unlink(missing_ok=True)  # left by Ctrl-C after the checkpoint was written
        return Outcome(recipe.epochs, recipe.epochs, finished)
    gpus = [device] if torch.device(device).type == "cuda" else []
    with (
        locked(out.with_suffix(".lock"), f"another process is training {out}"),
        torch.random.fork_rng(gpus),
    ):
        return _Run(planned, recipe, data, test, out, device, save_every, progress).run(seconds)


def files_of(out: Path) -> tuple[Path, Path]:
    """Return the paths of a checkpoint's curve and of its unfinished run.

    >>> [path.name for path in files_of(Path("resnet18.safetensors"))]
    ['resnet18.curve.jsonl', 'resnet18.work.safetensors']
    """
    return out.with_suffix(".curve.jsonl"), out.with_suffix(".work.safetensors")


def expected_seconds(curve: list[Row], recipe: Recipe) -> float:
    """Bound the next epoch's time by the longest so far; more if it stops dropping patches.

    >>> expected_seconds([{"seconds": 3.0}, {"seconds": 2.0}], Recipe.of("resnet18"))
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
        data: LabelledImages,
        test: LabelledImages,
        out: Path,
        device: str,
        save_every: float,
        progress: Progress,
    ) -> None:
        self.began = time.monotonic()
        self.planned, self.recipe, self.out, self.progress = planned, recipe, out, progress
        self.save_every = save_every
        self.curve_path, self.work_path = files_of(out)
        pixels, labels = (torch.from_numpy(part).to(device) for part in (data.pixels, data.labels))
        pool = Pool.of(pixels, labels, planned.mean, planned.std)
        self.test = [torch.from_numpy(part).to(device) for part in (test.pixels, test.labels)]
        self.trainer = Trainer(
            planned.architecture, recipe, pool, len(planned.classes), planned.seed
        )
        self.curve: list[Row] = []
        if self.work_path.exists():
            self.curve = restore(self.work_path, self.trainer, planned.origin)
        self.saved = len(self.curve)  # epochs in the file
        self.complete: _Snapshot | None = None  # at most COPY_EVERY and an epoch old
        if self.trainer.device.type == "cuda":
            self.trainer.compile(done=len(self.curve))

    def run(self, seconds: float | None) -> Outcome:
        """Train until the last epoch, or until the time is up."""
        total = self.recipe.epochs
        with replacing(self.curve_path) as temporary:  # without epochs that were lost
            temporary.write_text("".join(map(_line, self.curve)))
        saved_at = copied_at = time.monotonic()
        with self._saving_on_ctrl_c():
            while len(self.curve) < total:
                self._epoch(len(self.curve) + 1)
                late = seconds is not None and self._would_exceed(seconds)
                due = late or time.monotonic() - saved_at >= self.save_every
                if due or time.monotonic() - copied_at >= COPY_EVERY:
                    self.complete = _Snapshot.of(self.trainer, self.curve)
                    copied_at = time.monotonic()
                if due:
                    self._save()
                    saved_at = time.monotonic()
                if late and len(self.curve) < total:
                    return Outcome(len(self.curve), total, None)
            metadata = replace(self.planned, accuracy=self._accuracy(bf16=False))
            checkpoint.save(self.trainer.average.module, metadata, self.out)
        self.work_path.unlink(missing_ok=True)
        return Outcome(total, total, checkpoint.inspect(self.out))  # what is on the disk

    def _epoch(self, number: int) -> None:
        total = self.recipe.epochs * self.trainer.steps
        stage = f"training {self.planned.architecture}"
        began = time.monotonic()
        loss, lr = self.trainer.epoch(number, lambda step: self.progress(stage, step, total))
        measured = number % MEASURE_EVERY == 0 or number == self.recipe.epochs
        row = {
            "epoch": number,
            "loss": loss,
            "accuracy": self._accuracy(bf16=True) if measured else None,
            "lr": lr,
            "seconds": round(time.monotonic() - began, 3),
        }
        self.curve.append(row)
        with self.curve_path.open("a") as file:
            file.write(_line(row))

    def _accuracy(self, bf16: bool) -> float:
        trainer = self.trainer
        bf16 = bf16 and trainer.device.type == "cuda"
        return accuracy(trainer.average.module, self.test[0], self.test[1], trainer.pool, bf16)

    def _would_exceed(self, seconds: float) -> bool:
        """Whether another epoch would end too late."""
        return time.monotonic() - self.began + expected_seconds(self.curve, self.recipe) > seconds

    def _save(self) -> None:
        """Save the complete epochs, unless they are saved."""
        if self.complete is not None and len(self.complete.curve) > self.saved:
            self.complete.save(self.work_path, self.planned.origin)
            self.saved = len(self.complete.curve)

    @contextmanager
    def _saving_on_ctrl_c(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self._save()
            hint = "run it again to continue" if self.saved else "the next run starts again"
            saved = f"{self.saved} of {self.recipe.epochs} epochs are saved"
            raise KeyboardInterrupt(f"{saved}; {hint}") from None


def _planned(
    architecture: str, recipe: Recipe, data: LabelledImages, test: LabelledImages, seed: int
) -> Metadata:
    if data.size != test.size:
        raise CasterError(f"{data.name} and {test.name} have images of different sizes")
    if len(data.labels) < 2:
        raise CasterError(f"{data.name} has {len(data.labels)} images: training needs at least 2")
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


def _finished(out: Path, planned: Metadata) -> Metadata:
    """Return the metadata of an existing checkpoint if it is the planned one."""
    found = checkpoint.inspect(out)
    other = [name for name, value in planned.origin.items() if found.origin[name] != value]
    if other:
        raise CasterError(
            f"{out} is a finished checkpoint with another {', '.join(other)}: name another file, "
            "or remove it"
        )
    return found


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"


# --- the state of an unfinished run: safetensors, never pickle ---------------------------------


@dataclass(frozen=True, eq=False)
class _Snapshot:
    """A copy of a trainer after an epoch: an interrupt may come while the next one changes it."""

    tensors: dict[str, Tensor]  # in the host's memory
    curve: list[Row]

    @classmethod
    def of(cls, trainer: Trainer, curve: list[Row]) -> Self:
        """Copy the state of a trainer."""
        plain = torch.contiguous_format
        copies = {
            name: value.detach().to("cpu", copy=True, memory_format=plain)
            for name, value in _tensors(trainer).items()
        }
        return cls(copies, list(curve))

    def save(self, path: Path, origin: dict[str, str]) -> None:
        """Write the copy, replacing an earlier state."""
        metadata = {"format": FORMAT, "origin": json.dumps(origin), "curve": json.dumps(self.curve)}
        with replacing(path) as temporary:
            save_file(self.tensors, temporary, metadata)


def restore(path: Path, trainer: Trainer, origin: dict[str, str]) -> list[Row]:
    """Restore a trainer from a file; return the curve so far."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CasterError(f"{path} is not a run of `caster bench train`: remove it")
            if json.loads(metadata["origin"]) != origin:
                raise CasterError(
                    f"{path} is a run with other settings: remove it, or name another file"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        curve: list[Row] = json.loads(metadata["curve"])
        _load_tensors(trainer, tensors)
    except (SafetensorError, OSError, KeyError, RuntimeError, json.JSONDecodeError) as error:
        line = " ".join(str(error).split())[:200]
        raise CasterError(f"{path} cannot be resumed: remove it ({line})") from None
    return curve


def _tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Collect weights, averaged weights, and the optimisers' state by parameter number."""
    found = {f"net.{name}": value for name, value in trainer.net.state_dict().items()}
    average = trainer.average.module.state_dict()
    found |= {f"average.{name}": value for name, value in average.items()}
    offset = 0  # parameters of the optimisers before
    for optimiser in trainer.optimisers:
        for number, state in optimiser.state_dict()["state"].items():
            found |= {f"optimizer.{offset + number}.{name}": v for name, v in state.items()}
        offset += len(_parameters(optimiser))
    return found


def _load_tensors(trainer: Trainer, tensors: dict[str, Tensor]) -> None:
    trainer.net.load_state_dict(_below("net.", tensors))
    trainer.average.module.load_state_dict(_below("average.", tensors))
    states = _below("optimizer.", tensors)
    offset = 0
    for optimiser in trainer.optimisers:
        state: dict[int, dict[str, Tensor]] = {}
        for number, parameter in enumerate(_parameters(optimiser)):
            for name, value in _below(f"{offset + number}.", states).items():
                if value.shape == parameter.shape:  # use the parameter's memory format
                    value = torch.empty_like(parameter).copy_(value)
                state.setdefault(number, {})[name] = value
        groups = optimiser.state_dict()["param_groups"]
        optimiser.load_state_dict({"state": state, "param_groups": groups})
        offset += len(_parameters(optimiser))


def _parameters(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
