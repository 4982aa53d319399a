"""Streams of a server: the recent ones in memory, all of them in files that outlive a kill.

A stream has two files. `NAME.stream` is a snapshot, replaced as a whole every few batches; it also
holds the last answer, for a client that was cut off before it arrived. `NAME.count` says how many
batches were answered, so that a restart knows how many of them the snapshot does not have. All of
this runs on the server's one worker thread.
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
COUNTS = struct.Struct("<qq")  # batches and samples that were answered
RETRY_SECONDS = 1.0  # between attempts to write, once one has failed
PROBE_BYTES = 1 << 16
STATE, ANSWER = "state.", "answer."  # prefixes of arrays in a snapshot
OF_SAMPLES = ("labels", "probabilities", "disputed")  # outputs with a row per sample

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ServedStream:
    """A stream in memory, and what is stored of it."""

    id: str
    path: Path  # of the snapshot
    stream: Stream
    batches: int = 0  # answered so far
    stored: int | None = None  # batches in the snapshot; None: there is none, or it is older
    repeat: int = 0  # answered batches that a crash has lost; reported once
    used: float = field(default_factory=time.monotonic)
    last_position: int = 0  # of the first sample in the last batch
    last_answer: Tensors = field(default_factory=dict)  # of that batch

    @property
    def is_stored(self) -> bool:
        """Whether the snapshot is up to date."""
        return self.stored == self.batches

    def repeated(self, position: int, samples: int) -> Tensors | None:
        """The answer to samples of the last batch, for a client that asks again; else None."""
        at = position - self.last_position
        if not self.last_answer or at < 0 or at + samples > len(self.last_answer["labels"]):
            return None
        return split(self.last_answer, at, samples) | {"position": np.array([position])}


def split(answer: Tensors, at: int, samples: int) -> Tensors:
    """The part of a batch's answer that belongs to some of its samples."""
    return {
        name: array[at : at + samples] if name in OF_SAMPLES else array
        for name, array in answer.items()
    }


class StreamStore:
    """All streams of a server, the most recent `in_memory` of them in memory.

    While a write fails, `problem` says why, and no stream may be changed.
    """

    def __init__(
        self,
        adapter: Adapter,
        folder: Path,
        *,
        in_memory: int,
        total: int,  # streams with files
        snapshot_every: int,  # batches of a stream
        idle_seconds: float,
    ) -> None:
        self.adapter, self.folder = adapter, folder
        self.in_memory, self.total = in_memory, total
        self.snapshot_every, self.idle_seconds = snapshot_every, idle_seconds
        self.problem: str | None = None
        self.snapshots = 0  # written so far
        self._retry_at = 0.0
        self._streams: OrderedDict[str, ServedStream] = OrderedDict()  # the latest at the end
        self._known = len(list(folder.glob("*.count")))

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, stream_id: str) -> bool:
        count = self.folder / f"{_file_name(stream_id)}.count"
        return stream_id in self._streams or count.exists()

    def open(self, stream_id: str) -> ServedStream:
        """A stream by its id: from memory, from its files, or a new one."""
        found = self._streams.get(stream_id)
        if found is None:
            found = self._read(stream_id)
            self._streams[stream_id] = found
            while len(self) > self.in_memory and self.problem is None:
                oldest = next(iter(self._streams.values()))
                self._put_away(oldest)
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
        """Take a snapshot of a stream that changed without a batch: it got labels."""
        served.stored = None
        with self.writing():
            self.save(served)

    def unload_idle(self) -> None:
        """Write out streams that nobody has used for a while, and take them out of memory."""
        now = time.monotonic()
        for served in list(self._streams.values()):
            if now - served.used > self.idle_seconds and self.problem is None:
                self._put_away(served)

    def release(self, keeps: Callable[[str], bool]) -> bool:
        """Put away the streams that another worker shall continue; False: a write has failed."""
        for served in [each for each in self._streams.values() if not keeps(each.id)]:
            if self.can_write():
                self._put_away(served)
        return all(map(keeps, self._streams))

    def close(self) -> None:
        """Take a snapshot of every stream."""
        for served in self._streams.values():
            with self.writing():
                self.save(served)

    def can_write(self) -> bool:
        """Whether streams may change; after a failure, try to write what is missing first."""
        if self.problem is not None and time.monotonic() >= self._retry_at:
            before, self.problem = self.problem, None
            with self.writing(quiet=True):
                with replacing(self.folder / "probe") as probe:
                    probe.write_bytes(bytes(PROBE_BYTES))
                (self.folder / "probe").unlink(missing_ok=True)
                for served in self._streams.values():
                    self.save(served)
            if self.problem is None:
                logger.warning("streams are written again: %s is over", before)
        return self.problem is None

    @contextmanager
    def writing(self, quiet: bool = False) -> Iterator[None]:
        """Note a failing write instead of raising it: until one succeeds, answers are frozen."""
        try:
            yield
        except RequestError:
            raise
        except (CasterError, OSError) as error:
            self.problem = str(error)
            self._retry_at = time.monotonic() + RETRY_SECONDS
            if not quiet:
                logger.warning("%s: answers are the frozen model's until this is solved", error)

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

    def _put_away(self, served: ServedStream) -> None:
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
        counted = counts.read_bytes()  # empty after a kill right after it was created
        batches, samples = COUNTS.unpack(counted or COUNTS.pack(0, 0))
        served.repeat = max(0, batches - served.batches)
        if served.repeat:
            logger.warning(
                "stream %s: resumed at sample %d; repeat %s, answered after its last snapshot, up "
                "to sample %d",
                stream_id,
                served.stream.samples,
                count_batches(served.repeat),
                samples,
            )
        return served

    def _from_snapshot(self, stream_id: str, path: Path) -> ServedStream:
        def check(metadata: dict[str, str]) -> None:
            if metadata.get("format") != FORMAT or metadata.get("stream") != stream_id:
                raise CasterError(f"{path} is not a snapshot of stream {stream_id}")

        try:
            arrays, metadata = signed_tensors.read(path, "a snapshot", "caster serve", check)
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
        """Write the counts in place: a full disk has room for that."""
        handle = os.open(served.path.with_suffix(".count"), os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.write(handle, COUNTS.pack(served.batches, served.stream.samples))
        finally:
            os.close(handle)

    def _check_total(self) -> None:
        if self._known >= self.total:
            self._known = len(list(self.folder.glob("*.count")))  # files may have been removed
        if self._known >= self.total:
            raise RequestError(
                f"the server has {self._known:,} streams, as many as it takes", Failure.BUSY
            )


@contextmanager
def opened_folder(folder: Path, adapter: Adapter) -> Iterator[None]:
    """Hold a folder of streams for one server; raise if it is in use or of another state."""
    folder.mkdir(parents=True, exist_ok=True)
    message = f"another server uses {folder}: name another folder with {{argument}}"
    with locked(folder / "lock", message, argument="folder"):
        source = folder / "source"
        expected = f"{states.digest(adapter.state)} {adapter.mechanism}"
        if not source.exists():
            with replacing(source) as made:
                made.write_text(expected)
        if source.read_text() != expected:
            raise CasterError(
                f"{folder} has streams of another state or mechanism: name another folder with "
                "{argument}",
                argument="folder",
            )
        yield


def count_batches(count: int) -> str:
    """A number of batches in words.

    >>> count_batches(1), count_batches(2)
    ('1 batch', '2 batches')
    """
    return f"{count:,} batch{'' if count == 1 else 'es'}"


def _file_name(stream_id: str) -> str:
    """A readable file name, different for different ids even if the file system ignores case."""
    digest = hashlib.sha256(stream_id.encode()).hexdigest()[:16]
    return f"{re.sub('[^a-z0-9]+', '-', stream_id.lower())[:40]}-{digest}"
