"""Sets that anyone may download, laid out as the loaders read them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from caster.errors import CasterError
from caster.io.files import move_into_place
from caster_bench.data.download import Report, download
from caster_bench.data.sets import find, root_folder
from caster_bench.data.sets.layout import Archive
from caster_bench.data.unpack import unpack

PACKED = (".tar", ".tar.gz", ".tgz", ".zip")


def get(name: str, root: Path | None = None, report: Report = lambda *_: None) -> list[Archive]:
    """Download what a set, or a split of it, lacks below a root; the archives that it took.

    An archive is kept until it is unpacked, and unpacked under another name: a folder of the set
    is there when all of it is.
    """
    title, data, splits = find(name)
    below = root_folder(name, root)
    wanted = [
        archive
        for archive in data.archives
        if not archive.splits or set(archive.splits) & set(splits)
    ]
    if not wanted:
        places = " or ".join(dict.fromkeys(str(below / x.folder) for x in data.layouts))
        raise CasterError(
            f"{title} has no public download that caster could verify: get it from {data.source} "
            f"and lay it out in {places}"
        )
    try:
        below.mkdir(parents=True, exist_ok=True)
        return [archive for archive in wanted if obtain(archive, below, report)]
    except OSError as error:
        raise CasterError(f"cannot write to {below}: {error.strerror or error}") from None


def obtain(archive: Archive, root: Path, report: Report) -> bool:
    """Download and unpack one archive, unless what it gives is there."""
    lacking = [piece for piece in archive.gives if not os.path.exists(root / piece)]
    if not lacking:
        return False
    packed, staged = root / archive.file, root / f".{archive.file}.unpacking"
    loaded = download(archive.url, packed, archive.digest, archive.size, report)
    shutil.rmtree(staged, ignore_errors=True)  # of a run that was stopped
    staged.mkdir()
    try:
        if archive.file.endswith(PACKED):
            unpack(packed, staged, report)
        else:
            shutil.copyfile(packed, staged / packed.name)
        found = {piece: _inside(staged, Path(piece).name) for piece in lacking}
        for piece, path in found.items():
            (root / piece).parent.mkdir(parents=True, exist_ok=True)
            move_into_place(path, root / piece)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    if loaded:  # and not put there by hand
        packed.unlink()
    return True


def _inside(staged: Path, name: str) -> Path:
    """A piece at the top of what was unpacked, or in the only folder there."""
    tops = [staged, *(staged / top for top in os.listdir(staged) if not top.startswith("."))]
    for top in tops if len(tops) == 2 else tops[:1]:
        if os.path.exists(top / name):
            return top / name
    raise CasterError(f"{staged.name[1:].removesuffix('.unpacking')} does not hold {name}")
