"""Patches of eight colours, an ONNX classifier of colours, and a cast that leads it astray."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser
from PIL import Image

NAMES = ["azure", "brown", "coral", "denim", "ebony", "fawn", "green", "honey"]
CORNERS = np.array([[r, g, b] for r in (-1, 1) for g in (-1, 1) for b in (-1, 1)], dtype=np.float64)
CAST = np.array([70.0, -50.0, 40.0])  # added to every pixel
SIZE = 6
TOML = 'range = 1\nmean = 0.5\nstd = 0.5\nlayout = "NCHW"\n'


def patches(n_per_class, seed=0, cast=0.0):
    """Pixels (8 n, 6, 6, 3), class by class, and class numbers."""
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(8), n_per_class)
    colours = 128 + 45 * CORNERS[y] + 14 * rng.standard_normal((len(y), 3))
    noise = 6 * rng.standard_normal((len(y), SIZE, SIZE, 3))
    pixels = np.clip(colours[:, None, None] + noise + cast, 0, 255)
    return np.rint(pixels).astype(np.uint8), y


def write_folder(folder: Path, pixels, y, names=NAMES) -> Path:
    """One folder a class; file names tell nothing of it."""
    for i, (image, c) in enumerate(zip(pixels, y, strict=True)):
        path = folder / names[c] / f"{i:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return folder


def head(order=range(8), bias=0.0):
    """Weights that tell the colours, for outputs in that order; a grey gives no ties."""
    order = np.array(order)
    return 3 * CORNERS[order].T.astype(np.float32), (bias + 0.013 * order).astype(np.float32)


def write_model(path: Path, order=range(8), bias=0.0, size=SIZE) -> Path:
    """Mean colour, then a linear layer."""
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[N, 3, {size}, {size}] x) => '
        "(float[N, 8] y) { p = GlobalAveragePool(x) h = Flatten(p) y = Gemm(h, W, b) }"
    )
    for name, value in zip("Wb", head(order, bias), strict=True):
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    onnx.save(model, path)
    return path


def by_hand(pixels, order=range(8), bias=0.0):
    """Features and logits of pixels, without ONNX."""
    features = ((pixels / 255 - 0.5) / 0.5).mean(axis=(1, 2))
    W, b = head(order, bias)
    return features, features @ W + b
