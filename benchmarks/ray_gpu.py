"""Fit and predict on Ray with GPU workers, against one process on the same GPU.

    python benchmarks/ray_gpu.py                       # ResNet-50 on 8,000 images, one GPU
    python benchmarks/ray_gpu.py --network test_resnet --classes 11 --length 64   # a rehearsal

Draws images, and gives a random network a head for them. One and two workers, which
share the GPU, fit the images; one of the two is killed in the first pass. Two workers answer four
streams, and a Ray Dataset is fitted. Every result is compared with that of this process. Prints
images per second through the model beside a plain loop over the same images, and exits with 1 if a
model did not run on the GPU or a result differs by more than `docs/clusters.md` says.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import caster
from caster import state as states
from caster.adapt.fitting import fit_images
from caster.adapt.image_batches import read_batches, run
from caster.adapt.prediction import predict_images
from caster.adapt.ray_jobs import predict_streams
from caster.cli.options import ray_pool
from caster.config import DEFAULT_LIMITS, IMAGES_AT_ONCE, Settings
from caster.io.images import open_images
from measure import complete_torchvision, machine

# Largest difference, of the largest entry: docs/clusters.md, "Equal results". On a GPU the size of
# a batch probably chooses the convolution.
SAME = {"cpu": 1e-5, "cuda": 1e-3}
PER_CLASS = 200  # fewer than are measured in the layers, so that every image is
SIDE = 256  # pixels
STREAMS = 4
ROWS, PIXELS = 1024, 64  # of the dataset
OPTIONS = {"batch_size": 64, "probabilities": True}
PATIENCE = 60.0  # seconds for all workers to start
START = time.perf_counter()


def say(text: str) -> None:
    print(f"{time.perf_counter() - START:5.1f} s  {text}", flush=True)


# --- images and a network ------------------------------------------------------------------------


def draw(c: int, rng: np.random.Generator, side: int, contrast: float = 1.0) -> NDArray[np.uint8]:
    """An image of class c: blobs around its two colours, and noise."""
    low, high = np.random.default_rng(c).uniform(40, 215, (2, 3))
    blobs = rng.random((8, 8, 1)) + rng.normal(0, 0.15, (8, 8, 3))
    small = 128 + contrast * (low + blobs * (high - low) - 128)
    image = Image.fromarray(np.clip(small, 0, 255).astype(np.uint8))
    return np.asarray(image.resize((side, side), Image.Resampling.BICUBIC))


def write_class(folder: Path, c: int) -> None:
    (folder / f"{c:03}").mkdir(parents=True)
    rng = np.random.default_rng((1, c))
    for i in range(PER_CLASS):
        Image.fromarray(draw(c, rng, SIDE)).save(folder / f"{c:03}" / f"{i}.jpg", quality=90)


def write_stream(folder: Path, classes: int, length: int, index: int) -> None:
    """Images of all classes in random order, in less and less contrast from stream to stream."""
    (folder / f"stream{index}").mkdir(parents=True)
    rng = np.random.default_rng((2, index))
    for i in range(length):
        image = draw(int(rng.integers(classes)), rng, SIDE, 1 - 0.2 * index)
        Image.fromarray(image).save(folder / f"stream{index}" / f"{i:04}.jpg", quality=90)


def write_weights(path: Path, network: str, classes: int, device: str) -> None:
    """Random weights, BatchNorms that know the images, and a head by ridge regression."""
    import timm
    import torch
    from safetensors.torch import save_file
    from torch import nn

    from caster.models.pretrained import timm_preprocessing

    torch.manual_seed(0)
    net = timm.create_model(network, num_classes=classes).to(device)
    rng, n = np.random.default_rng(3), 16
    labels = torch.arange(n * classes, device=device) % classes
    preprocessing = timm_preprocessing(net)
    drawn = (draw(int(c), rng, SIDE) for c in labels)
    resized = [preprocessing.resize_and_crop(image, DEFAULT_LIMITS) for image in drawn]
    inputs = torch.from_numpy(preprocessing.batch(resized)).to(device)
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = None  # running statistics are those of one batch
            nn.init.ones_(part.weight)  # timm has zeros at the end of a residual
    with torch.inference_mode():
        net.train()(inputs[:128])
        net.eval()
        parts = [net.forward_features(some) for some in inputs.split(64)]
        features = torch.cat([net.forward_head(part, pre_logits=True) for part in parts]).double()
        mean, targets = features.mean(0), 10 * nn.functional.one_hot(labels, classes).double()
        x = features - mean
        kernel = x @ x.T
        ridge = 0.01 * kernel.diagonal().mean() * torch.eye(len(x), device=device)
        weight = torch.linalg.solve(kernel + ridge, targets).T @ x
        head = net.get_classifier()
        head.weight.copy_(weight)
        head.bias.copy_(-weight @ mean)
    save_file({name: value.contiguous() for name, value in net.state_dict().items()}, path)


# --- what workers are asked ----------------------------------------------------------------------


def warmed(model: Any, block: int, index: int) -> tuple[int, str, float]:
    """Run the model on two batches: this process, the device, gigabytes used there at most."""
    import torch

    time.sleep(0.5)  # so that every worker takes one
    for _ in range(2):
        features = model(np.zeros((IMAGES_AT_ONCE, 3, 224, 224), np.float32)).features
    used = torch.cuda.max_memory_allocated() if features.is_cuda else 0
    return os.getpid(), str(features.device), used / 1e9


def answers(pool: Any, workers: int) -> list[tuple[int, str, float]]:
    """The last answer of every worker, once all are there."""
    found: dict[int, tuple[int, str, float]] = {}
    deadline = time.perf_counter() + PATIENCE
    while len(found) < workers and time.perf_counter() < deadline:
        found |= {answer[0]: answer for *_, answer in pool.map(warmed, list(range(workers)))}
    return sorted(found.values())


# --- comparisons ---------------------------------------------------------------------------------


def arrays(state: Any) -> dict[str, NDArray[Any]]:
    """All arrays of a state."""
    found = {name: getattr(state.moments, name) for name in ("U", "means", "covariances", "counts")}
    found |= state.sketch.arrays()
    for site, moments in state.layers.items():
        names = ("mean", "variance", "covariance")
        found |= {f"layers {site} {name}": getattr(moments, name) for name in names}
        if moments.classes is not None:
            names = ("counts", "means", "variances")
            found |= {f"layers {site} {name}": getattr(moments.classes, name) for name in names}
    return {name: np.asarray(value, float) for name, value in found.items() if value is not None}


def difference(a: Any, b: Any) -> tuple[float, str]:
    """The largest difference, relative to the largest entry of its array or 1, and where it is."""
    a, b = arrays(a), arrays(b)
    if a.keys() != b.keys():
        return np.inf, "arrays"
    each = {n: np.abs(a[n] - b[n]).max() / max(1.0, np.abs(a[n]).max()) for n in a}
    worst = max(each, key=lambda name: each[name])
    return float(each[worst]), worst


class Checks:
    """What must hold; counts what does not."""

    failed = 0

    def __call__(self, holds: bool, text: str) -> None:
        """Print whether something holds."""
        self.failed += not holds
        say(f"{'ok    ' if holds else 'FAILED'} {text}")


class Deaths(logging.Handler):
    """Counts the workers that the pool has found dead."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count a record."""
        self.count += "a worker died" in record.getMessage()


@contextmanager
def timed(stages: dict[str, list[float]], kill: list[int]) -> Iterator[Any]:
    """A progress function that notes when stages begin and end, and kills after the first block."""

    def progress(stage: str, done: int, total: int) -> None:
        stages.setdefault(stage, []).append(time.perf_counter())
        if kill and stage.startswith("pass 1") and 0 < done < total:
            os.kill(kill.pop(), signal.SIGKILL)

    yield progress


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="resnet50", help="of timm")
    parser.add_argument("--classes", type=int, default=40)
    parser.add_argument("--length", type=int, default=512, help="images of a stream")
    given = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    scratch = tempfile.TemporaryDirectory(prefix="ray-gpu-")
    work = Path(scratch.name)
    with ProcessPoolExecutor(cores) as pool:  # before CUDA starts
        list(pool.map(partial(write_class, work / "source"), range(given.classes)))
        list(pool.map(partial(write_stream, work, given.classes, given.length), range(STREAMS)))
    complete_torchvision()
    import ray
    import torch

    gpus = int(torch.cuda.is_available())
    device = "cuda" if gpus else "cpu"
    name = torch.cuda.get_device_name() if gpus else "no GPU, so that this is a rehearsal"
    print(f"{machine()}, torch {torch.__version__}, Ray {ray.__version__}, {name}")
    write_weights(work / "weights.safetensors", given.network, given.classes, device)
    make = partial(caster.wrap, f"timm:{given.network}", checkpoint=work / "weights.safetensors")
    model, here = make(), make(device=device)
    images = open_images(work / "source", labelled=True)
    streams = [open_images(work / f"stream{i}") for i in range(STREAMS)]
    say(f"{len(images):,} images, {given.classes} classes, {given.network}, {device}")
    check, rows = Checks(), []

    def fitted(label: str, pool: Any = None, kill: tuple[int, ...] = ()) -> Any:
        """Fit, and add a row to the table."""
        stages: dict[str, list[float]] = {}
        path, start = work / f"{label}.caster", time.perf_counter()
        with timed(stages, list(kill)) as progress:
            fit_images(
                here if pool is None else model,
                images,
                path,
                Settings(),
                store=work / f"{label} cache",
                batch_size=IMAGES_AT_ONCE,
                progress=progress,
                pool=pool,
            )
        whole = time.perf_counter() - start
        model_stage = next(iter(stages.values()))
        rows.append((label, len(images) / (model_stage[-1] - model_stage[0]), whole))
        say(f"fitted: {label}")
        return states.load(path)

    def plain_loop() -> float:
        start = time.perf_counter()
        batches = read_batches(
            images, here.preprocessing, range(len(images)), IMAGES_AT_ONCE, skip_unreadable=False
        )
        for batch in batches:
            run(here, batch, images.names)
        return len(images) / (time.perf_counter() - start)

    warmed(here, 0, 0)
    before = plain_loop()
    one = fitted("one process")
    rows.insert(0, ("plain loop", (before + plain_loop()) / 2, None))
    say("plain loop, before and after")
    adapter = caster.Adapter(here, one)
    for stream in streams:
        predict_images(adapter, stream, work / f"{Path(stream.name).name}.csv", **OPTIONS)
    say(f"{STREAMS} streams of {given.length} images in one process")

    ray.init(
        address="local",
        num_cpus=max(2, cores),
        num_gpus=gpus,
        include_dashboard=False,
        object_store_memory=500_000_000,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    deaths = Deaths()
    logging.getLogger("caster").addHandler(deaths)
    found = {}
    for workers in (1, 2):
        with ray_pool("local", workers, make, model) as pool:
            label = f"Ray, {workers} worker{'s' if workers > 1 else ''}"
            pids = [pid for pid, *_ in answers(pool, workers)]
            check(len(pids) == workers, f"{label}: {len(pids)} ready")
            found[label] = fitted(label, pool)
            for pid, where, used in answers(pool, workers):
                on_device = where.startswith(device) and (used > 0) == bool(gpus)
                check(on_device, f"process {pid}: on {where}, {used:.2f} GB of CUDA memory")
            if workers == 2:
                label = "Ray, 2 workers, one killed"
                found[label] = fitted(label, pool, (pids[0],))
                check(deaths.count == 1, f"{deaths.count} worker died")
                predict_streams(pool, one, streams, work / "tables", adapter_options={}, **OPTIONS)
                say(f"{STREAMS} streams of {given.length} images on Ray")
    for label, state in found.items():
        largest, where = difference(one, state)
        check(
            largest <= SAME[device], f"{label}: differs by {largest:.1e} from one process ({where})"
        )
    for label, state in list(found.items())[1:]:
        same = states.digest(state) == states.digest(found["Ray, 1 worker"])
        check(same, f"{label}: the state of one worker, bit for bit: {same}")
    for stream in streams:
        table = f"{Path(stream.name).name}.csv"
        alone, there = ((folder / table).read_text() for folder in (work, work / "tables"))
        pairs = list(zip(alone.splitlines(), there.splitlines(), strict=True))
        equal = sum(a == b for a, b in pairs) - 1
        accepted = sum(",accepted," in line for line, _ in pairs)
        check(alone == there, f"{table}: {equal} of {given.length} rows equal, {accepted} accepted")

    rng = np.random.default_rng(4)
    labels = np.arange(ROWS) % given.classes
    inputs = np.stack([draw(int(c), rng, PIXELS) for c in labels]).astype(np.float32)
    inputs = np.ascontiguousarray(inputs.transpose(0, 3, 1, 2)) / 64 - 2
    batches = [(inputs[i : i + 64], labels[i : i + 64]) for i in range(0, ROWS, 64)]
    alone = caster.fit(here, batches).state
    items = [{"inputs": x, "labels": int(y)} for x, y in zip(inputs, labels, strict=True)]
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    dataset = ray.data.from_items(items, override_num_blocks=4)
    largest, where = difference(alone, caster.fit(model, dataset).state)
    check(largest <= SAME["cpu"], f"Ray Dataset: differs by {largest:.1e} from batches ({where})")
    ray.shutdown()

    print("\n| | images per second through the model | of the plain loop | whole fit |")
    print("|---|--:|--:|--:|")
    for label, rate, whole in rows:
        seconds = "" if whole is None else f"{whole:.1f} s"
        print(f"| {label} | {rate:,.0f} | {rate / rows[0][1]:.2f} | {seconds} |")
    say(f"{check.failed} checks failed")
    return int(check.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
