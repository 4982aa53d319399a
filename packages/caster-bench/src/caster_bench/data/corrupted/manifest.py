"""What a corrupted set says of itself: how it was made, and the digest of all that is whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from caster._version import __version__
from caster.errors import CasterError
from caster.io.files import read_regular, replacing

NAME = "manifest.json"
FORMAT = 1
WORDS = {"caster": "caster {}", "numpy": "NumPy {}", "scipy": "SciPy {}", "pillow": "Pillow {}"}

ENTRIES: dict[str, dict[str, type]] = {  # what is said of each piece, at least
    "constants": {},
    "written": {"sha256": str, "bytes": int},
    "begun": {"rows": int, "checksum": int},
}

Facts = Mapping[str, Any]


def versions() -> dict[str, str]:
    """Of everything that bytes may depend on."""
    found = {"caster": __version__, "numpy": version("numpy"), "scipy": version("scipy")}
    with suppress(PackageNotFoundError):  # most corruptions of arrays do without it
        found["pillow"] = version("pillow")
    return found


class Manifest:
    """The file, rewritten whenever another piece is whole: an interrupted run goes on from it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     manifest = Manifest.opened(Path(folder), {"seed": 0}, {"begun_from": "x.npz"})
    ...     manifest.finish("fog.npy", {"sha256": "2cf2...", "bytes": 5})
    ...     again = Manifest.opened(Path(folder), {"seed": 0}, {"begun_from": "y.npz"})
    >>> again.whole("fog.npy"), again.whole("snow.npy")
    ({'bytes': 5, 'sha256': '2cf2...'}, None)
    """

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path, self.content = path, content

    @classmethod
    def opened(cls, out: Path, settings: Facts, beside: Facts) -> Manifest:
        """The one in a folder, if it was made with these settings; else a new one.

        What is `beside` them is written and not compared.
        """
        path = out / NAME
        if not path.exists():
            nothing: dict[str, Any] = {part: {} for part in ENTRIES}
            return cls(path, {"format": FORMAT, **beside, **_plain(settings), **nothing})
        content = _read(path)
        for name, value in _plain(settings).items():
            if content.get(name) != value:
                raise CasterError(_difference(out, name, content.get(name), value))
        return cls(path, content)

    def whole(self, name: str) -> Any:
        """What is known of a file or folder that is whole, or None."""
        return self.content["written"].get(name)

    def begun(self, name: str) -> Any:
        """How far a file has come that is not whole yet, or None."""
        return self.content["begun"].get(name)

    def begin(self, name: str, facts: Facts) -> None:
        """Note how far a file has come."""
        self.content["begun"][name] = dict(facts)
        self.save()

    def finish(self, name: str, facts: Facts) -> None:
        """Note that a file or folder is whole."""
        self.content["begun"].pop(name, None)
        self.content["written"][name] = dict(facts)
        self.save()

    def forget(self, name: str) -> None:
        """Take back what was noted: it is not there any more."""
        self.content["begun"].pop(name, None)
        self.content["written"].pop(name, None)

    def state_constants(self, corruption: str, constants: Facts) -> None:
        """Say what a corruption is made with, or refuse to mix it with one made otherwise."""
        given = _plain(constants)
        held = self.content["constants"].setdefault(corruption, given)
        if held == given:
            return
        holds = f"{self.path.parent} holds {corruption} made with"
        if {**held, "textures": None} == {**given, "textures": None}:
            raise CasterError(f"{holds} other textures: write to another folder")
        raise CasterError(
            f"{holds} {_words(held)}, and this is {_words(given)}: write to another folder"
        )

    def save(self) -> None:
        """Put it in the place of the last one."""
        text = json.dumps(self.content, indent=1, sort_keys=True)  # whatever was made first
        with replacing(self.path) as temporary:
            temporary.write_text(f"{text}\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular(path))
    except OSError as error:
        raise CasterError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        content = None
    if isinstance(content, dict) and content.get("format", FORMAT) != FORMAT:
        raise CasterError(f"{path} was written by another version of caster: use another folder")
    if not _is_sound(content):
        raise CasterError(f"{path} is no manifest of a corrupted set: write to another folder")
    return dict(content)


def _is_sound(content: Any) -> bool:
    """Whether all that is looked up in a manifest is there, and of its type."""

    def has(entry: Any, kinds: Mapping[str, type]) -> bool:
        return isinstance(entry, dict) and all(type(entry.get(k)) is t for k, t in kinds.items())

    return has(content, {"format": int, **dict.fromkeys(ENTRIES, dict)}) and all(
        has(entry, kinds) for part, kinds in ENTRIES.items() for entry in content[part].values()
    )


def _difference(out: Path, name: str, held: Any, given: Any) -> str:
    if name == "versions":
        held = held if isinstance(held, dict) else {}
        name = next(key for key in {**held, **given} if held.get(key) != given.get(key))
        held, given = held.get(name, "none"), given.get(name, "none")
    if name == "source":
        return f"{out} was made of other images or labels: write to another folder"
    phrase = WORDS.get(name, f"{name} {{}}")
    was, this = phrase.format(_words(held)), phrase.format(_words(given))
    return f"{out} was made with {was}, and this is {this}: write to another folder"


def _plain(values: Any) -> Any:
    """As JSON gives them back."""
    return json.loads(json.dumps(values))


def _words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value).strip("[]{}").replace('"', "")
