"""Statistics of images corrupted by published packages; run in an environment of their time.

    python benchmarks/parity/reference.py IMAGES.npz OUT.csv --package imagenet_c --seeds 32

docs/corruptions.md says how to set up that environment. `python benchmarks/parity images` writes
IMAGES.npz. Rows of the other package in OUT.csv are kept.

* imagenet_c, by the paper's first author: the published definitions. It is made for 224 pixels; for
  32 its source is run with CIFAR-C's constants and sizes in place of ImageNet-C's, which is how
  the published make_cifar_c.py differs from it. Its frost uses the photographs of imagecorruptions.
* imagecorruptions, a later version without ImageMagick, for 224 pixels.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import imagecorruptions
import imagenet_c.corruptions as published
import numpy as np
from measures import Entry, Key, entry, read, write
from PIL import Image

FROST = Path(imagecorruptions.__file__).with_name("frost")
# Seeds of imagenet_c at 224 pixels, as multiples of --seeds: fewer for a loop over pixels, more for
# what varies most.
TIMES = {"glass_blur": 1 / 8, "motion_blur": 4, "elastic_transform": 8, "fog": 16, "frost": 16}
Maker = Callable[[Any, int], Any]


class Resized(ast.NodeTransformer):
    """Rewrite source for images of 224 pixels to images of 32."""

    def __init__(self, constants: dict[str, Any]) -> None:
        self.constants = constants
        self.name = ""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        """Remember the corruption that the next constants belong to."""
        self.name = node.name
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> Any:
        """Replace 224 pixels, and the 256 of the fog that covers them."""
        side = {224: 32, 256: 32}.get(node.value if isinstance(node.value, int) else 0)
        return node if side is None else ast.copy_location(ast.Constant(side), node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        """Replace `c = [...][severity - 1]`, the constants of a corruption."""
        if getattr(node.targets[0], "id", "") != "c" or self.name not in self.constants:
            return self.generic_visit(node)
        table = ast.parse(f"_table[{self.name!r}][severity - 1]", mode="eval").body
        return ast.copy_location(ast.Assign(node.targets, table), node)


def imagenet_c(side: int, constants: dict[str, Any], frost: Path) -> dict[str, Maker]:
    """Load the corruptions of imagenet_c, with the photographs of frost that it lacks."""
    source = ast.parse(inspect.getsource(published))
    if side == 32:
        source = ast.fix_missing_locations(Resized(constants).visit(source))
        steps = [np.arange(1, end, step) for end, step in constants["zoom_blur"]]
        constants = {**constants, "zoom_blur": steps}
    names: dict[str, Any] = {"__name__": published.__name__, "_table": constants}
    exec(compile(source, published.__name__, "exec"), names)
    names["resource_filename"] = lambda package, file: str(frost / Path(file).name)
    return {name: names[name] for name in constants}


def shrunk(folder: Path) -> Path:
    """Shrink the photographs to a fifth of their size, as make_cifar_c.py does."""
    for path in FROST.iterdir():
        small = cv2.resize(cv2.imread(os.fspath(path)), (0, 0), fx=0.2, fy=0.2)
        (folder / path.name).write_bytes(cv2.imencode(".png", small)[1].tobytes())
    return folder


def made(maker: Maker, images: Any, severity: int, seed: int) -> Any:
    np.random.seed(seed)
    return np.stack([np.uint8(maker(Image.fromarray(image), severity)) for image in images])


def main() -> None:
    parser = argparse.ArgumentParser(description="Statistics of a published package.")
    parser.add_argument("images", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--package", choices=("imagenet_c", "imagecorruptions"), required=True)
    parser.add_argument("--seeds", type=int, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # both use deprecated functions
    with np.load(options.images) as file:
        images, constants = file["images"], json.loads(str(file["constants"]))
    side = images.shape[1]
    if options.package == "imagecorruptions" and side == 32:
        parser.error("imagecorruptions has no constants for 32 pixels: give images of 224")
    with tempfile.TemporaryDirectory() as folder:
        if options.package == "imagecorruptions":
            makers = {name: imagecorruptions.corruption_dict[name] for name in constants}
            times: dict[str, float] = {}
        else:
            times = {} if side == 32 else TIMES
            frost = shrunk(Path(folder)) if side == 32 else FROST
            makers = imagenet_c(side, constants, frost)
        found: dict[Key, Entry] = read(options.out) if options.out.exists() else {}
        for name, maker in makers.items():
            seeds = range(max(2, int(options.seeds * times.get(name, 1))))
            for severity in range(1, 6):
                versions = map(partial(made, maker, images, severity), seeds)
                found[options.package, name, severity] = entry(images, versions)
            print(options.package, name, file=sys.stderr, flush=True)
    write(options.out, found)


if __name__ == "__main__":
    main()
