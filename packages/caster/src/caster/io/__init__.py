"""Read and write files: images, feature files, prediction tables, the feature cache."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # stage, rows done, rows in total


def silent(stage: str, done: int, total: int) -> None:
    """Report no progress."""
