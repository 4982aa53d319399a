"""Synthetic images with shapes, edges and grain."""

from __future__ import annotations

import numpy as np
from scipy.ndimage import gaussian_filter


def scenes(count: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    """Draw smooth shapes with edges and fine grain."""
    rng = np.random.default_rng(seed)
    shapes = gaussian_filter(rng.normal(size=(count, height, width, 3)), (0, 4, 4, 0), mode="wrap")
    shapes = shapes / shapes.std() * 0.15 + 0.45
    for image in shapes:
        for _ in range(4):
            top, left = rng.integers(height), rng.integers(width)
            image[top : top + height // 2, left : left + width // 2] *= rng.uniform(0.5, 1.2)
    grain = rng.normal(size=shapes.shape) * 0.02
    return (np.clip(shapes + grain, 0, 1) * 255).astype(np.uint8)
