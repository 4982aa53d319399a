"""The cost of adaptation on a GPU: ResNet-50 at 224 pixels, batches of 64, bf16, channels last.

    python benchmarks/gpu.py

Images per second and memory of the frozen model alone, of Source-GDA on its features and of
CASTER, for 10 and for 1,000 classes; and of the model as a CUDA graph, alone and in CASTER.
Weights and images are random, which does not change the work. Every number of classes has its own
process. Contenders alternate and are compared within a round; memory is measured one by one.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

import numpy as np
import torch
import torchvision
from torch import Tensor

from caster import Adapter, Caster
from caster.adapt.fitting import bound_state
from caster.models.torch import TorchModel
from measure import machine

BATCH, BATCHES, ROUNDS = 64, 100, 15
WIDTH = 2048

Run = Callable[[Iterable[Tensor]], None]


def fitted(n_classes: int) -> Caster:
    """Source statistics of well-separated classes, with the width of ResNet-50's features."""
    rng = np.random.default_rng(0)
    y = np.arange(max(4000, 10 * n_classes)) % n_classes
    means = rng.standard_normal((n_classes, WIDTH)).astype(np.float32)
    h = rng.standard_normal((len(y), WIDTH), dtype=np.float32) + means[y]
    return Caster().fit(h, y)


def contenders(clf: Caster, n_classes: int) -> dict[str, Callable[[], Run]]:
    """Ways to answer batches, each created separately so that its memory can be measured."""

    def module() -> torch.nn.Module:
        torch.manual_seed(0)
        net = torchvision.models.resnet50(num_classes=n_classes).eval().cuda()
        return net.to(memory_format=torch.channels_last)

    def adapter(cuda_graph: bool = False) -> Adapter:
        model = TorchModel(module(), bf16=True, channels_last=True, cuda_graph=cuda_graph)
        return Adapter(model, bound_state(clf, model, tuple(range(n_classes))))

    def frozen() -> Run:
        net = module()

        def run(batches: Iterable[Tensor]) -> None:
            for batch in batches:
                with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
                    net(batch).argmax(dim=1)

        return run

    def source_gda() -> Run:
        made = adapter()

        def run(batches: Iterable[Tensor]) -> None:
            for batch in batches:
                made.clf.source_scores(made.model(batch).features).argmax(dim=1)

        return run

    def caster(cuda_graph: bool = False) -> Run:
        made = adapter(cuda_graph)

        def run(batches: Iterable[Tensor]) -> None:
            for out in made.stream(batches):
                _ = out.verdict.accepted, out.labels

        return run

    def one_by_one(cuda_graph: bool = False) -> Run:
        made = adapter(cuda_graph)

        def run(batches: Iterable[Tensor]) -> None:
            for batch in batches:
                out = made(batch)
                _ = out.verdict.accepted, out.labels

        return run

    return {
        "frozen": frozen,
        "Source-GDA": source_gda,
        "CASTER": caster,
        "CASTER, batch by batch": one_by_one,
        "frozen, recorded": lambda: recorded(module()),
        "CASTER, recorded": lambda: caster(cuda_graph=True),
        "CASTER, recorded, batch by batch": lambda: one_by_one(cuda_graph=True),
    }


def recorded(net: torch.nn.Module) -> Run:
    """The frozen model as a CUDA graph, with its predictions copied out."""
    held, graph, stream = torch.empty_like(images()), torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def predict() -> Tensor:
        with (
            torch.inference_mode(),
            torch.autocast("cuda", torch.bfloat16, cache_enabled=False),
        ):
            return net(held).argmax(dim=1)

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.ones((2, 2), device="cuda").mm(torch.ones((2, 2), device="cuda"))  # as CASTER does
        predict()  # libraries initialize outside the recording
        with torch.cuda.graph(graph, stream=stream):
            predictions = predict()
    torch.cuda.current_stream().wait_stream(stream)

    def run(batches: Iterable[Tensor], read_from: torch.nn.Module = net) -> None:
        for batch in batches:
            held.copy_(batch)
            graph.replay()
            predictions.clone()

    return run


def images() -> Tensor:
    batch = torch.randn(BATCH, 3, 224, 224, device="cuda")
    return batch.to(memory_format=torch.channels_last)


def seconds(run: Run, batch: Tensor) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run(batch for _ in range(BATCHES))
    torch.cuda.synchronize()
    return time.perf_counter() - start


def peaks(make: Callable[[], Run], batch: Tensor) -> tuple[float, float]:
    """Peak MiB allocated and reserved while one contender runs alone, after warm-up."""
    torch._C._cuda_clearCublasWorkspaces()  # of the previous contender
    run = make()
    run([batch] * 8)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # used while algorithms were chosen
    torch.cuda.reset_peak_memory_stats()
    run([batch] * 8)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**20, torch.cuda.max_memory_reserved() / 2**20


def measure(n_classes: int) -> None:
    made = contenders(fitted(n_classes), n_classes)
    batch = images()
    memory = {}
    for name, make in made.items():
        memory[name] = peaks(make, batch)
        gc.collect()
        torch.cuda.empty_cache()
    runs = {name: make() for name, make in made.items()}
    for run in runs.values():
        run([batch] * 10)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(seconds(run, batch))
    print(f"\nC = {n_classes:,}, B = {BATCH}; medians of {ROUNDS} rounds of {BATCHES} batches\n")
    print("| | images/s | of frozen | allocated, MiB | of frozen | reserved, MiB | of frozen |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name in runs:
        rate = BATCH * BATCHES / statistics.median(times[name])
        shares = [f / t for f, t in zip(times["frozen"], times[name], strict=True)]
        low, _, high = statistics.quantiles(shares, n=4)
        columns = [f"{rate:,.0f}", f"{statistics.median(shares):.1%} ({low:.1%} to {high:.1%})"]
        for mine, frozens in zip(memory[name], memory["frozen"], strict=True):
            columns += [f"{mine:.0f}", f"{mine / frozens:.3f}"]
        print(f"| {name} | {' | '.join(columns)} |", flush=True)


def main() -> None:
    torch.backends.cudnn.benchmark = True
    if len(sys.argv) > 1:
        measure(int(sys.argv[1]))
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {machine()}")
    print("In brackets the interquartile range of the rounds. A recording uses memory of its")
    print("own, which counts as reserved only.", flush=True)
    for n_classes in (10, 1000):
        subprocess.run([sys.executable, __file__, str(n_classes)], check=True)


if __name__ == "__main__":
    main()
