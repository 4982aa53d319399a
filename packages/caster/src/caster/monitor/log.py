"""The log of a stream: one line of JSON per batch, append-only, in segments of bounded size.

A segment starts with a snapshot of the monitor, so the newest segment is enough to continue the log
and to show the stream. A crash can damage only the last line, which readers ignore and the next
writer removes. A stream has one writer at a time.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

from caster import state as states
from caster.core.adaptation import Adaptation, classes_of
from caster.core.betting import ALPHA, BettingTest
from caster.core.estimated_accuracy import Calibration
from caster.errors import CasterError, first_few, visible
from caster.io.files import AnyPath, move_into_place, open_regular, replacing
from caster.io.labels import as_labels, encode
from caster.monitor.stream_monitor import TOLERANCE, StreamMonitor, calibrations_of
from caster.monitor.summary import Record, Summarizer
from caster.state import State

FORMAT = "caster-log 1"
SEGMENT_BYTES = 2**19  # size above which a segment is closed: readers read whole segments
SEGMENTS = 32  # older ones are deleted
MEMORY = 65_536  # most recent samples that can still be labelled
LABELLED = -1  # instead of an answer, if it already has a label or is unknown
MAX_NAMED = 20  # streams named in a message
LONGEST_ID = 200  # bytes of its quoted form, which is a file name

logger = logging.getLogger(__name__)


class StreamLog:
    """Append the batches and labels of one stream to its log.

    With the `state` of the adapter, the log includes drift, risk and estimated accuracy if the
    state has a sketch. `monitor` summarises the stream so far. An existing log is continued.

    >>> import tempfile
    >>> import caster
    >>> clf = caster.Caster().fit([[0.0], [1.0], [4.0], [5.0]], [0, 0, 1, 1])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = StreamLog(folder, "camera 7")
    ...     log.append(clf.adapt([[0.5], [4.5]]), position=0, time=0.0)
    ...     names(folder), read(folder, "camera 7").reasons
    (['camera 7'], Counter({'min_samples': 1}))
    """

    def __init__(
        self,
        folder: AnyPath,
        stream_id: str,
        state: State | None = None,
        *,
        tolerance: float = TOLERANCE,
        alpha: float = ALPHA,
    ) -> None:
        self.folder, self.stream_id = Path(folder), stream_id
        self._state = state
        self._summarizer = Summarizer(state)
        self._answers: NDArray[np.int32] | None = None  # (MEMORY,), by id modulo its length
        self._first_answer: int | None = None
        self._header: Record = {
            "kind": "start",
            "format": FORMAT,
            "stream": stream_id,
            "state": None if state is None else _digest(state),
            "classes": [] if state is None else [str(c) for c in state.classes.tolist()],
            "calibrations": None if state is None else calibrations_of(state.sketch),
            "tolerance": tolerance,
            "alpha": alpha,
        }
        prepare(self.folder)
        try:
            self.monitor, self._path = self._open()
        except OSError as error:
            raise CasterError(f"cannot log to {self.folder}: {error.strerror}") from None

    def append(self, adaptation: Adaptation, *, position: int, time: float) -> None:
        """Log a batch that starts at this position of the stream, at this time in seconds."""
        self._write(self._summarizer.record(adaptation, position=position, time=time))
        self._remember(classes_of(adaptation.scores), position)

    def feedback(self, ids: Any, labels: Any, *, betting: BettingTest, time: float) -> None:
        """Log true labels of samples, and the resulting test of adapted against frozen answers.

        Labels of samples that are too old, or that this object did not log, count only in the test.
        """
        if self._state is None:
            raise CasterError("labels can be logged only with {argument}", argument="state")
        truth = encode(as_labels(labels), self._state.classes)
        known: dict[int, int] = {}  # a second label of a sample is not a second observation
        for i, c in zip(map(int, ids), truth.tolist(), strict=True):
            if self._answer(i) != LABELLED:
                known.setdefault(i, c)
        wrong = sum(self._answer(i) != c for i, c in known.items())
        test = {name: getattr(betting, name) for name in ("position", "phase", "wins", "losses")}
        self._write(
            {
                "kind": "feedback",
                "time": time,
                "position": self.monitor.position,
                "labels": len(known),
                "wrong": wrong,
                "betting": test | {"alpha": betting.alpha},
            }
        )
        if self._answers is not None:
            self._answers[[i % MEMORY for i in known]] = LABELLED

    def _remember(self, answers: NDArray[np.intp], position: int) -> None:
        if self._answers is None or position == 0:
            self._answers = np.full(MEMORY, LABELLED, np.int32)
            self._first_answer = position
        ids = np.arange(position, position + len(answers))[-MEMORY:]
        self._answers[ids % MEMORY] = answers[-MEMORY:]

    def _answer(self, i: int) -> int:
        """Answer to a sample without a label; LABELLED if it has one or is unknown."""
        first, end = self._first_answer, self.monitor.position
        if self._answers is None or first is None or not max(first, end - MEMORY) <= i < end:
            return LABELLED
        return int(self._answers[i % MEMORY])

    def _write(self, record: Record) -> None:
        """Append a line atomically, in a new segment if this one is full."""
        line = json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            if self._path.stat().st_size > self._header_bytes + SEGMENT_BYTES:
                self._path = self._begin_segment(self.monitor.snapshot())
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                size = os.fstat(file).st_size
                if os.write(file, line) < len(line):  # a full disk
                    os.ftruncate(file, size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(file)
        except OSError as error:
            raise CasterError(f"cannot log to {self.folder}: {error.strerror}") from None
        self.monitor.update(record)

    def _open(self) -> tuple[StreamMonitor, Path]:
        """Continue the newest segment, or begin one if there is none for this state."""
        segments = _segments(self.folder, self.stream_id)
        if segments:
            try:
                header, monitor, end = _replay(segments[-1])
            except CasterError as error:  # a damaged log must not stop the stream or a server
                logger.warning("%s: renamed, and a new log started", error)
                move_into_place(segments[-1], segments[-1].with_suffix(".damaged"))
                return _monitor(self._header), self._begin_segment(None)
            self._header_bytes = next(_lines(segments[-1]))[1]
            if all(header[name] == value for name, value in self._header.items()):
                os.truncate(segments[-1], end)  # remove an incomplete line
                return monitor, segments[-1]
        return _monitor(self._header), self._begin_segment(None)

    def _begin_segment(self, snapshot: Record | None) -> Path:
        segments = _segments(self.folder, self.stream_id)
        number = 1 + (int(segments[-1].name.split(".")[-2]) if segments else 0)
        path = self.folder / f"{_file_name(self.stream_id)}.{number:06d}.jsonl"
        line = json.dumps(self._header | {"snapshot": snapshot}) + "\n"
        with replacing(path) as temporary:  # a segment without its first line cannot be read
            temporary.write_text(line)
        self._header_bytes = len(line)
        for old in segments[: 1 - SEGMENTS]:
            old.unlink(missing_ok=True)
        return path


@lru_cache(maxsize=1)  # many streams share a state
def _digest(state: State) -> str:
    return states.digest(state)


def prepare(folder: AnyPath) -> None:
    """Create a folder for logs, if there is none."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise CasterError(f"cannot log to {folder}: it is a file, not a folder") from None
    except OSError as error:
        raise CasterError(f"cannot log to {folder}: {error.strerror}") from None


def names(folder: AnyPath) -> list[str]:
    """The streams that have a log in a folder."""
    return list(newest(folder))


def newest(folder: AnyPath, since: float = 0.0) -> dict[str, Path]:
    """The newest segment of every stream, by its id, if written to since a time in seconds."""
    if not Path(folder).is_dir():
        raise CasterError(
            f"{folder} is not a folder of logs: pass the one of `predict --log`, or STATE.logs of "
            "`caster serve`"
        )
    paths = sorted(Path(folder).glob("*.*.jsonl"))
    found = {unquote(path.name.rsplit(".", 2)[0]): path for path in paths}
    return {n: p for n, p in sorted(found.items()) if not since or p.stat().st_mtime >= since}


def read(folder: AnyPath, stream_id: str) -> StreamMonitor:
    """Read the monitor of a stream, from its newest segment."""
    segments = _segments(Path(folder), stream_id)
    if not segments:
        found = [repr(visible(name)) for name in names(folder)] or ["none"]
        shown = first_few(found, MAX_NAMED)
        raise CasterError(
            f"{folder} has no log of a stream {visible(stream_id)!r}; it has logs of: {shown}"
        )
    return read_segment(segments[-1])


def read_segment(path: Path) -> StreamMonitor:
    """Read the monitor of a stream at the end of a segment."""
    return _replay(path)[1]


def _replay(path: Path) -> tuple[Record, StreamMonitor, int]:
    """Header of a segment, the monitor after its last complete line, and the end of that line."""
    lines = _lines(path)
    try:
        header, end = next(lines)
        if header["format"] != FORMAT:
            raise ValueError("another format")
        monitor = _monitor(header)
        if header["snapshot"] is not None:
            monitor.restore(header["snapshot"])
        for record, after in lines:
            monitor.update(record)
            end = after
    except (AttributeError, IndexError, KeyError, StopIteration, TypeError, ValueError):
        raise CasterError(f"{path} is not a {FORMAT} file, or damaged: move it away") from None
    return header, monitor, end


def _lines(path: Path) -> Iterator[tuple[Record, int]]:
    """Yield every complete line and its end."""
    end = 0
    with open_regular(path) as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            end += len(line)
            yield json.loads(line), end


def _monitor(header: Record) -> StreamMonitor:
    found = header["calibrations"]
    calibrations = found and {name: Calibration(**values) for name, values in found.items()}
    options = {name: header[name] for name in ("tolerance", "alpha")}
    return StreamMonitor(header["stream"], header["classes"], calibrations, **options)


def _segments(folder: Path, stream_id: str) -> list[Path]:
    name = _file_name(stream_id)
    found = (path for path in folder.glob("*.jsonl") if path.name.rsplit(".", 2)[0] == name)
    return sorted(found, key=lambda path: path.name)


def _file_name(stream_id: str) -> str:
    """A file name for any id.

    >>> _file_name("cam/7"), _file_name("..")
    ('cam%2F7', '%2E%2E')
    """
    name = quote(stream_id, safe="").replace(".", "%2E")
    if not 1 <= len(name) <= LONGEST_ID:
        raise CasterError(
            f"a stream id has 1 to {LONGEST_ID} bytes, not {visible(stream_id)[:80]!r}"
        )
    return name
