"""What a caller is told: the one line of an error."""

from __future__ import annotations

import pytest

from caster import CasterError


def error_line(use, *arguments, kind=CasterError, **options) -> str:
    """The message with which a call fails, which must be one line."""
    with pytest.raises(kind) as caught:
        use(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
