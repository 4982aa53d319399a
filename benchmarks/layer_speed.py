"""The cost of layer transport relative to the frozen model: images per second and memory.

    python benchmarks/layer_speed.py [NETWORK ...]

Batches of 64 and 256 images; on a GPU also with the aligned pass recorded as a CUDA graph, against
the plain frozen model, which would be faster recorded too. A recording's memory counts as reserved,
not as allocated. Weights and images are random, which does not change the work. The certificate
accepts every batch, as on a long good stream, so that fewer and fewer are compared. Contenders
alternate and are compared within a round; memory is measured one by one.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import caster
from caster.models.torch import TorchModel
from caster.state import State
from caster_bench.engine.networks import build, find
from caster_bench.methods.protocol import Method
from caster_bench.methods.registry import create
from caster_bench.methods.source import Source
from measure import complete_torchvision, machine

NETWORKS = ("resnet18", "resnet50", "convnext_tiny", "swin_tiny", "vit_base", "keras_resnet50")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SIZES = (64, 256) if ON_GPU else (64,)
BATCHES, ROUNDS = (40, 5) if ON_GPU else (2, 3)
CLASSES, FIT = 10, 512
ALWAYS = 1e9  # a threshold that accepts everything


def module(network: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return build(network, CLASSES, find(network).sizes[0]).to(DEVICE)


def image_set(network: str, n: int) -> Tensor:
    side = find(network).sizes[0]
    return torch.randn(n, 3, side, side, device=DEVICE)


def fitted(network: str) -> State:
    """Source statistics of random images."""

    def batches() -> Iterator[tuple[Tensor, list[int]]]:
        for _ in range(FIT // 64):
            yield image_set(network, 64), [n % CLASSES for n in range(64)]

    return caster.fit(TorchModel(module(network)), batches(), layers=True).state


def contenders(network: str, state: State) -> dict[str, Callable[[], Method]]:
    """Ways to answer batches, each created separately so that its memory can be measured."""

    def made(name: str, cuda_graph: bool, **settings: object) -> Method:
        model = TorchModel(module(network), cuda_graph=cuda_graph)
        return create(name, model, Source(state=state), **settings)

    ways = {
        "frozen": partial(made, "frozen"),
        "aligned": partial(made, "layer-transport-ungated"),
        "layer transport": partial(made, "layer-transport", tau=ALWAYS),
    }
    plain = {name: partial(way, cuda_graph=False) for name, way in ways.items()}
    if not ON_GPU:
        return plain
    names = [name for name in ways if name != "frozen"]
    return plain | {f"{name}, recorded": partial(ways[name], cuda_graph=True) for name in names}


def settle() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def seconds(method: Method, batch: Tensor) -> float:
    settle()
    start = time.perf_counter()
    for _ in range(BATCHES):
        method.predict(batch).logits.argmax(dim=1)
    settle()
    return time.perf_counter() - start


def peaks(make: Callable[[], Method], batch: Tensor) -> tuple[float, float]:
    """Peak MiB allocated and reserved while one contender runs alone, after warm-up."""
    torch._C._cuda_clearCublasWorkspaces()  # of the previous contender
    method = make()
    for _ in range(8):
        method.predict(batch)
    settle()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(8):
        method.predict(batch)
    settle()
    return torch.cuda.max_memory_allocated() / 2**20, torch.cuda.max_memory_reserved() / 2**20


def measure(network: str, size: int) -> None:
    made = contenders(network, fitted(network))
    batch = image_set(network, size)
    memory = {}
    for name, make in made.items() if ON_GPU else ():
        memory[name] = peaks(make, batch)
        gc.collect()
        torch.cuda.empty_cache()
    runs = {name: make() for name, make in made.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(-1, ROUNDS):
        for name, method in runs.items():
            taken = seconds(method, batch)
            if turn >= 0:
                times[name].append(taken)
    for name in runs:
        rate = size * BATCHES / statistics.median(times[name])
        share = statistics.median(f / t for f, t in zip(times["frozen"], times[name], strict=True))
        columns = [network, str(size), name, f"{rate:,.0f}", f"{share:.1%}"]
        for mine, theirs in zip(memory.get(name, ()), memory.get("frozen", ()), strict=True):
            columns += [f"{mine:.0f}", f"{mine / theirs:.3f}"]
        print(f"| {' | '.join(columns)} |", flush=True)


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[2].isdigit():
        measure(sys.argv[1], int(sys.argv[2]))
        return
    place = torch.cuda.get_device_name() if ON_GPU else "CPU"
    print(f"{place}, torch {torch.__version__}; {machine()}")
    print(f"Medians of {ROUNDS} rounds of {BATCHES} batches; shares of the frozen model.\n")
    memory = " allocated, MiB | share | reserved, MiB | share |" if ON_GPU else ""
    print(f"| network | batch | | images/s | share |{memory}")
    print("|---|--:|---|--:|--:|" + "--:|--:|--:|--:|" * ON_GPU, flush=True)
    for network in sys.argv[1:] or NETWORKS:
        for size in SIZES:  # in its own process, so that memory is measured separately
            subprocess.run([sys.executable, __file__, network, str(size)], check=True)


if __name__ == "__main__":
    complete_torchvision()
    torch.backends.cudnn.benchmark = True
    main()
