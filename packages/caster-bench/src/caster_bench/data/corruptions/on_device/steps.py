"""Steps that several corruptions share."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def shares(levels: Tensor) -> Tensor:  # float32
    """Levels from 0 to 255 as shares from 0 to 1, rounded as NumPy does.

    The divisor is a tensor beside them: by a plain number CUDA would multiply with the reciprocal,
    and some shares would no longer give back their level when they are truncated.

    >>> shares(torch.tensor([0, 51, 255], dtype=torch.uint8))
    tensor([0.0000, 0.2000, 1.0000])
    """
    return levels.float() / torch.tensor(255.0, device=levels.device)


def along_axes(
    layers: Tensor,  # (..., H, W) float64
    rows: NDArray[Any],  # (h, H)
    columns: NDArray[Any],  # (w, W)
) -> Tensor:  # (..., h, w) float64
    """A matrix on either axis.

    In double precision, here as in NumPy: what is flat keeps its very byte when it is truncated
    later, and the order of a sum, which a batch may change, decides nothing.
    """
    down, across = (torch.tensor(matrix, device=layers.device) for matrix in (rows, columns))
    return down @ layers @ across.T
