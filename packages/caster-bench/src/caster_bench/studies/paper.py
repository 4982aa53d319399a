"""What the paper reports, to stand beside what we measure."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def _paper() -> dict[str, Any]:
    return tomllib.loads(files("caster_bench.studies").joinpath("paper.toml").read_text("utf-8"))


def printed(*keys: str) -> Any:
    """A figure of the paper by study and place in it; None where the paper has none.

    >>> printed("estimators", "wins"), printed("gate", "over_always", "digits")
    (27, None)
    """
    found: Any = _paper()
    for key in keys:
        if not isinstance(found, dict) or key not in found:
            return None
        found = found[key]
    return found


def number(*keys: str) -> float | None:
    """The same, where it is a number.

    >>> number("coverage", "ImageNet-C", "t3a")
    -33.5
    """
    found = printed(*keys)
    return None if found is None else float(found)
