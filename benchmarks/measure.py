"""Shared by the benchmarks: a description of the machine, and alternating timings."""

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
    """Processor, cores and versions of the numerical libraries."""
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
    contenders: dict[str, Callable[[], object]],
    rounds: int,
    repeats: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each contender, alternating so that a slow moment affects all.

    Idle BLAS threads spin for a while after their last product. The pause lets them sleep;
    otherwise each contender would pay for the previous one.
    """
    for run in contenders.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            time.sleep(PAUSE)
            start = clock()
            for _ in range(repeats):
                run()
            times[name].append((clock() - start) / repeats)
    return {name: statistics.median(taken) for name, taken in times.items()}


def limit_sessions() -> None:
    """Let every session of ONNX Runtime use the cores of this process: it counts the machine's."""
    import onnxruntime

    class Options(onnxruntime.SessionOptions):
        def __init__(self) -> None:
            super().__init__()
            self.intra_op_num_threads = len(os.sched_getaffinity(0))

    onnxruntime.SessionOptions = Options


def complete_torchvision() -> None:
    """Define two operators that a CUDA build of torchvision needs to import with a CPU torch."""
    import torch

    if "+cpu" in torch.__version__ and not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)  # its operators live as long as it does
