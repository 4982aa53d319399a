"""How a long job says where it stands."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # stage, rows done, rows in all


def silent(stage: str, done: int, total: int) -> None:
    """Say nothing."""
