"""The folder that a corrupted set is written to: nobody else's, and not among the images."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from caster.errors import CasterError
from caster.io.image_folder import FileImages
from caster.io.images import Images
from caster.io.lock import locked
from caster_bench.data.corrupted.manifest import NAME as MANIFEST
from caster_bench.data.corrupted.source import SCRATCH

LOCK = ".lock"


@contextmanager
def claimed(out: Path, images: Images) -> Iterator[None]:
    """A folder that nobody else writes to: new, empty, or one with a manifest.

    Where nothing comes of it, a folder that was not there before is not there afterwards.
    """
    home = _home(images)
    if home is not None and out.resolve().is_relative_to(home.resolve()):
        raise CasterError(f"{out} lies in {home}, among the images: write to another folder")
    if out.exists() and not out.is_dir():
        raise CasterError(f"cannot write to {out}: it is no folder")
    if not out.absolute().parent.is_dir():
        raise CasterError(f"cannot write to {out}: there is no folder {out.absolute().parent}")
    try:
        new = not out.exists()
        out.mkdir(exist_ok=True)
        try:
            with locked(out / LOCK, f"another caster is writing to {out}: wait until it is done"):
                foreign = sorted(set(os.listdir(out)) - {LOCK, SCRATCH})
                if foreign and MANIFEST not in foreign:
                    raise CasterError(
                        f"{out} holds {foreign[0]} and no {MANIFEST}: name a new or an empty "
                        "folder, or one that an interrupted run began"
                    )
                yield
        finally:
            if new:
                with suppress(OSError):  # there is something in it
                    out.rmdir()
    except OSError as error:
        path = Path(str(error.filename or out))
        verb = "write to" if path.absolute().is_relative_to(out.absolute()) else "read"
        raise CasterError(f"cannot {verb} {path}: {error.strerror or error}") from None


def _home(images: Images) -> Path | None:
    """The folder that holds all images, where they are files.

    A set may begin at the data root, where other sets lie too: what counts is where its files are.
    """
    if not isinstance(images, FileImages):
        return None
    if Path(images.name).is_dir():
        return images.root
    return images.root / os.path.commonpath({os.path.dirname(name) for name in images.names})
