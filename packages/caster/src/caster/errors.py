"""Errors that users can act on: one line that says what is wrong and what to do."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Self

FIELD = "{argument}"
# Command-line options with another name than their argument. They are here because caster_bench's
# engine, which must not depend on the command line, names options in the failures it reports.
OPTIONS = {
    "providers": "--provider",
    "store": "--cache",
    "images_at_once": "--batch-size",
}

# Control characters, which start escape sequences of a terminal, characters that reorder or break a
# line, and lone surrogates, which cannot be encoded.
_UNSAFE = [range(0x20), range(0x7F, 0xA0), (0x61C, 0x200E, 0x200F), range(0x2028, 0x202F)]
_UNSAFE += [range(0x2066, 0x206A)]
_CONTROL_PICTURES = {code: 0x2400 + code for code in range(0x20)} | {0x7F: 0x2421}
_VISIBLE: dict[int, int | str] = {
    code: _CONTROL_PICTURES.get(code, 0xFFFD) for codes in _UNSAFE for code in codes
} | {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}
_LINES_KEPT = {code: sign for code, sign in _VISIBLE.items() if code != ord("\n")}


def visible(text: str) -> str:
    """Make text safe for a terminal: show control characters instead; keep newlines.

    >>> visible("a label \\x1b[31mthat paints\\n")
    'a label ␛[31mthat paints\\n'
    """
    return text.translate(_LINES_KEPT)


def one_line(text: str) -> str:
    """Like `visible`, for text that must be a single line.

    >>> one_line("two\\nlines")
    'two␊lines'
    """
    return text.translate(_VISIBLE)


def first_few(names: Iterable[object], count: int = 5) -> str:
    """List the first names in a message, as in "cat, dog, ..."."""
    words = [str(name) for name in names]
    return ", ".join(words[:count]) + (", ..." if len(words) > count else "")


def counted(count: int, what: str) -> str:
    """Format a count with its noun.

    >>> counted(1, "image"), counted(2_000, "batch")
    ('1 image', '2,000 batches')
    """
    plural = "es" if what.endswith("ch") else "s"
    return f"{count:,} {what}{'' if count == 1 else plural}"


def option_of(argument: str | None) -> str:
    """The command-line option of a Python argument.

    >>> option_of("allow_other_model"), option_of("providers")
    ('--allow-other-model', '--provider')
    """
    return OPTIONS.get(argument or "", f"--{argument}".replace("_", "-"))


class CasterError(ValueError):
    """Bad input. The message is one line; the command line prints it without a traceback.

    A message may quote a label or a file name, so control characters are made visible. If it tells
    the user to set an argument, it contains `{argument}`, which the command line replaces by the
    name of the option.

    >>> print(CasterError("name its classifier with {argument}", argument="head"))
    name its classifier with head=
    """

    def __init__(self, message: str = "", *, argument: str | None = None) -> None:
        self.template = one_line(str(message))
        self.argument = argument
        super().__init__(self.phrased(f"{argument}="))

    def within(self, place: str) -> Self:
        """Return the same error with a place before its message."""
        return type(self)(f"{place}: {self.template}", argument=self.argument)

    @property
    def on_command_line(self) -> str:
        """The message, with an option in place of the argument."""
        return self.phrased(option_of(self.argument))

    def phrased(self, argument: str) -> str:
        """The message, with the argument as the user would write it."""
        return self.template if self.argument is None else self.template.replace(FIELD, argument)


class InputTypeError(CasterError, TypeError):
    """Values that are not numbers; scikit-learn expects a TypeError for some."""


class LimitError(CasterError):
    """Input over one of the `Limits`; the message names the limit and the value that allows it."""


class StateError(CasterError):
    """A state file that cannot be trusted, or that belongs to another model or preprocessing."""


class DiskFullError(CasterError):
    """A full disk, quota or file-size limit: further writes would fail too."""


_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
MAKE_ROOM = "make room there and run the same command again"


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, is a full disk, quota or file-size limit.

    >>> is_disk_full(OSError(errno.ENOSPC, "No space left on device")), is_disk_full(OSError())
    (True, False)
    """
    while error is not None:
        if isinstance(error, DiskFullError) or (
            isinstance(error, OSError) and error.errno in _FULL
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def machine_message(error: MemoryError | RecursionError | OSError) -> str:
    """Describe a lack of memory, too deep nesting or a failed file operation in one line.

    >>> machine_message(PermissionError(errno.EACCES, "Permission denied", "runs"))
    'cannot read or write runs: Permission denied'
    """
    if isinstance(error, MemoryError):
        detail = f" ({error})" if str(error) else ""
        return f"out of memory{detail}: give less data at a time, or use a larger machine"
    if isinstance(error, RecursionError):
        return "an input is nested too deeply to be read"
    if isinstance(error, FileExistsError | NotADirectoryError) and error.filename:
        path = Path(os.fsdecode(error.filename))
        file = next((each for each in (path, *path.parents) if each.is_file()), None)
        if file is not None:
            return f"{file} is a file, not a folder"
    name = f" {error.filename}" if error.filename else ""
    return f"cannot read or write{name}: {error.strerror or error}"
