"""Random pixels, and the message with which a source of images is rejected."""

from __future__ import annotations

from functools import partial

import numpy as np

from caster.io.images import open_images
from tests.support.messages import error_line

RNG = np.random.default_rng(0)


def noise(*shape) -> np.ndarray:
    return RNG.integers(256, size=shape, dtype=np.uint8)


rejection = partial(error_line, open_images)
