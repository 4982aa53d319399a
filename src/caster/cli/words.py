"""The library's errors in the words of the command line: which option it is that they speak of."""

from __future__ import annotations

import re

WORDS: tuple[tuple[str, str], ...] = (
    (r"\bwith head=", "with --head"),
    (r"^providers is not an option", "--provider is not an option"),
    (r"^(\w+) is not an option", r"--\1 is not an option"),
    (r"name the model's classes in their order", r"\g<0> with --classes"),
    (r"use its features without its head", r"\g<0> with --no-head"),
    (r"(another (model|preprocessing) .*)allow it by name", r"\1allow it with --allow-other-\2"),
    (r"set CASTER_DATA or give a root", "set CASTER_DATA or give --data-root"),
    (r"give a local checkpoint \(.safetensors\)", r"\g<0> with --checkpoint"),
    (r"state the preprocessing in a TOML file", r"\g<0> with --preprocessing"),
    (r"fit without layers\b", "fit without --layers"),
    (r"leave it out with sites=", "--no-layers answers by transport of the last features instead"),
    (r"allow it with Limits\((\w+=\d+)\)", r"allow it with --max \1"),
    (r": state a resize", ": state a `resize` in the file that --preprocessing names"),
)


def as_typed(message: str) -> str:
    """A message that names options as they are typed, where the library names arguments.

    >>> as_typed("name its classifier with head=; its last Linear layers are fc1, fc2")
    'name its classifier with --head; its last Linear layers are fc1, fc2'
    """
    for pattern, replacement in WORDS:
        message = re.sub(pattern, replacement, message)
    return message.replace("--channels_last", "--channels-last")
