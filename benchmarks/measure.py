"""What the benchmarks share: the machine in words, and times taken in turns."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

PAUSE = 0.15  # seconds before every timing
_LIBRARIES: list[object] = []


def machine() -> str:
    """Processor, cores and the versions that matter to linear algebra."""
    import numpy
    import scipy
    import sklearn

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    versions = f"NumPy {numpy.__version__}, SciPy {scipy.__version__}"
    return (
        f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} cores, "
        f"Python {platform.python_version()}, {versions}, scikit-learn {sklearn.__version__}"
    )


def in_turns(
    contenders: dict[str, Callable[[], object]], rounds: int, repeats: int = 1
) -> dict[str, float]:
    """Median seconds of each, taken in turns so that a slow moment of the machine hits all.

    Idle BLAS workers spin for a while after their last product; the pause lets them fall asleep,
    or each contender would pay for the one before it.
    """
    for run in contenders.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            time.sleep(PAUSE)
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            times[name].append((time.perf_counter() - start) / repeats)
    return {name: statistics.median(taken) for name, taken in times.items()}


def complete_torchvision() -> None:
    """Let a CUDA-built torchvision be imported beside a CPU-only torch: it lacks two operators."""
    import torch

    if "+cpu" in torch.__version__ and not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)  # its operators go when it does
