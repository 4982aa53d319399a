"""Which devices there are, and how many processes to put on them."""

from __future__ import annotations

import os

from caster.errors import CasterError
from caster_bench.engine.run_context import CPU, CUDA

AUTO = "auto"  # of a cluster: nobody knows its devices before it is asked
EACH_GPU = 6  # workers: a small network alone leaves a GPU waiting for its launches


def chosen(device: str | None) -> list[str]:
    """The devices a user means: every GPU by "cuda", and by nothing if there is one."""
    if device == CPU:
        return [CPU]
    try:
        import torch
    except ModuleNotFoundError:
        raise CasterError("the benchmark needs torch: pip install 'caster-tta[bench]'") from None

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None and there == 0:
        return [CPU]
    every = [f"{CUDA}:{i}" for i in range(there)]
    if device in (None, CUDA) and there:
        return every
    if device not in every:
        found = ", ".join(every) or "no GPU"
        raise CasterError(f"there is no device {device!r}: there is cpu, and {found}")
    return [device]


def on_cluster(device: str, gpus: float) -> str:
    """The device in every process of a Ray cluster, which shows each no GPU but its own.

    >>> on_cluster("auto", gpus=2), on_cluster("auto", gpus=0), on_cluster("cpu", gpus=2)
    ('cuda:0', 'cpu', 'cpu')
    """
    if device not in (AUTO, CPU, CUDA):
        raise CasterError(f"Ray itself chooses a GPU: say --device cuda or cpu, not {device}")
    if device == CUDA and not gpus:
        raise CasterError("the Ray cluster has no GPU: add one, or say --device cpu")
    return CPU if device == CPU or not gpus else f"{CUDA}:0"


def share_out(devices: list[str], workers: int | None) -> tuple[int, int]:
    """How many workers, and helpers on the cores that are left.

    >>> share_out(["cuda:0"], workers=1000_000)[1]
    0
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    if workers is None:
        room = cores if devices == [CPU] else EACH_GPU * len(devices)
        workers = max(1, min(room, cores))
    return workers, max(0, cores - workers)
