"""What a folder of kept features says of itself, and whether that is true."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.core.arrays import to_numpy
from caster.core.channels import MEASURED, ChannelMoments, Site
from caster.io.files import replacing
from caster.io.growing import Damaged, read_grown
from caster.io.layer_arrays import Layers
from caster.io.triangles import packed, unpacked

ALWAYS = {"rows", "features"}  # the arrays that any row has


@dataclass(frozen=True)
class Note:
    """How far a folder is complete.

    >>> Note(seen=3, kept=2, unreadable={"1": "cannot read cat.jpg: it is empty"}).kept
    2
    """

    seen: int = 0  # images read or found unreadable, from the first on
    kept: int = 0  # rows of every array
    unreadable: Mapping[str, str] = field(default_factory=dict)  # row to what is wrong with it
    checksums: Mapping[str, int] = field(default_factory=dict)  # of the kept rows, by array
    layers: Layers | None = None  # sums over the kept rows; None: not measured on all of them
    passing: bool = False  # there for one job only, which removes them at its end
    of: str = ""  # model and images, for whoever lists the store


def write_note(note: Note, folder: Path) -> None:
    """Put a note in the place of the folder's last one."""
    plain = asdict(replace(note, layers=None))
    if note.layers is not None:
        sites = [
            [astuple(site), found.count, *_plain(found)] for site, found in note.layers.items()
        ]
        plain["layers"] = {"of": MEASURED, "sites": sites, "checksum": _checksum(sites)}
    with replacing(folder / "note.json") as temporary:
        temporary.write_text(json.dumps(plain), encoding="utf-8")


def read_folder(folder: Path) -> tuple[Note, dict[str, NDArray[Any]]]:
    """A folder's note and the arrays it speaks of, if they are what was written."""
    note = read_note(folder)
    sums = note.checksums.items()
    return note, {name: read_grown(array_file(folder, name), note.kept, crc) for name, crc in sums}


def read_note(folder: Path) -> Note:
    """A folder's note, if it is one that was written."""
    try:
        plain = json.loads((folder / "note.json").read_text(encoding="utf-8"))
        note = Note(**{**plain, "layers": _layers(plain.get("layers"))})
        rows = {int(row) for row in note.unreadable}
        named = note.checksums.keys() >= ALWAYS if note.kept else not note.checksums
        whole = named and note.kept >= 0 and note.seen == note.kept + len(rows)
        whole = whole and isinstance(note.passing, bool) and isinstance(note.of, str)
    except FileNotFoundError:
        raise Damaged(folder) from None
    except (AttributeError, KeyError, TypeError, ValueError):  # no note that this caster wrote
        raise Damaged(folder) from None
    if not whole:
        raise Damaged(folder)
    return note


def _layers(kept: dict[str, Any] | None) -> Layers | None:
    """The sums over layers, if they are what was written; none if other sites were measured."""
    if kept is None or kept.get("of") != MEASURED:
        return None
    sites: list[list[Any]] = kept["sites"]
    if _checksum(sites) != kept["checksum"]:
        raise ValueError("layers")
    return {Site(*site): _moments(*found) for site, *found in sites}


def _moments(
    count: float, mean: list[float], variance: list[float], triangle: list[float] | None = None
) -> ChannelMoments:
    covariance = None if triangle is None else unpacked(np.array(triangle), len(mean))
    return ChannelMoments(count, np.array(mean), np.array(variance), covariance)


def _plain(found: ChannelMoments) -> list[list[float]]:
    """Mean, variance and, where there is a covariance, its upper triangle."""
    parts = [to_numpy(part) for part in (found.mean, found.variance)]
    if found.covariance is not None:
        parts.append(packed(to_numpy(found.covariance)))
    return [part.tolist() for part in parts]


def _checksum(sites: list[list[Any]]) -> int:
    """Numbers come back from JSON as they went, so the same text is the same sums."""
    return zlib.crc32(json.dumps(sites).encode())


def array_file(folder: Path, name: str) -> Path:
    """Where an array lies."""
    return folder / f"{name}.npy"
