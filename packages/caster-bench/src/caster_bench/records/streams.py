"""The streams of a pack, a file a data set: which images came in which batch.

All methods meet the same stream, and all backbones: it is kept once for all of them, and cells say
its key. Nothing else of a record of many images takes as much room, since nothing tells a shuffle
in fewer bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from caster.errors import CasterError
from caster_bench.records.digest import KEY_LENGTH, bytes_of
from caster_bench.records.lists import HELD, Column, ListFile, Lists, stamp, write_lists
from caster_bench.records.schema import Samples, samples_schema

if TYPE_CHECKING:
    import pyarrow as pa

KEY = "stream"
SHARED = ("index", "label", "batch")  # columns of samples that are of the stream
Stream = dict[str, Column]  # these, all (N,)


def stream_of(samples: Samples) -> Stream:
    """What of samples all cells of a stream have in common."""
    return {name: getattr(samples, name) for name in SHARED}


def key_of_stream(stream: Stream) -> str:
    """Digest of a stream."""
    total = hashlib.sha256()
    for name in SHARED:
        total.update(f"\n{name}\n".encode() + bytes_of(stream[name]))
    return total.hexdigest()[:KEY_LENGTH]


class Streams:
    """A file of streams."""

    def __init__(self, path: Path) -> None:
        self._file = ListFile(path, (KEY,), _fields())
        self.path = path

    @cached_property
    def places(self) -> dict[str, int]:
        """The row of every stream, by key."""
        return {key: row for row, key in enumerate(self._file.texts(KEY))}

    @cached_property
    def _lists(self) -> dict[str, Lists]:
        return self._file.lists()

    def at(self, key: str) -> Stream:
        """A stream, by its key."""
        row = self.places.get(key)
        if row is None:
            raise CasterError(f"its stream is not in {self.path}")
        return {name: self._lists[name].at(row) for name in SHARED}


def open_streams(path: Path) -> Streams:
    """A file of streams, kept in memory with the last few others."""
    return _streams(path, *stamp(path))


@lru_cache(maxsize=HELD)
def _streams(path: Path, *_: int) -> Streams:
    return Streams(path)


def write_streams(path: Path, streams: Mapping[str, Stream]) -> None:
    """A file of streams, by key; those of the same images stand together."""
    keys = sorted(streams, key=lambda key: (_images(streams[key]), key))
    lists = {name: [streams[key][name] for key in keys] for name in SHARED}
    write_lists(path, {KEY: keys}, lists, _fields(), (), {})


def _images(stream: Stream) -> str:
    return hashlib.sha256(bytes_of(stream["index"]) + bytes_of(stream["label"])).hexdigest()


@cache
def _fields() -> dict[str, pa.Field]:
    return {name: samples_schema().field(name) for name in SHARED}
