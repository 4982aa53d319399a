"""Read dicts, lists, text, numbers and NumPy arrays from a pickle without running it.

`pickle.load` imports and calls whatever a file names. This reads the few opcodes that CIFAR's files
use. NumPy pickles an array as a call of a constructor and a state to fill its result with; here the
names of such constructors are keys of a table, and nothing is imported or called by name. Any other
name or opcode is rejected.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError
from caster.io.files import open_regular


def read_plain_pickle(path: Path) -> Any:
    """Read the values of a pickle; Python 2 strings come as bytes.

    Arrays, and bytes of 256 or more, are views of the mapped file: pixels stay on disk until used.

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
        raise CasterError(f"cannot read {path}: {error}") from None
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError, struct.error):
        raise CasterError(f"{path} is truncated, damaged or not a pickle") from None


class _Reader:
    """A stack machine: values not yet used, those below open marks, and the memo."""

    def __init__(self, content: memoryview) -> None:
        self.content, self.at = content, 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        while (opcode := self.content[self.at]) != ord("."):
            self.at += 1
            if opcode in VALUES:
                value = VALUES[opcode](self)  # before looking up the stack, which a mark replaces
                self.stack.append(value)
            elif opcode in ACTIONS:
                ACTIONS[opcode](self)
            else:
                raise CasterError(f"its opcode {bytes([opcode])!r} does not belong to plain values")
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

    def memoize(self, key: int) -> None:
        self.memo[key] = self.stack[-1]

    def extend(self, values: list[Any]) -> None:
        list.extend(self.stack[-1], values)

    def update(self, values: list[Any]) -> None:
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | bytes | int):  # nested tuples may take ages to hash
                raise TypeError("a key that is neither text nor a number")
            dict.__setitem__(self.stack[-1], key, value)

    def name(self, module: str, name: str) -> None:
        if (module, name) not in SYMBOLS:
            raise CasterError(f"it names {f'{module}.{name}'!r}, and caster never runs a pickle")
        self.stack.append(SYMBOLS[module, name])

    def call(self, symbol: Any, arguments: Any) -> None:
        if not isinstance(symbol, Symbol):
            raise TypeError("a call of something that is not a name")
        self.stack.append(symbol.make(*arguments))

    def build(self, unbuilt: Any, state: Any) -> None:
        if not isinstance(unbuilt, Unbuilt):
            raise TypeError("a state for something complete")
        built = unbuilt.build(state)
        self.stack.append(built)
        for key, value in self.memo.items():  # memoized before it was built
            if value is unbuilt:
                self.memo[key] = built


# Opcodes, as pickletools describes them: those that push a value, then those that only act.
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
    0x80: lambda r: r.take(1),  # protocol
    0x95: lambda r: r.take(8),  # frame length
    ord("("): lambda r: r.mark(),
    ord("a"): lambda r: r.extend(r.last(1)),
    ord("e"): lambda r: r.extend(r.since_mark()),
    ord("s"): lambda r: r.update(r.last(2)),
    ord("u"): lambda r: r.update(r.since_mark()),
    ord("q"): lambda r: r.memoize(r.number("<B")),
    ord("r"): lambda r: r.memoize(r.number("<I")),
    0x94: lambda r: r.memoize(len(r.memo)),
    ord("c"): lambda r: r.name(r.line(), r.line()),
    0x93: lambda r: r.name(*r.last(2)),
    ord("R"): lambda r: r.call(*r.last(2)),
    ord("b"): lambda r: r.build(*r.last(2)),
}


@dataclass(frozen=True)
class Symbol:
    """A name that a file may call, and what the call makes."""

    make: Callable[..., Any]


@dataclass(frozen=True, eq=False)  # compared by identity
class Unbuilt:
    """A dtype, or without a `dtype` an array, whose state is still to come."""

    dtype: str | None = None

    def build(self, state: Any) -> Any:
        """Make the dtype or array from its state."""
        return _array(*state) if self.dtype is None else _dtype(self.dtype, *state)


def _dtype(name: str, version: int, order: str | bytes, *details: Any) -> np.dtype[Any]:
    if _text(order) not in ("<", ">", "|", "="):
        raise ValueError("an unknown byte order")
    return np.dtype(_text(order) + name)


def _array(
    version: int, shape: tuple[int, ...], dtype: Any, fortran: bool, content: Any
) -> NDArray[Any]:
    if not isinstance(dtype, np.dtype):
        raise TypeError("an array without a dtype")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")


def _from_buffer(content: Any, dtype: Any, shape: tuple[int, ...], order: str) -> NDArray[Any]:
    return _array(1, shape, dtype, order == "F", content)


def _number_type(name: str | bytes, *flags: Any) -> Unbuilt:
    if not re.fullmatch("[biuf][1248]", _text(name)):
        raise CasterError("it has an array of something other than numbers")
    return Unbuilt(_text(name))


def _encoded(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise ValueError("bytes in another encoding")
    return text.encode("latin-1")


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else str(value, "ascii")


_ARRAY = Symbol(lambda kind, shape, code: Unbuilt())

SYMBOLS = {
    ("numpy.core.multiarray", "_reconstruct"): _ARRAY,  # NumPy 1
    ("numpy._core.multiarray", "_reconstruct"): _ARRAY,  # NumPy 2
    ("numpy.core.numeric", "_frombuffer"): Symbol(_from_buffer),  # protocol 5
    ("numpy._core.numeric", "_frombuffer"): Symbol(_from_buffer),
    ("numpy", "ndarray"): Symbol(lambda: None),  # an argument of `_reconstruct`, never called
    ("numpy", "dtype"): Symbol(_number_type),
    ("_codecs", "encode"): Symbol(_encoded),  # how Python 3 writes bytes for Python 2
}
