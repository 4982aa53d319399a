"""Read an ONNX file and its external weights safely: bound to a digest, and of bounded size.

Files are never written. A cyclic or endless graph is rejected before anything traverses, loads or
runs it.
"""

from __future__ import annotations

import hashlib
import json
from collections import ChainMap
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from math import prod
from os.path import realpath
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from caster.errors import CasterError
from caster.io.files import file_digest, read_regular
from caster.models.onnx.graph import (
    STANDARD,
    all_graphs,
    described,
    initial_values,
    label_of,
    operator_of,
    subgraphs,
)

if TYPE_CHECKING:
    from onnx import (
        FunctionProto,
        GraphProto,
        ModelProto,
        NodeProto,
        StringStringEntryProto,
        TensorProto,
    )

MAX_DEPTH = 100  # nested function calls, as in the onnx package
MAX_NODES = 100_000  # with functions expanded; ONNX Runtime takes minutes to load more
MAX_STEPS = 10_000_000  # nodes run per batch, counting constant trip counts
ENDLESS = 2**63  # trip count of a Loop that has none
COPIES = ("Identity", "Cast")
FileContent = tuple["ModelProto", str]  # the model in an ONNX file, and the digest of the file


def read_model(
    path: Path,
    sha256: str | None = None,  # expected digest of the file; None to skip the check
) -> FileContent:
    """Read the model in a file, without its external weights, and the digest of the file."""
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
    except (DecodeError, RecursionError):  # RecursionError: protobuf in pure Python
        raise damaged from None
    if not model.graph.node or not model.opset_import:  # such as an empty file, which decodes
        raise damaged
    newest = onnx.defs.onnx_opset_version()
    opset = max((each.version for each in model.opset_import if each.domain in STANDARD), default=0)
    if opset > newest:
        advice = f"export it with {newest} or earlier"
        raise CasterError(f"{path} has opset {opset}, newer than onnx knows: {advice}")
    return model, found


class WeightGuard:
    """Detects changes to the files of a model since it was opened."""

    def __init__(
        self,
        path: Path,
        model: ModelProto,  # as read from `path`
        own: str,  # digest of the file itself
        head: str | None,  # named by the user; part of the identity of the model
    ) -> None:
        self._path, self._own, self._head = path, own, head
        self._weights = external_files(model)
        _weights_folder(path, {name: _resolved(path, name) for name in self._weights})
        self.sha256 = self._digest(own)

    def read(self) -> ModelProto:
        """Read the model again; raise if the file has changed."""
        return read_model(self._path, self._own)[0]

    @property
    def file_bytes(self) -> int:
        """Total size of the file and its external weights."""
        files = [self._path, *(_resolved(self._path, name) for name in self._weights)]
        return sum(file.stat().st_size for file in files)

    def verify(self) -> None:
        """Raise if any file has changed."""
        if self._digest(file_digest(self._path)) != self.sha256:
            raise _changed(self._path)

    def _digest(self, own: str) -> str:
        weights = {name: file_digest(_resolved(self._path, name)) for name in self._weights}
        if not weights and self._head is None:
            return own  # the same that sha256sum prints
        return hashlib.sha256(json.dumps([own, weights, self._head]).encode()).hexdigest()


def _changed(path: Path) -> CasterError:
    return CasterError(f"{path} or its weights changed since it was opened")


# --- external weights ----------------------------------------------------------------------------


def follow_links(model: ModelProto, path: Path) -> Path:
    """Replace the names of weight files by their link targets; return the folder of the targets.

    Hugging Face's cache stores links to the model and its weights, which share another folder. ONNX
    Runtime does not follow links that leave the folder it is given.
    """
    real = {name: _resolved(path, name) for name in external_files(model)}
    folder = _weights_folder(path, real)
    for location in _locations(model):
        location.value = str(real[location.value].relative_to(folder))
    return folder


def external_files(model: ModelProto) -> tuple[str, ...]:
    """List the external weight files of a model, as it names them."""
    return tuple(sorted({location.value for location in _locations(model)}))


def _locations(model: ModelProto) -> Iterator[StringStringEntryProto]:
    """Iterate over references to external files, in any tensor of a model."""
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
    """Resolve the name of a weight file, following all links."""
    relative = Path(name)
    if relative.is_absolute() or ".." in relative.parts or "\0" in name:
        raise _outside(path, name)
    return Path(realpath(path.parent / relative))


def _weights_folder(path: Path, real: dict[str, Path]) -> Path:
    """Find the folder that holds all weights: that of the model, or of the link to it."""
    folders = Path(realpath(path)).parent, Path(realpath(path.parent))
    for folder in folders:
        if all(target.is_relative_to(folder) for target in real.values()):
            break
    else:
        raise _outside(path, next(name for name in real if not real[name].is_relative_to(folder)))
    for name, target in real.items():
        if target.relative_to(folder).parts[:1] == ("*",):  # ONNX Runtime would read memory instead
            raise CasterError(f"{path} stores weights in {name!r}, which is not a file name")
    return folder


def _outside(path: Path, name: str) -> CasterError:
    return CasterError(f"{path} stores weights outside its own folder, in {name!r}")


# --- bounds --------------------------------------------------------------------------------------

Key = tuple[str, str, str]  # domain, name and overload of a function
Scope = ChainMap[str, "NodeProto | TensorProto | None"]  # by tensor: its producer, None for inputs


class Size(NamedTuple):
    """The size of a graph with its functions expanded."""

    nodes: int = 0
    steps: int = 0  # nodes run: those of a Loop count once per trip
    depth: int = 0  # of function calls


def check_model(model: ModelProto) -> None:
    """Reject a model that is cyclic, expands or runs without bound, or opens other files.

    A Loop counts as one trip if its trip count is computed or stored in an external file, or if its
    body computes when to stop.
    """
    functions = {_key(function): function for function in model.functions}
    if len(functions) < len(model.functions):
        raise CasterError("two of its functions have the same name")
    calls = {
        key: {_key(node) for graph in all_graphs(function) for node in graph.node}
        & functions.keys()
        for key, function in functions.items()
    }
    sizes: dict[Key, Size] = {}
    try:
        for key in TopologicalSorter(calls).static_order():
            sizes[key] = _size_of(functions[key], ChainMap(), sizes)
            if sizes[key].depth > MAX_DEPTH:
                raise CasterError(f"its functions call one another more than {MAX_DEPTH} deep")
    except CycleError:
        raise CasterError("its functions call one another in a cycle") from None
    expanded = _size_of(model.graph, ChainMap(), sizes).nodes
    if functions and expanded > MAX_NODES:
        raise CasterError(f"its functions expand to more than {MAX_NODES:,} nodes")


def _size_of(
    graph: GraphProto | FunctionProto,
    outer: Scope,  # tensors of the enclosing graphs
    functions: dict[Key, Size],
) -> Size:
    """Measure a graph; raise unless its nodes are sorted and every tensor has one producer."""
    scope: Scope = outer.new_child(initial_values(graph))
    nodes = steps = depth = 0
    for node in graph.node:
        _check_node(node, scope)
        parts = [_size_of(inner, scope, functions) for inner in subgraphs(node)]
        called = functions.get(_key(node))
        parts += [] if called is None else [called._replace(depth=called.depth + 1)]
        trips = _trips(node, scope)
        steps += 1 + trips * sum(part.steps for part in parts)
        nodes += 1 + sum(part.nodes for part in parts)
        depth = max([depth, *(part.depth for part in parts)])
        if steps > MAX_STEPS:
            often = "without end" if trips == ENDLESS else f"{trips:,} times"
            found = f"Loop `{label_of(node)}` runs {often}" if trips > 1 else "its functions expand"
            raise CasterError(f"{found}: caster runs at most {MAX_STEPS:,} nodes per batch")
        for name in filter(None, node.output):
            if name in scope:
                raise CasterError(f"more than one node or value is named `{name}`")
            scope[name] = node
    return Size(nodes, steps, depth)


def _check_node(node: NodeProto, scope: Scope) -> None:
    for name in node.input:
        if name and name not in scope:
            raise CasterError(
                f"{described(node)} reads `{name}`, which no earlier node produces: the graph is "
                "cyclic, not sorted or incomplete"
            )
    if node.op_type == "EPContext" and any(
        attribute.name == "embed_mode" and not attribute.i for attribute in node.attribute
    ):
        raise CasterError(
            f"EPContext `{label_of(node)}` runs a compiled model from another file: export "
            "with embed_mode 1"
        )


def _trips(node: NodeProto, scope: Scope) -> int:
    """The trip count of a Loop; 1 if it is computed, and for every other node."""
    bodies = [attribute.g for attribute in node.attribute if attribute.name == "body"]
    if operator_of(node) != "Loop" or not bodies or not bodies[0].output:
        return 1
    (body,) = bodies
    producers = {name: each for each in body.node for name in each.output}
    inner: Scope = scope.new_child(initial_values(body) | producers)
    condition = _origin(body.output[0].name, inner)
    unchanged = condition in [value.name for value in body.input[1:2]]
    if not unchanged and not _scalar(condition, inner):
        return 1
    if not node.input or not node.input[0]:
        return ENDLESS
    return max(_scalar(node.input[0], scope) or 1, 1)


def _origin(name: str, scope: Scope) -> str:
    """Trace a tensor back through nodes that only copy it."""
    from onnx import NodeProto

    while (
        isinstance(producer := scope.get(name), NodeProto)
        and operator_of(producer) in COPIES
        and len(producer.input) == 1
    ):
        name = producer.input[0]
    return name


def _scalar(name: str, scope: Scope) -> int | None:
    """Read a constant scalar; None if a tensor is computed, external or not a scalar."""
    from onnx import NodeProto, TensorProto, numpy_helper

    source = scope.get(_origin(name, scope))
    if isinstance(source, NodeProto):
        values = {attribute.name: attribute for attribute in source.attribute}
        if operator_of(source) != "Constant" or len(values) != 1:
            return None
        if "value_int" in values:
            return int(values["value_int"].i)
        if "value_ints" in values:
            numbers = values["value_ints"].ints
            return int(numbers[0]) if len(numbers) == 1 else None
        source = values["value"].t if "value" in values else None
    whole = (TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64)
    if source is None or source.data_type not in whole or prod(source.dims) != 1:
        return None
    if source.data_location == TensorProto.EXTERNAL:
        return None
    try:
        return int(numpy_helper.to_array(source).item())
    except ValueError:  # damaged, which the runtime reports
        return None


def _key(value: FunctionProto | NodeProto) -> Key:
    name = value.op_type if hasattr(value, "op_type") else value.name
    domain = "" if value.domain in STANDARD else value.domain
    return domain, name, getattr(value, "overload", "")  # since onnx 1.16
