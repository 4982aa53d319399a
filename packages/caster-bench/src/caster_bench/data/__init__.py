"""Published image sets, corruptions of images, and streams of both."""

from __future__ import annotations

from pathlib import Path

from caster.io.images import Images
from caster_bench.data.corrupted_reader import is_corrupted_set, open_corrupted_set
from caster_bench.data.sets import SETS, open_set


def open_named(source: str, root: Path | None) -> Images | None:
    """Open a split of a published set or a folder from `caster corrupt`; else return None."""
    if is_corrupted_set(Path(source)):
        return open_corrupted_set(Path(source))
    folder, _, split = source.rpartition(":")
    if folder and is_corrupted_set(Path(folder)):
        return open_corrupted_set(Path(folder), split)
    named = source.partition(":")[0] in SETS and not Path(source).exists()
    return open_set(source, root) if named else None
