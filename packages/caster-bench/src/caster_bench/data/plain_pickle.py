"""Dicts, lists, text, numbers and NumPy arrays out of a pickle that is read and never run.

`pickle.load` imports and calls whatever a file names. This reads the few opcodes that the files of
CIFAR consist of. The names of NumPy's constructors in them are symbols, and nothing is looked up or
called by name; any other name and any other opcode is refused.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from caster.errors import CasterError
from caster.io.files import open_regular
from caster_bench.data.pickled_arrays import SYMBOLS, Symbol, Unbuilt


def read_plain_pickle(path: Path) -> Any:
    """The values in a file; what Python 2 called text, and all bytes, come as bytes.

    Long ones (256 bytes and more) are views of the mapped file, and so are arrays: pixels stay on
    the disk until somebody looks at them.

    >>> import pickle, tempfile
    >>> import numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "batch")
    ...     _ = path.write_bytes(pickle.dumps({"data": np.arange(3), "labels": [6, 9]}))
    ...     read_plain_pickle(path)
    {'data': array([0, 1, 2]), 'labels': [6, 9]}
    """
    try:
        with open_regular(path) as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return _Reader(memoryview(mapped)).run()
    except OSError as error:
        raise CasterError(f"cannot read {path}: {error.strerror}") from None
    except CasterError as error:
        raise CasterError(f"{path} is refused: {error}") from None
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError, struct.error):
        raise CasterError(f"{path} is truncated, damaged or no pickle") from None


class _Reader:
    """A stack machine: the values not yet used, those below the open marks, and those kept."""

    def __init__(self, content: memoryview) -> None:
        self.content, self.at = content, 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        while (opcode := self.content[self.at]) != ord("."):
            self.at += 1
            if opcode in VALUES:
                value = VALUES[opcode](self)  # before the stack is looked up: a mark changes it
                self.stack.append(value)
            elif opcode in ACTIONS:
                ACTIONS[opcode](self)
            else:
                raise CasterError(f"its opcode {bytes([opcode])!r} is not one of plain values")
        return self.stack.pop()

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def take(self, size: int) -> memoryview:
        piece = self.content[self.at : self.at + size]
        if size < 0 or len(piece) < size:
            raise ValueError("the file ends within a value")
        self.at += size
        return piece

    def line(self) -> str:
        ahead = bytes(self.content[self.at : self.at + 256])
        line = ahead[: ahead.index(b"\n")]
        self.at += len(line) + 1
        return line.decode()

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        values, self.stack = self.stack, self.below.pop()
        return values

    def last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError("fewer values than an opcode takes")
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def keep(self, key: int) -> None:
        self.memo[key] = self.stack[-1]

    def extend(self, values: list[Any]) -> None:
        list.extend(self.stack[-1], values)

    def update(self, values: list[Any]) -> None:
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | bytes | int):  # tuples in tuples may take ages to hash
                raise TypeError("a key that is neither text nor a number")
            dict.__setitem__(self.stack[-1], key, value)

    def name(self, module: str, name: str) -> None:
        if (module, name) not in SYMBOLS:
            raise CasterError(f"it names {f'{module}.{name}'!r}, and caster never runs a pickle")
        self.stack.append(SYMBOLS[module, name])

    def call(self, symbol: Any, arguments: Any) -> None:
        if not isinstance(symbol, Symbol):
            raise TypeError("a call of something that is no name")
        self.stack.append(symbol.make(*arguments))

    def build(self, unbuilt: Any, state: Any) -> None:
        if not isinstance(unbuilt, Unbuilt):
            raise TypeError("a description of something complete")
        built = unbuilt.build(state)
        self.stack.append(built)
        for key, kept in self.memo.items():  # kept while it was empty
            if kept is unbuilt:
                self.memo[key] = built


# pickletools describes them: first those that leave a value, then those that only act.
VALUES: dict[int, Callable[[_Reader], Any]] = {
    ord("N"): lambda r: None,
    0x88: lambda r: True,
    0x89: lambda r: False,
    ord("}"): lambda r: {},
    ord("]"): lambda r: [],
    ord(")"): lambda r: (),
    ord("K"): lambda r: r.number("<B"),
    ord("M"): lambda r: r.number("<H"),
    ord("J"): lambda r: r.number("<i"),
    0x8A: lambda r: int.from_bytes(r.take(r.number("<B")), "little", signed=True),
    ord("U"): lambda r: bytes(r.take(r.number("<B"))),
    ord("C"): lambda r: bytes(r.take(r.number("<B"))),
    ord("T"): lambda r: r.take(r.number("<i")),
    ord("B"): lambda r: r.take(r.number("<I")),
    0x96: lambda r: r.take(r.number("<Q")),
    0x8C: lambda r: str(r.take(r.number("<B")), "utf-8"),
    ord("X"): lambda r: str(r.take(r.number("<I")), "utf-8"),
    ord("t"): lambda r: tuple(r.since_mark()),
    0x85: lambda r: tuple(r.last(1)),
    0x86: lambda r: tuple(r.last(2)),
    0x87: lambda r: tuple(r.last(3)),
    ord("h"): lambda r: r.memo[r.number("<B")],
    ord("j"): lambda r: r.memo[r.number("<I")],
}
ACTIONS: dict[int, Callable[[_Reader], Any]] = {
    0x80: lambda r: r.take(1),  # the protocol
    0x95: lambda r: r.take(8),  # the length of a frame
    ord("("): lambda r: r.mark(),
    ord("a"): lambda r: r.extend(r.last(1)),
    ord("e"): lambda r: r.extend(r.since_mark()),
    ord("s"): lambda r: r.update(r.last(2)),
    ord("u"): lambda r: r.update(r.since_mark()),
    ord("q"): lambda r: r.keep(r.number("<B")),
    ord("r"): lambda r: r.keep(r.number("<I")),
    0x94: lambda r: r.keep(len(r.memo)),
    ord("c"): lambda r: r.name(r.line(), r.line()),
    0x93: lambda r: r.name(*r.last(2)),
    ord("R"): lambda r: r.call(*r.last(2)),
    ord("b"): lambda r: r.build(*r.last(2)),
}
