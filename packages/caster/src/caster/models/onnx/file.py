"""An ONNX file and the files its weights are in: only ever read, and bound by a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from os.path import realpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caster.errors import CasterError
from caster.io.files import file_digest, read_regular

if TYPE_CHECKING:
    from onnx import ModelProto, StringStringEntryProto


def read_model(
    path: Path,
    sha256: str | None = None,  # what the file must hold; None for anything
) -> tuple[ModelProto, str]:
    """The model in a file, without its external weights, and the digest of the bytes read."""
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    damaged = CasterError(f"{path} is truncated, damaged or not an ONNX file, or nested too deeply")
    try:
        content = read_regular(path)
    except OSError as error:
        raise CasterError(f"cannot read {path}: {error.strerror}") from None
    found = hashlib.sha256(content).hexdigest()
    if sha256 not in (None, found):
        raise _changed(path)
    try:
        model = onnx.load_model_from_string(content)
    except (DecodeError, RecursionError):  # the latter of protobuf in pure Python
        raise damaged from None
    if not model.graph.node or not model.opset_import:  # an empty file decodes, for one
        raise damaged
    return model, found


def follow_links(model: ModelProto, path: Path) -> Path:
    """Name the weights' files by what they are links to; the folder those names are relative to.

    Hugging Face's cache holds links to the model and to its weights, which lie in one folder
    elsewhere. ONNX Runtime follows no link out of the folder it is told of.
    """
    real = {name: _resolved(path, name) for name in _external_files(model)}
    folder = _folder(path, real)
    for location in _locations(model):
        location.value = str(real[location.value].relative_to(folder))
    return folder


class WeightGuard:
    """What a model's files held when it was opened, as a digest."""

    def __init__(
        self,
        path: Path,
        model: ModelProto,  # as read from there
        own: str,  # digest of the file itself
        head: str | None,  # named by hand: another head makes another model
    ) -> None:
        self._path, self._own, self._head = path, own, head
        self._weights = _external_files(model)
        _folder(path, {name: _resolved(path, name) for name in self._weights})
        self.sha256 = self._digest(own)

    def read(self) -> ModelProto:
        """The model, from bytes whose digest is that of the file when it was opened."""
        return read_model(self._path, self._own)[0]

    def verify(self) -> None:
        """Raise unless every file holds what it held."""
        if self._digest(file_digest(self._path)) != self.sha256:
            raise _changed(self._path)

    def _digest(self, own: str) -> str:
        weights = {name: file_digest(_resolved(self._path, name)) for name in self._weights}
        if not weights and self._head is None:
            return own  # as sha256sum tells it
        return hashlib.sha256(json.dumps([own, weights, self._head]).encode()).hexdigest()


def _changed(path: Path) -> CasterError:
    return CasterError(f"{path} or its weights changed since it was opened")


def _external_files(model: ModelProto) -> tuple[str, ...]:
    """Files that hold weights of a model, by the names it has for them."""
    return tuple(sorted({location.value for location in _locations(model)}))


def _locations(model: ModelProto) -> Iterator[StringStringEntryProto]:
    """Names of other files, in whatever field of a model there is a tensor."""
    from onnx import TensorProto

    pending: list[Any] = [model]
    while pending:
        message = pending.pop()
        if isinstance(message, TensorProto):
            if message.data_location == TensorProto.EXTERNAL:
                yield from (entry for entry in message.external_data if entry.key == "location")
            continue
        for field, value in message.ListFields():
            if field.message_type is not None:
                pending.extend([value] if hasattr(value, "ListFields") else value)


def _resolved(path: Path, name: str) -> Path:
    """The file that a model calls by this name, every link followed."""
    relative = Path(name)
    if relative.is_absolute() or ".." in relative.parts or "\0" in name:
        raise _outside(path, name)
    return Path(realpath(path.parent / relative))


def _folder(path: Path, real: dict[str, Path]) -> Path:
    """The folder all weights are in: that of the model, or of the link to it."""
    folders = Path(realpath(path)).parent, Path(realpath(path.parent))
    for folder in folders:
        if all(target.is_relative_to(folder) for target in real.values()):
            break
    else:
        raise _outside(path, next(name for name in real if not real[name].is_relative_to(folder)))
    for name, target in real.items():
        if target.relative_to(folder).parts[:1] == ("*",):  # ONNX Runtime's mark of an address
            raise CasterError(f"{path} keeps weights in {name!r}, which is no name of a file")
    return folder


def _outside(path: Path, name: str) -> CasterError:
    return CasterError(f"{path} keeps weights outside its own folder, in {name!r}")
