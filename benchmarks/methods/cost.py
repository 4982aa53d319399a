"""What every method costs on an idle device: throughput, memory, what it retains.

CIFAR-10 under fog of severity 3, ResNet-50; methods that need a transformer on ViT-S/4. Every
method has a process of its own, in which it and the frozen model are timed in turns.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from lines import Lines, append
from subjects import (
    BATCH,
    RESNET50,
    SUBJECTS,
    VIT,
    Images,
    Run,
    as_batch,
    prepare,
    setup,
    shuffled,
    synchronise,
)
from torch import Tensor
from variants import is_inert, published
from work import Job, make_images, train_first

from caster.adapt.protocol import Method
from caster_bench.methods.catalogue import Entry
from caster_bench.methods.registry import entries, find
from training import DEVICE

CONDITION = "fog-3"
BATCHES, ROUNDS = 40, 9  # of a stream; of timings
WINDOW, LIMIT = 0.4, 10.0  # seconds of a timing, at least; of all timings of a method, about
WARM, MEASURED = 5, 8  # batches before anything is measured; while memory is


class Turn:
    """A method on its way through the stream, again and again, each time from its reset on."""

    def __init__(self, method: Method, batches: list[Tensor]) -> None:
        self.method, self.batches, self.at = method, batches, 0
        self.accepted: list[bool] = []
        method.reset()

    def seconds(self, n: int) -> float:
        """Time of the next few batches."""
        if self.at + n > len(self.batches):
            self.method.reset()
            self.at = 0
        synchronise()
        began = perf_counter()
        for batch in self.batches[self.at : self.at + n]:
            given = self.method.predict(batch)
            torch.as_tensor(given.logits).argmax(dim=1)
            self.accepted.append(given.accepted)
        synchronise()
        self.at += n
        return perf_counter() - began


def memory(turn: Turn) -> dict[str, float | None]:
    """MiB allocated and reserved at most, the model and a few batches included."""
    if DEVICE != "cuda":
        return {"allocated": None, "reserved": None}
    gc.collect()
    torch.cuda.empty_cache()  # what the choice of algorithms took
    torch.cuda.reset_peak_memory_stats()
    turn.seconds(MEASURED)
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return dict(zip(("allocated", "reserved"), (peak / 2**20 for peak in peaks), strict=True))


def speed(mine: Turn, frozen: Turn, limit: float) -> dict[str, Any]:
    """Images per second of both, and of their ratio the median and the middle half."""
    each = mine.seconds(WARM) / WARM
    frozen.seconds(WARM)
    n = min(max(round(WINDOW / each), 4), len(mine.batches))
    rounds = min(max(round(limit / (n * each)), 3), ROUNDS)
    rates, ratios = [], []
    whole = len(frozen.batches)
    for _ in range(rounds):
        reference = whole * BATCH / frozen.seconds(whole)
        rates.append(n * BATCH / mine.seconds(n))
        ratios.append(rates[-1] / reference)
    low, share, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "rate": statistics.median(rates),
        "share": share,
        "share_low": low,
        "share_high": high,
        "accepted": statistics.fmean(mine.accepted),
        "rounds": rounds,
        "window": n,
    }


def alone(run: Run, subject_name: str, name: str) -> dict[str, Any]:
    """One method in this process."""
    torch.backends.cudnn.benchmark = True
    subject, entry = SUBJECTS[subject_name], find(name)
    variant = published(entry)
    model, source = prepare(subject, Images(run), run)
    method = variant.make(model, source)
    images = np.load(run.out / f"{CONDITION}.npy")
    full = [images[at] for at in shuffled(len(images))[:BATCHES] if len(at) == BATCH]
    few = Turn(method, [as_batch(part) for part in full[:MEASURED]])
    few.seconds(min(WARM, len(few.batches)))
    found: dict[str, Any] = memory(few)
    retained = method.retained()
    found |= {"retained": retained.total, "parts": asdict(retained)}
    batches = few.batches + [as_batch(part) for part in full[MEASURED:]]
    limit = 1.0 if run.tiny else LIMIT
    found |= speed(Turn(method, batches), Turn(method.frozen, batches), limit)
    return found | {
        "backward": entry.gradients,
        "inert": is_inert(method),
        "settings": variant.settings(),
        "sha256": model.sha256,
        "setup": setup(
            run, "each method in a process of its own, algorithms chosen by cuDNN's benchmark"
        ),
    }


def plan() -> list[tuple[str, Entry]]:
    """Every method on the network it is measured on; frozen on both."""
    known = entries()
    convolutional = [(RESNET50.name, entry) for entry in known if RESNET50.suits(entry)]
    others = [entry for entry in known if not RESNET50.suits(entry)]
    return convolutional + [(VIT.name, entry) for entry in (find("frozen"), *others)]


def cost(run: Run, seconds: float) -> None:
    """Every method, one after another."""
    end = time.time() + seconds
    path = run.out / "cost.jsonl"
    lines = Lines(path)
    lines.repair()
    sha256 = prepare_all(run)
    for model, digest in sha256.items():
        lines.check(model, digest)
    missing = 0
    for subject, entry in plan():
        job = Job(subject, CONDITION, (published(entry),)).left(lines)
        if not job.variants:
            continue
        if time.time() > end:
            missing += 1
            continue
        command = [sys.executable, str(Path(__file__).parent), "alone", subject, entry.name]
        command += ["--data", str(run.data), "--out", str(run.out), *["--tiny"] * run.tiny]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        line = {"model": subject, "method": entry.name, "condition": CONDITION}
        if ran.returncode:
            told = ran.stderr.strip().splitlines()[-1:] or [f"exit {ran.returncode}"]
            append(path, line | {"error": told[0], "sha256": sha256[subject]})
        else:
            append(path, line | json.loads(ran.stdout.splitlines()[-1]))
    Lines(path).conclude(missing)


def prepare_all(run: Run) -> dict[str, str]:
    """Networks, states and images in their files; this process then leaves the device alone."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(make_images, run, CONDITION).result()
        return {s.name: pool.submit(train_first, run, s.name).result() for s in (RESNET50, VIT)}
