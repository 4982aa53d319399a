"""Small files for the tests of pictures."""

from __future__ import annotations

import numpy as np
import pytest

from caster import CasterError
from caster.data import open_pictures

RNG = np.random.default_rng(0)


def noise(*shape) -> np.ndarray:
    return RNG.integers(256, size=shape, dtype=np.uint8)


def refusal(*arguments, **options) -> str:
    """The one line with which a source of pictures is refused."""
    with pytest.raises(CasterError) as caught:
        open_pictures(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
