"""Streams of a server: recent ones in memory, all of them in files that survive a crash.

A stream has two files. `NAME.stream` is a snapshot, replaced atomically every few batches; it also
stores the last answer, for a client that lost its connection before the answer arrived.
`NAME.count` counts the answered batches, so that a restarted server knows how many of them the
snapshot lacks. All of this runs on the server's single worker thread.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from caster import state as states
from caster.adapt.adapter import Adapter, Stream
from caster.errors import CasterError
from caster.io import signed_tensors
from caster.io.files import locked, replacing
from caster.serve.tensors import Failure, RequestError, Tensors, datatype_of, from_bytes, to_bytes

FORMAT = "caster-served-stream 1"
COUNTS = struct.Struct("<qq")  # batches and samples answered
RETRY_SECONDS = 1.0  # between attempts to write after a failure
PROBE_BYTES = 1 << 16
STATE, ANSWER = "state.", "answer."  # prefixes of the arrays in a snapshot
PER_SAMPLE = ("labels", "probabilities", "disputed")  # outputs with a row per sample

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ServedStream:
    """A stream in memory, and how much of it is stored."""

    id: str
    path: Path  # of the snapshot
    stream: Stream
    batches: int = 0  # answered so far
    stored: int | None = None  # batches in the snapshot; None if it is missing or outdated
    repeat: int = 0  # answered batches lost in a crash; reported once
    used: float = field(default_factory=time.monotonic)
    last_position: int = 0  # of the first sample of the last batch
    last_answer: Tensors = field(default_factory=dict)  # of that batch

    @property
    def is_stored(self) -> bool:
        """Whether the snapshot is up to date."""
        return self.stored == self.batches

    def repeated(self, position: int, samples: int) -> Tensors | None:
        """The answer to samples of the last batch, for a client that asks again, else None."""
        at = position - self.last_position
        if not self.last_answer or at < 0 or at + samples > len(self.last_answer["labels"]):
            return None
        return split(self.last_answer, at, samples) | {"position": np.array([position])}


def split(answer: Tensors, at: int, samples: int) -> Tensors:
    """Cut the answer to some of a batch's samples out of the whole answer."""
    return {
        name: array[at : at + samples] if name in PER_SAMPLE else array
        for name, array in answer.items()
    }


class StreamStore:
    """All streams of a server; the `in_memory` most recent ones are in memory.

    While writes fail, `problem` says why, and no stream may change.
    """

    def __init__(
        self,
        adapter: Adapter,
        folder: Path,
        *,
        in_memory: int,
        total: int,  # maximum number of streams with files
        snapshot_every: int,  # batches
        idle_seconds: float,
    ) -> None:
        self.adapter, self.folder = adapter, folder
        self.in_memory, self.total = in_memory, total
        self.snapshot_every, self.idle_seconds = snapshot_every, idle_seconds
        self.problem: str | None = None
        self.snapshots = 0  # written so far
        self._retry_at = 0.0
        self._streams: OrderedDict[str, ServedStream] = OrderedDict()  # latest last
        self._known = len(list(folder.glob("*.count")))

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, stream_id: str) -> bool:
        count = self.folder / f"{_file_name(stream_id)}.count"
        return stream_id in self._streams or count.exists()

    def open(self, stream_id: str) -> ServedStream:
        """Get a stream by its id: from memory, from its files, or a new one."""
        found = self._streams.get(stream_id)
        if found is None:
            found = self._read(stream_id)
            self._streams[stream_id] = found
            while len(self) > self.in_memory and self.problem is None:
                oldest = next(iter(self._streams.values()))
                self._unload(oldest)
        self._streams.move_to_end(stream_id)
        found.used = time.monotonic()
        return found

    def answered(self, served: ServedStream, answer: Tensors) -> None:
        """Count a batch of a stream, and take a snapshot if one is due."""
        served.batches += 1
        served.last_answer, served.last_position = answer, int(answer["position"][0])
        with self.writing():
            self._count(served)
            if served.batches - (served.stored or 0) >= self.snapshot_every:
                self.save(served)

    def changed(self, served: ServedStream) -> None:
        """Take a snapshot of a stream that changed without a batch, by labels."""
        served.stored = None
        with self.writing():
            self.save(served)

    def unload_idle(self) -> None:
        """Move streams that were not used for a while from memory to disk."""
        now = time.monotonic()
        for served in list(self._streams.values()):
            if now - served.used > self.idle_seconds and self.problem is None:
                self._unload(served)

    def release(self, keeps: Callable[[str], bool]) -> bool:
        """Unload the streams that another worker will continue; False if a write failed."""
        for served in [each for each in self._streams.values() if not keeps(each.id)]:
            if self.can_write():
                self._unload(served)
        return all(map(keeps, self._streams))

    def close(self) -> None:
        """Take a snapshot of every stream."""
        for served in self._streams.values():
            with self.writing():
                self.save(served)

    def can_write(self) -> bool:
        """Whether streams may change; after a failure, first try to write what is missing."""
        if self.problem is not None and time.monotonic() >= self._retry_at:
            before, self.problem = self.problem, None
            with self.writing(quiet=True):
                with replacing(self.folder / "probe") as probe:
                    probe.write_bytes(bytes(PROBE_BYTES))
                (self.folder / "probe").unlink(missing_ok=True)
                for served in self._streams.values():
                    self.save(served)
            if self.problem is None:
                logger.warning("streams are written again, after: %s", before)
        return self.problem is None

    @contextmanager
    def writing(self, quiet: bool = False) -> Iterator[None]:
        """Record a failed write, not raise it; until one succeeds, the frozen model answers."""
        try:
            yield
        except RequestError:
            raise
        except (CasterError, OSError) as error:
            self.problem = str(error)
            self._retry_at = time.monotonic() + RETRY_SECONDS
            if not quiet:
                logger.warning("%s: until this is solved, the frozen model answers", error)

    def save(self, served: ServedStream) -> None:
        """Replace the snapshot of a stream, unless it is up to date."""
        if served.is_stored:
            return
        arrays = {f"{STATE}{name}": array for name, array in served.stream.state().items()}
        kinds = {}
        for name, array in served.last_answer.items():
            arrays[f"{ANSWER}{name}"] = np.frombuffer(to_bytes(array), np.uint8)
            kinds[name] = [datatype_of(array.dtype), array.shape]
        metadata = {
            "format": FORMAT,
            "stream": served.id,
            "batches": str(served.batches),
            "answer": json.dumps(kinds),
        }
        signed_tensors.write(arrays, metadata, served.path)
        served.stored = served.batches
        self.snapshots += 1

    def _unload(self, served: ServedStream) -> None:
        with self.writing():
            self.save(served)
            del self._streams[served.id]

    def _read(self, stream_id: str) -> ServedStream:
        path = self.folder / f"{_file_name(stream_id)}.stream"
        counts = path.with_suffix(".count")
        if not counts.exists():
            self._check_total()
            served = ServedStream(stream_id, path, self.adapter.new_stream())
            self._count(served)
            self._known += 1
            return served
        if path.exists():
            served = self._from_snapshot(stream_id, path)
        else:
            served = ServedStream(stream_id, path, self.adapter.new_stream())
        counted = counts.read_bytes()  # empty if the server was killed right after creating it
        batches, samples = COUNTS.unpack(counted or COUNTS.pack(0, 0))
        served.repeat = max(0, batches - served.batches)
        if served.repeat:
            logger.warning(
                "stream %s: resumed at sample %d; repeat %s, answered after the last snapshot, up "
                "to sample %d",
                stream_id,
                served.stream.samples,
                count_batches(served.repeat),
                samples,
            )
        return served

    def _from_snapshot(self, stream_id: str, path: Path) -> ServedStream:
        try:
            kind, maker = "a snapshot", "caster serve"
            arrays, metadata = signed_tensors.read_format(path, kind, maker, FORMAT)
            if metadata.get("stream") != stream_id:
                raise CasterError(f"{path} is not a snapshot of stream {stream_id}")
            state = {n.removeprefix(STATE): a for n, a in arrays.items() if n.startswith(STATE)}
            stream = self.adapter.resume(state)
        except CasterError as error:
            raise RequestError(
                f"stream {stream_id} cannot be resumed: {error}", Failure.INTERNAL
            ) from None
        kinds: dict[str, Any] = json.loads(metadata["answer"])
        answer = {
            name: from_bytes(name, datatype, shape, arrays[f"{ANSWER}{name}"].tobytes())
            for name, (datatype, shape) in kinds.items()
        }
        batches = int(metadata["batches"])
        position = int(answer["position"][0]) if answer else 0
        return ServedStream(
            stream_id, path, stream, batches, batches, last_position=position, last_answer=answer
        )

    def _count(self, served: ServedStream) -> None:
        """Write the counts in place, which works on a full disk too."""
        handle = os.open(served.path.with_suffix(".count"), os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.write(handle, COUNTS.pack(served.batches, served.stream.samples))
        finally:
            os.close(handle)

    def _check_total(self) -> None:
        if self._known >= self.total:
            self._known = len(list(self.folder.glob("*.count")))  # files may have been deleted
        if self._known >= self.total:
            raise RequestError(f"the server has {self._known:,} streams, its maximum", Failure.BUSY)


@contextmanager
def opened_folder(folder: Path, adapter: Adapter) -> Iterator[None]:
    """Lock a folder of streams; raise if it is in use or belongs to another state."""
    folder.mkdir(parents=True, exist_ok=True)
    message = f"another server is using {folder}: choose another folder with {{argument}}"
    with locked(folder / "lock", message, argument="folder"):
        source = folder / "source"
        expected = f"{states.digest(adapter.state)} {adapter.mechanism}"
        if not source.exists():
            with replacing(source) as made:
                made.write_text(expected)
        if source.read_text() != expected:
            raise CasterError(
                f"{folder} has streams of another state or mechanism: choose another folder with "
                "{argument}",
                argument="folder",
            )
        yield


def count_batches(count: int) -> str:
    """Format a number of batches.

    >>> count_batches(1), count_batches(2)
    ('1 batch', '2 batches')
    """
    return f"{count:,} batch{'' if count == 1 else 'es'}"


def _file_name(stream_id: str) -> str:
    """Make a readable file name, unique even if the file system ignores case."""
    digest = hashlib.sha256(stream_id.encode()).hexdigest()[:16]
    return f"{re.sub('[^a-z0-9]+', '-', stream_id.lower())[:40]}-{digest}"
