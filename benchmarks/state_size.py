"""Size of a state file, array by array, for networks and numbers of classes.

    python benchmarks/state_size.py [NETWORK:CLASSES:SIDE ...]

Fits random weights to noise images, two of every class: the size of a state depends neither on the
weights nor on the images. NETWORK is one of `caster_bench.engine.networks`, SIDE the side of an
image in pixels. `classes` counts the sites that have moments of every class.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import caster
from caster import state as states
from caster.state.sketch import Sketch, sketch_size
from caster_bench.engine.networks import find
from measure import complete_torchvision, machine

CASES = ("resnet18:10:32", "resnet18:100:32", "vit_base:100:32", "keras_resnet50:1000:64")
EACH, BATCH = 2, 50
GROUPS = {  # columns of the table, and the arrays in them
    "features": ("U", "means", "covariances", "counts"),
    "layers": ("layer_means", "layer_variances"),
    "layer covariances": ("layer_covariances",),
    "layer classes": ("layer_class_means", "layer_class_deviations"),
}


def batches(n_classes: int, side: int) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
    generator = torch.Generator().manual_seed(0)
    labels = np.arange(EACH * n_classes) % n_classes
    for start in range(0, len(labels), BATCH):
        some = labels[start : start + BATCH]
        yield torch.randn(len(some), 3, side, side, generator=generator), some


def sketch_bytes(n_classes: int, k: int) -> int:
    """Of the sketch of a source with more samples than it holds."""
    m = sketch_size(n_classes)
    shapes = ((m, k), "f4"), ((m, n_classes), "f2"), ((m,), "i8"), ((m, 2), "f4"), ((m, 2), "u1")
    arrays = Sketch(*(np.zeros(shape, dtype) for shape, dtype in shapes)).arrays()
    return sum(array.nbytes for array in arrays.values())


def row(case: str) -> str:
    name, n_classes, side = (int(part) if part.isdigit() else part for part in case.split(":"))
    torch.manual_seed(0)
    network = find(str(name)).make(n_classes, side, 0.0).eval()
    labelled = batches(int(n_classes), int(side))
    state = caster.fit(caster.wrap(network), labelled, sketch=False).state
    assert state.layers is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "s.caster")
        states.save(state, path)
        total = path.stat().st_size
    sizes = dict(states.array_sizes(state))
    groups = [sum(sizes.get(array, 0) for array in arrays) for arrays in GROUPS.values()]
    by_class = sum(found.classes is not None for found in state.layers.values())
    cells = [name, n_classes, len(state.layers), by_class]
    whole = sketch_bytes(int(n_classes), state.moments.rank)
    cells += [f"{size / 1e6:.2f}" for size in (*groups, total, whole)]
    return " | ".join(map(str, cells))


def main() -> None:
    print(machine())
    print(
        " | ".join(
            ["network", "classes", "sites", "with classes", *GROUPS, "file, MB", "and a sketch"]
        )
    )
    for case in sys.argv[1:] or CASES:
        print(row(case), flush=True)


if __name__ == "__main__":
    complete_torchvision()
    main()
