"""Published image sets, corruptions of images, and streams of both."""

from __future__ import annotations

from pathlib import Path

from caster.io.images import Images
from caster_bench.data.corrupted_folder import is_corrupted, open_corrupted_folder
from caster_bench.data.sets import known, open_set


def open_named(source: str, root: Path | None) -> Images | None:
    """Open a split of a published set, or a folder that `caster corrupt` wrote; None for others."""
    path = Path(source)
    if is_corrupted(path):
        return open_corrupted_folder(path)
    folder, _, split = source.rpartition(":")
    if folder and is_corrupted(Path(folder)):
        return open_corrupted_folder(Path(folder), split)
    return open_set(source, root) if source.partition(":")[0] in known() else None
