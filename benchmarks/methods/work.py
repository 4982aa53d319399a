"""Cells, that is networks with methods under conditions, shared out to processes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from conditions import under
from lines import Lines, append, words
from streams import Stream
from subjects import SUBJECTS, Array, Images, Run, Subject, prepare, setup
from variants import Variant, is_inert

from caster.adapt.frozen import Frozen
from caster.adapt.protocol import Method
from caster.adapt.source import Source
from caster.io.files import move_into_place
from caster.models.protocol import FrozenModel


@dataclass(frozen=True)
class Job:
    """Some methods on one network under one condition."""

    subject: str
    condition: str
    variants: tuple[Variant, ...]

    def left(self, lines: Lines) -> Job:
        """What of it has not been done."""

        def done(variant: Variant) -> bool:
            try:
                settings = variant.settings()
            except Exception:  # of a method that cannot be made, which the job will tell
                return False
            return lines.done(self.subject, variant.label, self.condition, settings=settings)

        return replace(self, variants=tuple(v for v in self.variants if not done(v)))


@cache
def loaded(run: Run) -> Images:
    return Images(run)


@cache
def prepared(run: Run, subject: str) -> tuple[FrozenModel, Source]:
    return prepare(SUBJECTS[subject], loaded(run), run)


@cache
def method_of(run: Run, subject: str, variant: Variant) -> Method:
    return variant.make(*prepared(run, subject))


def train_first(run: Run, subject: str) -> str:
    """Train and fit a network in this process; the others read its files."""
    return prepared(run, subject)[0].sha256


def make_images(run: Run, condition: str) -> None:
    """Corrupted images in a file, unless it is there."""
    path = run.out / f"{condition}.npy"
    if not path.exists():
        part = path.with_suffix(".part.npy")
        np.save(part, under(loaded(run).test_images, condition))
        move_into_place(part, path)


def do(run: Run, job: Job, path: Path, how: str, end: float) -> None:
    """Every cell of a job that can be begun in time, each written to the file."""
    logging.getLogger("caster").setLevel(logging.ERROR)  # the tables say what is inert
    if time.time() > end:
        return
    model, source = prepared(run, job.subject)
    images: Array = np.load(run.out / f"{job.condition}.npy")
    stream = Stream(Frozen(model, source), images, loaded(run).test_labels)
    of_all = {"model": job.subject, "condition": job.condition, "sha256": model.sha256}
    for variant in job.variants:
        if time.time() > end:
            return
        line: dict[str, Any] = of_all | {"method": variant.label, "setup": setup(run, how)}
        try:
            line["settings"] = variant.settings()
            method = method_of(run, job.subject, variant)
            line |= stream.score(method) | {"inert": is_inert(method)}
        except Exception as error:  # of one method: the others go on
            line["error"] = words(error)
        append(path, line)


def carry_out(
    run: Run,
    name: str,
    subjects: tuple[Subject, ...],
    plan: Callable[[Subject], list[Job]],
    workers: int,
    seconds: float,
) -> None:
    """All jobs of a plan but those done before; a network's begin when it is trained."""
    end = time.time() + seconds
    path = run.out / f"{name}.jsonl"
    before = Lines(path)
    before.repair()
    plans = {subject.name: plan(subject) for subject in subjects}
    wanted = dict.fromkeys(job.condition for jobs in plans.values() for job in jobs)
    how = f"{workers} processes side by side" if workers > 1 else "one process"
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # of the workers
    begun: list[Future[None]] = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        training = {pool.submit(train_first, run, name): name for name in plans}
        images = [pool.submit(make_images, run, condition) for condition in wanted]
        for each in as_completed(training):
            before.check(training[each], each.result())
            for made in images:
                made.result()
            left = (job.left(before) for job in plans[training[each]])
            begun += [pool.submit(do, run, job, path, how, end) for job in left if job.variants]
        for job in begun:
            job.result()
    after = Lines(path)
    every = ((job, v) for jobs in plans.values() for job in jobs for v in job.left(after).variants)
    after.conclude(
        sum((job.subject, v.label, job.condition) not in after.failed for job, v in every)
    )
