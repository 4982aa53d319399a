"""Checks that an error message is a single line."""

from __future__ import annotations

import numpy as np
import pytest

from caster import CasterError


def error_line(use, *arguments, kind=CasterError, **options) -> str:
    """The message with which a call fails, which must be one line."""
    with pytest.raises(kind) as caught:
        use(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def flipped_bits(path, use, n=150, kind=CasterError) -> list[str]:
    """The lines with which `use` rejects a file after a bit of it has flipped, where it does."""
    original, lines = path.read_bytes(), []
    rng = np.random.default_rng(0)
    for at in rng.choice(len(original), min(n, len(original)), replace=False):
        damaged = bytearray(original)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            use(path)
        except kind as error:
            lines.append(str(error))
    assert not any("\n" in line for line in lines)
    return lines
