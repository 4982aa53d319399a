"""Scores of many classes on a GPU, by a kernel of our own where it works."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from caster.core import discriminant
from caster.core.types import SourceMoments
from caster.models.protocol import error_line

FEWEST = 128  # classes: compiling the kernel takes seconds
ERROR = 1e-5  # of the largest score, between the kernel and the definition

log = logging.getLogger("caster")

_works: dict[Any, bool] = {}  # by device and shapes


def ridged_scores(
    z: Tensor,  # (B, k)
    moments: SourceMoments,  # restricted to the same k
    ridge: Tensor,  # (k, k)
) -> Tensor:  # (B, C)
    """`caster.core.discriminant.ridged_scores`, by one kernel if that gives the same.

    The first batch of a shape shows that; it runs before anything is recorded.
    """
    if moments.n_classes < FEWEST or z.element_size() != 4:
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
    """Whether the kernel can be compiled and gives what it should; waits for the GPU."""
    try:
        found = _by_kernel(z, moments, ridge)
    except ImportError as error:  # Triton is optional
        log.info("classes are scored by torch's solvers: %s", error_line(error))
        return False
    except Exception as error:  # the compiler's, of any kind: the solvers give the same
        log.warning("classes are scored by torch's solvers: %s", error_line(error))
        return False
    expected = _defined(z, moments, ridge)
    sound = expected.isfinite()
    distance = (found - expected)[sound].abs()
    close = not len(distance) or bool(distance.max() <= ERROR * expected[sound].abs().max())
    if not close or not bool((found.isfinite() == sound).all()):
        log.warning("classes are scored by torch's solvers: the kernel's scores differ")
        return False
    return True
