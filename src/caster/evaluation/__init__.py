"""Labelled batches in, a score out: whether adapting would have paid, and for whom."""

from __future__ import annotations

import os

from caster.evaluation.results import Evaluation, Score
from caster.evaluation.run import evaluate
from caster.report import check_can_draw

__all__ = ["Evaluation", "Score", "check_can_draw", "evaluate", "write_page"]


def write_page(evaluation: Evaluation, path: str | os.PathLike[str]) -> None:
    """Write one self-contained HTML page: scores, figures, verdicts, and how to read them."""
    check_can_draw()
    from caster.evaluation.page import write  # only now: `evaluate` works without matplotlib

    write(evaluation, path)
