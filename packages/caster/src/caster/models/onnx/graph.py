"""An ONNX graph as a value: what depends on what, and what it hands out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

STANDARD = ("", "ai.onnx")  # two names of one set of operators


class Links:
    """Which node makes a tensor, and which tensors depend on what the graph is fed with."""

    def __init__(self, graph: GraphProto) -> None:
        self.nodes = list(graph.node)
        self.outputs = [output.name for output in graph.output]
        self.maker = {name: node for node in self.nodes for name in node.output if name}
        self.data = self.after(value.name for value in fed(graph))

    def after(self, tensors: Iterable[str]) -> set[str]:
        """These tensors and all that are computed from them."""
        reached = set(tensors)
        for node in self.nodes:  # makers come first: ONNX demands that order
            if not reached.isdisjoint(_read_by(node)):
                reached.update(name for name in node.output if name)  # "" is an output left out
        return reached

    def data_inputs(self, node: NodeProto) -> list[str]:
        """Inputs of a node that are no constants, in order."""
        return [name for name in node.input if name in self.data]


def fed(graph: GraphProto) -> list[ValueInfoProto]:
    """Inputs without a value of their own: old exporters list the weights as inputs, too."""
    known = initial_values(graph)
    return [value for value in graph.input if known[value.name] is None]


def initial_values(graph: GraphProto | FunctionProto) -> dict[str, TensorProto | None]:
    """Tensors that no node makes, by name: None for an input without a value of its own."""
    if not hasattr(graph, "initializer"):  # a function, whose inputs are mere names
        return dict.fromkeys(graph.input)
    inputs: dict[str, TensorProto | None] = {value.name: None for value in graph.input}
    sparse = {tensor.values.name: tensor.values for tensor in graph.sparse_initializer}
    return inputs | sparse | {tensor.name: tensor for tensor in graph.initializer}


def nested(graph: GraphProto | FunctionProto) -> Iterator[GraphProto | FunctionProto]:
    """A graph, and those inside its nodes."""
    yield graph
    for node in graph.node:
        for inner in inside(node):
            yield from nested(inner)


def inside(node: NodeProto) -> Iterator[GraphProto]:
    """Graphs that a node runs: branches of an If, the body of a Loop."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def expose(model: ModelProto, tensors: Iterable[str]) -> None:
    """Make these tensors the graph's outputs, in place of those it has."""
    del model.graph.output[:]
    for name in tensors:
        model.graph.output.add(name=name)  # the runtime infers type and shape


def widen(model: ModelProto) -> None:
    """Cast the graph's outputs to float32 inside the graph."""
    from onnx import TensorProto, helper

    narrow = [output.name for output in model.graph.output]
    wide = [f"caster/{name}" for name in narrow]
    for name, cast in zip(narrow, wide, strict=True):
        node = helper.make_node("Cast", [name], [cast], to=TensorProto.FLOAT)
        model.graph.node.append(node)
    expose(model, wide)


def kind_of(node: NodeProto) -> str:
    """The operator of a node, with its domain unless it is one of ONNX's own."""
    return node.op_type if node.domain in STANDARD else f"{node.domain}.{node.op_type}"


def title_of(node: NodeProto) -> str:
    """What to call a node by: a name is optional, an output is not."""
    return node.name or next(iter(node.output), "")


def listed(names: Iterable[str]) -> str:
    """The first few names, as a message shows them."""
    names = list(names)
    return ", ".join(f"`{name}`" for name in names[:8]) + (", …" if len(names) > 8 else "")


def _read_by(node: NodeProto) -> Iterator[str]:
    """Tensors a node reads, its branches and loop bodies included."""
    yield from node.input
    for graph in inside(node):
        for inner in graph.node:
            yield from _read_by(inner)
