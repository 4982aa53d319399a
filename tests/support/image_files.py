"""Random pixels, and the message with which a source of images is rejected."""

from __future__ import annotations

import numpy as np
import pytest

from caster import CasterError
from caster.io.images import open_images

RNG = np.random.default_rng(0)


def noise(*shape) -> np.ndarray:
    return RNG.integers(256, size=shape, dtype=np.uint8)


def rejection(*arguments, **options) -> str:
    """The one-line message with which `open_images` rejects its input."""
    with pytest.raises(CasterError) as caught:
        open_images(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
