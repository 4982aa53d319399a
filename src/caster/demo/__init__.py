"""The demo: a small frozen network meets shifted digits, in a few seconds and without a GPU."""

from __future__ import annotations

import os
from importlib.util import find_spec

from caster.demo.results import Batch, Results, Story, Stream
from caster.demo.streams import run
from caster.errors import CasterError

__all__ = ["Batch", "Results", "Story", "Stream", "check_can_draw", "run", "write_page"]


def check_can_draw() -> None:
    """Refuse where matplotlib is missing, before the work that would be lost on it."""
    if find_spec("matplotlib") is None:
        raise CasterError("the page needs matplotlib: pip install 'caster-tta[report]'")


def write_page(results: Results, path: str | os.PathLike[str]) -> None:
    """Write one self-contained HTML page: stories, figures, and a table of every stream."""
    check_can_draw()
    from caster.demo.page import write  # only now: `run` works without matplotlib

    write(results, path)
