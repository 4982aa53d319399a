"""What adaptation costs on a GPU: ResNet-50 at 224 pixels, batches of 64, bf16, channels last.

    python benchmarks/gpu.py

Images per second and peak memory of the frozen model alone, of Source-GDA on its features and of
CASTER, for 10 and for 1,000 classes. Weights and images are random: neither changes the work.
Times are taken in turns, medians over rounds; peaks each on its own, with nothing else held.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable

import numpy as np
import torch
import torchvision
from torch import Tensor

from caster import Adapter, Caster, wrap
from caster.adapter import bound_state

BATCH, BATCHES, ROUNDS = 64, 200, 7
WIDTH = 2048

Run = Callable[[Iterable[Tensor]], None]


def fitted(n_classes: int) -> Caster:
    """Source statistics of well-separated classes, of the width of ResNet-50's features."""
    rng = np.random.default_rng(0)
    y = np.arange(max(4000, 20 * n_classes)) % n_classes
    means = rng.standard_normal((n_classes, WIDTH)).astype(np.float32)
    h = rng.standard_normal((len(y), WIDTH), dtype=np.float32) + means[y]
    return Caster().fit(h, y)


def contenders(clf: Caster, n_classes: int) -> dict[str, Callable[[], Run]]:
    """Ways to answer batches, each made from nothing so that its memory can be told."""

    def module() -> torch.nn.Module:
        torch.manual_seed(0)
        net = torchvision.models.resnet50(num_classes=n_classes).eval().cuda()
        return net.to(memory_format=torch.channels_last)

    def frozen() -> Run:
        net = module()

        def run(batches: Iterable[Tensor]) -> None:
            for batch in batches:
                with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
                    net(batch).argmax(dim=1)

        return run

    def adapter() -> Adapter:
        model = wrap(module(), bf16=True, channels_last=True)
        return Adapter(model, bound_state(clf, model, tuple(range(n_classes))))

    def source_gda() -> Run:
        made = adapter()

        def run(batches: Iterable[Tensor]) -> None:
            for batch in batches:
                made.clf.source_scores(made.model(batch).features).argmax(dim=1)

        return run

    def caster() -> Run:
        made = adapter()

        def run(batches: Iterable[Tensor]) -> None:
            for out in made.stream(batches):
                _ = out.verdict.accepted, out.predictions

        return run

    def one_by_one() -> Run:
        made = adapter()

        def run(batches: Iterable[Tensor]) -> None:
            for batch in batches:
                out = made(batch)
                _ = out.verdict.accepted, out.predictions

        return run

    return {
        "frozen": frozen, "Source-GDA": source_gda, "CASTER": caster,
        "CASTER, batch by batch": one_by_one,
    }  # fmt: skip


def images() -> Tensor:
    batch = torch.randn(BATCH, 3, 224, 224, device="cuda")
    return batch.to(memory_format=torch.channels_last)


def seconds(run: Run, batch: Tensor) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run(batch for _ in range(BATCHES))
    torch.cuda.synchronize()
    return time.perf_counter() - start


def peak(make: Callable[[], Run], batch: Tensor) -> float:
    """MiB allocated at most while one contender runs alone."""
    gc.collect()
    torch.cuda.empty_cache()
    run = make()
    run([batch] * 8)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run([batch] * 8)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**20


def measure(n_classes: int) -> None:
    made = contenders(fitted(n_classes), n_classes)
    batch = images()
    peaks = {name: peak(make, batch) for name, make in made.items()}
    runs = {name: make() for name, make in made.items()}
    for run in runs.values():
        run([batch] * 20)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(seconds(run, batch))
    print(f"\nC = {n_classes:,}, B = {BATCH}\n")
    print("| | images/s | of frozen | peak MiB | of frozen |")
    print("|---|--:|--:|--:|--:|")
    for name in runs:
        rate = BATCH * BATCHES / statistics.median(times[name])
        shares = [f / t for f, t in zip(times["frozen"], times[name], strict=True)]
        low, high = min(shares), max(shares)
        print(
            f"| {name} | {rate:,.0f} | {statistics.median(shares):.1%} ({low:.1%} to {high:.1%}) "
            f"| {peaks[name]:.0f} | {peaks[name] / peaks['frozen']:.3f} |"
        )


def main() -> None:
    torch.backends.cudnn.benchmark = True
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, ResNet-50, 224 px, bf16")
    for n_classes in (10, 1000):
        measure(n_classes)


if __name__ == "__main__":
    main()
