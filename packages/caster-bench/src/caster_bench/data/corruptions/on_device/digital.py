"""Changes of colour in torch, and pixels as large as bricks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caster_bench.data.corruptions.digital import pillow
from caster_bench.data.corruptions.on_device.draws import Draws
from caster_bench.data.corruptions.on_device.steps import shares

ONE = 2**22  # Pillow multiplies bytes with whole numbers that add up to this


def brightness(
    images: Tensor,  # (n, H, W, 3) float32
    constants: float,  # what is added to the value of HSV
    draws: Draws,
) -> Tensor:
    """Every pixel brighter, of the hue and saturation it had."""
    value = images.amax(dim=3, keepdim=True)
    brighter = (value + constants).clamp(max=1)
    return brighter - (value - images) * torch.where(value > 0, brighter / value, 0)


def saturate(
    images: Tensor,  # (n, H, W, 3) float32
    constants: tuple[float, float],  # factor and offset of HSV's saturation
    draws: Draws,
) -> Tensor:
    """Colours paler or stronger, of the hue and value they had; grey has the hue of red."""
    factor, offset = constants
    value = images.amax(dim=3, keepdim=True)
    below = value - images
    depth = below.amax(dim=3, keepdim=True)  # the saturation is depth / value
    saturation = torch.where(value > 0, depth / value, 0)
    deeper = value * (saturation * factor + offset).clamp(0, 1)
    red = torch.tensor([0.0, 1.0, 1.0], device=images.device)
    return value - torch.where(depth > 0, below * (deeper / depth), deeper * red)


def contrast(
    images: Tensor,  # (n, H, W, 3) float32
    constants: float,  # the factor
    draws: Draws,
) -> Tensor:
    """Every channel nearer to its mean over the image."""
    # Whole numbers add up to the same sum in any order, so that the batch has no say in it.
    sums = (images * 255).round().double().sum(dim=(1, 2), keepdim=True)
    mean = (sums / (255 * images.shape[1] * images.shape[2])).float()
    return (images - mean) * constants + mean


def pixelate(
    images: Tensor,  # (n, H, W, 3) float32
    constants: float,  # the factor of the side
    draws: Draws,
) -> Tensor:
    """Smaller and back to its size, by the mean over boxes, byte for byte as Pillow does it.

    But for tall images: some versions of Pillow take their columns first, and a byte that is
    rounded twice may then be another by one.
    """
    _, height, width, _ = images.shape
    low, narrow = max(int(height * constants), 1), max(int(width * constants), 1)
    levels = (images * 255).round().double().permute(0, 3, 1, 2)
    small = _resized(levels, boxes(height, low), boxes(width, narrow))
    large = _resized(small, boxes(low, height), boxes(narrow, width))
    return shares(large.permute(0, 2, 3, 1))


def boxes(side: int, wanted: int) -> NDArray[np.float64]:  # (wanted, side)
    """Pillow's resize of an axis by the mean over boxes, as a matrix of whole numbers.

    >>> boxes(4, 2) / ONE
    array([[0.5, 0.5, 0. , 0. ],
           [0. , 0. , 0.5, 0.5]])
    """
    image: Any = pillow()
    unit = image.fromarray(np.eye(side, dtype=np.float32))
    weights = np.asarray(unit.resize((wanted, side), image.Resampling.BOX), dtype=np.float64)
    matrix: NDArray[np.float64] = np.rint(weights * ONE).T
    return matrix


def _resized(levels: Tensor, rows: NDArray[np.float64], columns: NDArray[np.float64]) -> Tensor:
    """First along the rows, then along the columns, whole bytes after each."""
    down, across = (torch.tensor(matrix, device=levels.device) for matrix in (rows, columns))
    levels = ((levels @ across.T) / ONE + 0.5).floor()
    return ((down @ levels) / ONE + 0.5).floor()
