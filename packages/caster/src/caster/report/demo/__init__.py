"""The demo: a small frozen network meets shifted digits, in a few seconds and without a GPU."""

from __future__ import annotations

import os

from caster.report import check_can_draw
from caster.report.demo.results import Batch, Results, Story, Stream
from caster.report.demo.streams import run

__all__ = ["Batch", "Results", "Story", "Stream", "check_can_draw", "run", "write_page"]


def write_page(results: Results, path: str | os.PathLike[str]) -> None:
    """Write one self-contained HTML page: stories, figures, and a table of every stream."""
    check_can_draw()
    from caster.report.demo.page import write  # only now: `run` works without matplotlib

    write(results, path)
