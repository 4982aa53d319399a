"""What a device saves: corruptions by NumPy and by torch, on the same images.

    python benchmarks/corrupt_device.py                    # on the GPU, if there is one
    python benchmarks/corrupt_device.py --device cpu --images 4

Milliseconds an image, of 32 and of 224 pixels a side: by NumPy on one core; by torch from a NumPy
array to a NumPy array, the way to the device and back included; and by torch from tensor to tensor
on the device. How often NumPy takes as long as torch, for both. How the two paths agree: the
difference of the images' means, in grey levels, and of their PSNR, in dB, each with its standard
error; where no random number is used both are nought. What the device held at most. On a CPU both
have one thread. The images are cut from scikit-learn's two sample photographs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_sample_images
from threadpoolctl import threadpool_limits

from caster_bench.data.corruptions.make import ON_DEVICE, corrupt
from measure import machine

LARGE, BLOCK = 224, 7  # pixels of a side, and of the blocks that make 32 of them
ROUNDS = 5
Images = NDArray[np.uint8]


def pieces(count: int) -> Images:  # (count, LARGE, LARGE, 3)
    """Squares of photographs, half of them mirrored, no two alike."""
    rng = np.random.default_rng(0)
    photographs = load_sample_images().images
    squares = []
    for i in range(count):
        photograph = photographs[i % len(photographs)]
        top, left = (rng.integers(side - LARGE + 1) for side in photograph.shape[:2])
        square = photograph[top : top + LARGE, left : left + LARGE]
        squares.append(square[:, :: 1 if rng.random() < 0.5 else -1])
    return np.stack(squares)


def reduced(images: Images) -> Images:  # (count, 32, 32, 3)
    """Each block's mean."""
    side = LARGE // BLOCK
    blocks = images.reshape(-1, side, BLOCK, side, BLOCK, 3)
    small: Images = blocks.mean(axis=(2, 4)).round().astype(np.uint8)
    return small


def milliseconds(work: Callable[[], object], rounds: int, wait: Callable[[], None]) -> float:
    """The median of several rounds, once warm."""
    work()
    times = []
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def agreement(images: Images, one: Images, other: Images) -> str:
    """Differences of mean and PSNR, each with its standard error over the images."""

    def psnr(made: Images) -> NDArray[np.float64]:
        error = ((made - images.astype(np.float64)) ** 2).mean(axis=(1, 2, 3))
        ratios: NDArray[np.float64] = 10 * np.log10(255**2 / np.maximum(error, 1e-3))
        return ratios

    mean = other.mean(axis=(1, 2, 3)) - one.mean(axis=(1, 2, 3))
    ratio = psnr(other) - psnr(one)
    error = len(images) ** 0.5
    cells = (f"{d.mean():+.3f} ± {d.std() / error:.3f}" for d in (mean, ratio))
    return " | ".join(cells)


def row(name: str, severity: int, images: Images, device: torch.device) -> str:
    """One corruption at one size, as a row of the table."""
    on_gpu = device.type == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    placed = torch.tensor(images, device=device)
    made: dict[str, Any] = {}

    def by_numpy() -> None:
        made["numpy"] = corrupt(images, name, severity)

    def by_torch() -> None:
        made["torch"] = corrupt(images, name, severity, device=device)

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    arrays = milliseconds(by_torch, ROUNDS, wait) / len(images)
    tensors = milliseconds(lambda: corrupt(placed, name, severity, device=device), ROUNDS, wait)
    tensors /= len(images)
    memory = f"{torch.cuda.max_memory_allocated() / 2**20:.0f}" if on_gpu else "-"
    with threadpool_limits(1):
        numpy = milliseconds(by_numpy, 1, wait) / len(images)
    times = f"{numpy:.3f} | {arrays:.4f} | {numpy / arrays:.1f} | {tensors:.4f}"
    agreed = agreement(images, made["numpy"], made["torch"])
    return f"| {name} | {times} | {numpy / tensors:.1f} | {agreed} | {memory} |"


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=torch.device(default))
    parser.add_argument("--images", type=int, default=96, help="of 224 pixels; sixteenfold of 32")
    parser.add_argument("--severity", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    on_gpu = options.device.type == "cuda"
    where = torch.cuda.get_device_name(options.device) if on_gpu else "torch on the CPU"
    print(f"{where}, torch {torch.__version__}; {machine()}")
    large, many = pieces(options.images), pieces(16 * options.images)
    for images in (reduced(many), large):
        count, side = images.shape[:2]
        print(f"\n{count} images of {side} pixels, severity {options.severity}; ms an image\n")
        print("| | NumPy | torch | ratio | tensors | ratio | mean | PSNR | MiB |")
        print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
        for name in ON_DEVICE:
            print(row(name, options.severity, images, options.device), flush=True)


if __name__ == "__main__":
    main()
