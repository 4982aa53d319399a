"""An entry of the store in the making: array by array, batch by batch, its note now and then."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from caster.errors import CasterError
from caster.io.growing import Damaged, GrowingArray
from caster.io.layer_arrays import Layers
from caster.io.note import Note, array_file, read_folder, write_note

NOTE_EVERY = 5.0  # seconds between notes of progress: what a crash may cost

Arrays = Mapping[str, NDArray[Any]]

log = logging.getLogger(__name__)


class Filling:
    """An entry in the making; `passing` says that the job wants it for itself only."""

    def __init__(self, folder: Path, passing: bool = False, of: str = "") -> None:
        self.folder, self.note = folder, Note(passing=passing, of=of)
        self._arrays: dict[str, GrowingArray] = {}
        self._noted_at = time.monotonic()

    def resume(self) -> None:
        """Go on from what an earlier attempt left in the folder, if it did."""
        self.folder.mkdir(exist_ok=True)
        if not (self.folder / "note.json").exists():
            return
        try:
            note, arrays = read_folder(self.folder)
        except Damaged:
            self.clear()
            say_damaged(self.folder)
            return
        # What another job began to keep stays kept; what this one keeps does too.
        self.note = replace(note, passing=note.passing and self.note.passing, of=self.note.of)
        for name, held in arrays.items():
            file = array_file(self.folder, name)
            self._arrays[name] = GrowingArray(file, held, note.kept, note.checksums[name])

    def append(
        self, columns: Arrays, unreadable: Mapping[int, str], layers: Layers | None = None
    ) -> None:
        """Add the outputs for the next images, and the rows among them that have none.

        `layers` are sums over all rows so far; without them, earlier sums are no longer those.
        """
        note, count = self.note, len(columns["rows"])
        checksums = note.checksums
        if count:
            if note.kept and columns.keys() != checksums.keys():
                raise CasterError("the model gives logits with some batches and not with others")
            with telling(self.folder.parent):
                checksums = {name: self._grown(name, columns[name]) for name in columns}
        # One assignment: Ctrl-C finds the note of before this batch or of after it.
        self.note = Note(
            note.seen + count + len(unreadable),
            note.kept + count,
            {**note.unreadable, **{str(row): why for row, why in unreadable.items()}},
            checksums,
            layers,
            note.passing,
            note.of,
        )
        if time.monotonic() - self._noted_at > NOTE_EVERY:
            self.save()

    def save(self) -> None:
        """Put everything so far on disk, the note last."""
        with telling(self.folder.parent):
            for array in self._arrays.values():
                array.sync(self.note.kept)
            write_note(self.note, self.folder)
        self._noted_at = time.monotonic()

    def close(self) -> None:
        """Leave what there is to the next attempt; where there is nothing, leave nothing."""
        try:
            if self.note.seen:
                self.save()
        finally:
            self._let_go()
        if self.note.seen == 0:
            shutil.rmtree(self.folder)

    def clear(self) -> None:
        """Start anew."""
        self._let_go()
        with telling(self.folder.parent):
            shutil.rmtree(self.folder)
            self.folder.mkdir()
        self.note = Note(passing=self.note.passing, of=self.note.of)

    def _let_go(self) -> None:
        for array in self._arrays.values():
            array.close()
        self._arrays = {}

    def _grown(self, name: str, values: NDArray[Any]) -> int:
        """Append to one array; returns its checksum."""
        if name not in self._arrays:
            self._arrays[name] = GrowingArray(array_file(self.folder, name), values)
        return self._arrays[name].append(values)


def say_damaged(folder: Path) -> None:
    """That what was kept there is lost."""
    log.warning("the features kept in %s were damaged, and are made anew", folder)


@contextmanager
def telling(root: Path) -> Iterator[None]:
    """What the disk has to say, in one line."""
    try:
        yield
    except OSError as error:
        raise CasterError(
            f"cannot keep features in {root}: {error.strerror or error}; --cache names another "
            "folder"
        ) from None
