"""Errors a user can act on: one line, what is wrong and what to do."""

# What a terminal obeys (escape sequences start with such a character), what reorders or breaks a
# line, and lone surrogates, which cannot be encoded.
_UNSAFE = [range(0x20), range(0x7F, 0xA0), (0x61C, 0x200E, 0x200F), range(0x2028, 0x202F)]
_UNSAFE += [range(0x2066, 0x206A), range(0xD800, 0xE000)]
_PICTURES = {code: 0x2400 + code for code in range(0x20)} | {0x7F: 0x2421}
_VISIBLE = {code: _PICTURES.get(code, 0xFFFD) for codes in _UNSAFE for code in codes}
_LINES_KEPT = {code: sign for code, sign in _VISIBLE.items() if code != ord("\n")}


def visible(text: str) -> str:
    """Text for a terminal: control characters are shown instead of obeyed; newlines stay.

    >>> visible("a label \\x1b[31mthat paints\\n")
    'a label ␛[31mthat paints\\n'
    """
    return text.translate(_LINES_KEPT)


def one_line(text: str) -> str:
    """The same for text that must be a single line.

    >>> one_line("two\\nlines")
    'two␊lines'
    """
    return text.translate(_VISIBLE)


class CasterError(ValueError):
    """Bad input. The message is one line; the command line prints it without a traceback.

    A message may quote a label or a file name; their control characters are shown, not obeyed.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(str(message)))


class InputTypeError(CasterError, TypeError):
    """Values that are not numbers; scikit-learn expects a TypeError for some of them."""


class LimitError(CasterError):
    """Input over one of the `Limits`; the message names the limit and the value that allows it."""


class StateError(CasterError):
    """A state file that cannot be trusted, or does not belong to what it is used with."""
