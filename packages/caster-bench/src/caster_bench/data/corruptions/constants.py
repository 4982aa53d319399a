"""Published constants of the nineteen corruptions, severities 1 to 5.

The constants are those of the reference generators of Hendrycks and Dietterich, "Benchmarking
Neural Network Robustness to Common Corruptions and Perturbations" (ICLR 2019):
https://github.com/hendrycks/robustness, in `ImageNet-C/create_c`: `make_cifar_c.py` for images of
32 pixels, `make_tinyimagenet_c.py` (commit 7a64e6a) for 64, and `make_imagenet_c.py` (commit
e0377d4) for 224. They are in pixels, or fractions of the range from 0 to 1, and are not scaled to
other image sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError
from caster_bench.sweeps.spec import GROUPS, SEVERITIES, known

Values = NDArray[np.float32]  # (n, H, W, 3), from 0 to 1
Rngs = Sequence[np.random.Generator]  # one per image
Table = dict[str, tuple[Any, Any, Any, Any, Any]]

CORRUPTIONS = GROUPS["all"]
CIFAR_SIDE, TINY_SIDE = 32, 64  # largest sides that CIFAR-C's and Tiny-ImageNet-C's constants serve


def check_corruption(name: str) -> str:
    """Return the name of a corruption, or suggest a similar one."""
    return known(name, CORRUPTIONS, "corruption")


def constants_for(corruption: str, severity: int, height: int, width: int) -> Any:
    """Return the published constants of a corruption for an image size.

    >>> constants_for("shot_noise", 5, 32, 32), constants_for("shot_noise", 5, 224, 224)
    (50, 3)
    """
    if as_integer("severity", severity) not in SEVERITIES:
        raise CasterError(f"there is no severity {severity}: choose 1, 2, 3, 4 or 5")
    side = max(height, width)
    table = CIFAR if side <= CIFAR_SIDE else TINY if side <= TINY_SIDE else IMAGENET
    return table[check_corruption(corruption)][severity - 1]


def as_integer(name: str, value: Any) -> int:
    """Return an integer, or reject a value that is not one; a bool is not.

    >>> as_integer("seed", 1.7)
    Traceback (most recent call last):
    caster.errors.CasterError: seed is 1.7: it must be an integer
    """
    try:
        if isinstance(value, bool | np.bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise CasterError(f"{name} is {value!r}: it must be an integer") from None


def _elastic(side: int, *shares: tuple[float, float, float]) -> tuple[Any, Any, Any, Any, Any]:
    """Scale fractions of a side to pixels."""
    one, two, three, four, five = (tuple(side * share for share in row) for row in shares)
    return one, two, three, four, five


# Entries of more than one number:
#   defocus_blur       disk radius, sigma of the blur that softens its edge
#   glass_blur         sigma, longest shift, rounds of shifting
#   motion_blur        radius, sigma
#   zoom_blur          end and step of the factors, from 1 on, as `numpy.arange` counts them
#   snow               mean, sigma, zoom, threshold, blur radius, blur sigma, weight of the image
#   frost              weight of the image, weight of the texture
#   fog                weight, roughness decay
#   spatter            mean, sigma, blur sigma, threshold, intensity, 0 for water or 1 for mud
#   saturate           factor, offset
#   elastic_transform  length and sigma of the displacement, shift of the three corners
CIFAR: Table = {
    "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "shot_noise": (500, 250, 100, 75, 50),
    "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),
    "speckle_noise": (0.06, 0.1, 0.12, 0.16, 0.2),
    "gaussian_blur": (0.4, 0.6, 0.7, 0.8, 1),
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "frost": ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
    "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    "spatter": (
        (0.62, 0.1, 0.7, 0.7, 0.5, 0),
        (0.65, 0.1, 0.8, 0.7, 0.5, 0),
        (0.65, 0.3, 1, 0.69, 0.5, 0),
        (0.65, 0.1, 0.7, 0.69, 0.6, 1),
        (0.65, 0.1, 0.5, 0.68, 0.6, 1),
    ),
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
    "saturate": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
    "elastic_transform": _elastic(
        32,
        (0, 0, 0.08),
        (0.05, 0.2, 0.07),
        (0.08, 0.06, 0.06),
        (0.1, 0.04, 0.05),
        (0.1, 0.03, 0.03),
    ),
    "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),
    "jpeg_compression": (80, 65, 58, 50, 40),
}
TINY: Table = {
    "gaussian_noise": (0.04, 0.08, 0.12, 0.15, 0.18),
    "shot_noise": (250, 100, 50, 30, 15),
    "impulse_noise": (0.01, 0.02, 0.05, 0.08, 0.14),
    "speckle_noise": (0.15, 0.2, 0.25, 0.3, 0.35),
    "gaussian_blur": (0.5, 0.75, 1, 1.25, 1.5),
    "defocus_blur": ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
    "glass_blur": ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
    "motion_blur": ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
    "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.8),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
    ),
    "frost": ((1, 0.3), (0.9, 0.4), (0.8, 0.45), (0.75, 0.5), (0.7, 0.55)),
    "fog": ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)),
    "spatter": (
        (0.62, 0.1, 0.7, 0.7, 0.6, 0),
        (0.65, 0.1, 0.8, 0.7, 0.6, 0),
        (0.65, 0.3, 1, 0.69, 0.6, 0),
        (0.65, 0.1, 0.7, 0.68, 0.6, 1),
        (0.65, 0.1, 0.5, 0.67, 0.6, 1),
    ),
    "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),
    "saturate": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (30, 0.2)),
    "elastic_transform": _elastic(
        64,
        (0, 0, 0.08),
        (0.05, 0.3, 0.06),
        (0.1, 0.08, 0.06),
        (0.1, 0.03, 0.03),
        (0.16, 0.03, 0.02),
    ),
    "pixelate": (0.9, 0.8, 0.7, 0.6, 0.5),
    "jpeg_compression": (65, 58, 50, 40, 25),
}
IMAGENET: Table = {
    "gaussian_noise": (0.08, 0.12, 0.18, 0.26, 0.38),
    "shot_noise": (60, 25, 12, 5, 3),
    "impulse_noise": (0.03, 0.06, 0.09, 0.17, 0.27),
    "speckle_noise": (0.15, 0.2, 0.35, 0.45, 0.6),
    "gaussian_blur": (1, 2, 3, 4, 6),
    "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    "zoom_blur": ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
    "snow": (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
    "frost": ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
    "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    "spatter": (
        (0.65, 0.3, 4, 0.69, 0.6, 0),
        (0.65, 0.3, 3, 0.68, 0.6, 0),
        (0.65, 0.3, 2, 0.68, 0.5, 0),
        (0.65, 0.3, 1, 0.65, 1.5, 1),
        (0.67, 0.4, 1, 0.65, 1.5, 1),
    ),
    "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),
    "saturate": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
    "elastic_transform": _elastic(  # 244, not 224: a slip of the reference that its images have
        244,
        (2, 0.7, 0.1),
        (2, 0.08, 0.2),
        (0.05, 0.01, 0.02),
        (0.07, 0.01, 0.02),
        (0.12, 0.01, 0.02),
    ),
    "pixelate": (0.6, 0.5, 0.4, 0.3, 0.25),
    "jpeg_compression": (25, 18, 15, 10, 7),
}
