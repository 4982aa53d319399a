"""What a folder of kept features says of itself, and whether that is true."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from caster.files import replacing
from caster.jobs.growing import Damaged, read_grown

ALWAYS = {"rows", "features"}  # the arrays that any row has


@dataclass(frozen=True)
class Note:
    """How far a folder is complete.

    >>> Note(seen=3, kept=2, unreadable={"1": "cannot read cat.jpg: it is empty"}).kept
    2
    """

    seen: int = 0  # pictures read or found unreadable, from the first on
    kept: int = 0  # rows of every array
    unreadable: Mapping[str, str] = field(default_factory=dict)  # row to what is wrong with it
    checksums: Mapping[str, int] = field(default_factory=dict)  # of the kept rows, by array


def write_note(note: Note, folder: Path) -> None:
    """Put a note in the place of the folder's last one."""
    with replacing(folder / "note.json") as temporary:
        temporary.write_text(json.dumps(asdict(note)), encoding="utf-8")


def read_folder(folder: Path) -> tuple[Note, dict[str, NDArray[Any]]]:
    """A folder's note and the arrays it speaks of, if they are what was written."""
    try:
        note = Note(**json.loads((folder / "note.json").read_text(encoding="utf-8")))
        rows = {int(row) for row in note.unreadable}
        named = note.checksums.keys() >= ALWAYS if note.kept else not note.checksums
        whole = named and note.kept >= 0 and note.seen == note.kept + len(rows)
    except FileNotFoundError:
        raise Damaged(folder) from None
    except (AttributeError, TypeError, ValueError):  # no note that this caster wrote
        raise Damaged(folder) from None
    if not whole:
        raise Damaged(folder)
    sums = note.checksums.items()
    return note, {name: read_grown(array_file(folder, name), note.kept, crc) for name, crc in sums}


def array_file(folder: Path, name: str) -> Path:
    """Where an array lies."""
    return folder / f"{name}.npy"
