"""An ONNX file and the files its weights are in: only ever read, and told by a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from caster.errors import CasterError
from caster.files import file_digest, read_regular
from caster.frozen.onnx.graph import nested

if TYPE_CHECKING:
    from onnx import ModelProto, StringStringEntryProto


def read_model(path: Path) -> ModelProto:
    """The model in a file; weights it keeps in other files stay there."""
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    damaged = CasterError(f"{path} is truncated, damaged or not an ONNX file")
    try:
        model = onnx.load_model_from_string(read_regular(path))
    except OSError as error:
        raise CasterError(f"cannot read {path}: {error.strerror}") from None
    except DecodeError:
        raise damaged from None
    if not model.graph.node or not model.opset_import:  # an empty file decodes, for one
        raise damaged
    return model


def external_files(model: ModelProto) -> tuple[str, ...]:
    """Files that hold weights of a model, by the names it has for them."""
    return tuple(sorted({location.value for location in _locations(model)}))


def follow_links(model: ModelProto, path: Path) -> Path:
    """Name the weights' files by what they are links to; the folder those names are relative to.

    Hugging Face's cache holds links to the model and to its weights, which lie in one folder
    elsewhere. ONNX Runtime follows no link out of the folder it is told of.
    """
    folder = path.resolve().parent
    real = {name: (path.parent / name).resolve() for name in external_files(model)}
    if not all(target.is_relative_to(folder) for target in real.values()):
        return path.parent
    for location in _locations(model):
        location.value = str(real[location.value].relative_to(folder))
    return folder


class Seal:
    """What a model's files held when it was opened, as a digest."""

    def __init__(
        self,
        path: Path,
        weights: tuple[str, ...],  # files beside it
        head: str | None,  # named by hand: another head makes another model
    ) -> None:
        self._path, self._weights, self._head = path, weights, head
        self.sha256 = self._digest()

    def verify(self) -> None:
        """Raise unless they hold it still."""
        found = self._digest()
        if found != self.sha256:
            raise CasterError(
                f"{self._path} or its weights changed since it was opened "
                f"(digest {found[:12]}…, not {self.sha256[:12]}…)"
            )

    def _digest(self) -> str:
        own = file_digest(self._path)
        weights = {name: file_digest(self._beside(name)) for name in self._weights}
        if not weights and self._head is None:
            return own  # as sha256sum tells it
        return hashlib.sha256(json.dumps([own, weights, self._head]).encode()).hexdigest()

    def _beside(self, name: str) -> Path:
        relative = Path(name)
        if relative.is_absolute() or ".." in relative.parts:
            raise CasterError(f"{self._path} keeps weights outside its own folder, in {name}")
        return self._path.parent / relative


def _locations(model: ModelProto) -> Iterator[StringStringEntryProto]:
    from onnx import TensorProto

    for graph in nested(model.graph):
        attributes = [attribute for node in graph.node for attribute in node.attribute]
        constants = [tensor for each in attributes for tensor in (each.t, *each.tensors)]
        for tensor in (*graph.initializer, *constants):
            if tensor.data_location == TensorProto.EXTERNAL:
                yield from (entry for entry in tensor.external_data if entry.key == "location")
