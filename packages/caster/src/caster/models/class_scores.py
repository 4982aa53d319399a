"""Gaussian class scores on a GPU, computed by custom Triton kernels where they work."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from caster.core import discriminant
from caster.core.types import SourceMoments
from caster.models.protocol import error_line

MIN_CLASSES = 128  # below this, compiling the kernel, which takes seconds, does not pay off
MAX_DIRECTIONS = 128  # beyond that a panel no longer fits the registers of two warps
TOLERANCE = 1e-5  # largest error of the kernel, relative to the largest score

log = logging.getLogger("caster")

_works: dict[Any, bool] = {}  # by device and shapes: whether the kernel can be used


def ridged_scores(
    z: Tensor,  # (B, k)
    moments: SourceMoments,  # restricted to the same k
    ridge: Tensor,  # (k, k)
) -> Tensor:  # (B, C)
    """Compute `caster.core.discriminant.ridged_scores` with custom kernels if they agree.

    The first batch of every shape is scored both ways and compared. It runs before any CUDA graph
    is captured.
    """
    supported = z.dtype == torch.float32 and z.shape[1] <= MAX_DIRECTIONS
    if not supported or moments.n_classes < MIN_CLASSES:
        return _defined(z, moments, ridge)
    key = z.device, z.shape, moments.n_classes
    if key not in _works:
        _works[key] = _agrees(z, moments, ridge)
    return (_by_kernel if _works[key] else _defined)(z, moments, ridge)


def _defined(z: Tensor, moments: SourceMoments, ridge: Tensor) -> Tensor:
    found: Tensor = discriminant.ridged_scores(z, moments, ridge)
    return found


def _by_kernel(z: Tensor, moments: SourceMoments, ridge: Tensor) -> Tensor:
    from caster.models.triton_kernels import gaussian_scores

    ridge = ridge + moments.slack
    return gaussian_scores(z, moments.means, moments.covariances, ridge, moments.priors)


def _agrees(z: Tensor, moments: SourceMoments, ridge: Tensor) -> bool:
    """Whether the kernel compiles and agrees with the definition; synchronises with the GPU."""
    try:
        found = _by_kernel(z, moments, ridge)
    except Exception as error:  # the Triton compiler may raise anything
        level = logging.INFO if isinstance(error, ImportError) else logging.WARNING
        log.log(level, "scoring classes with torch's solvers: %s", error_line(error))
        return False
    expected = _defined(z, moments, ridge)
    finite = expected.isfinite()
    errors = (found - expected)[finite].abs()
    close = not len(errors) or bool(errors.max() <= TOLERANCE * expected[finite].abs().max())
    if not close or not bool((found.isfinite() == finite).all()):
        log.warning("scoring classes with torch's solvers: the kernel's scores differ")
        return False
    return True
