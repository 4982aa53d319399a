"""Analyse an ONNX graph: its dataflow, its classifier layer, and the weights of that layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError, first_few

if TYPE_CHECKING:
    from onnx import (
        FunctionProto,
        GraphProto,
        ModelProto,
        NodeProto,
        TensorProto,
        TypeProto,
        ValueInfoProto,
    )

STANDARD = ("", "ai.onnx")  # domains of the standard operators
LINEAR = {"Gemm", "MatMul"}
SOFTMAX = {"Softmax", "LogSoftmax"}
AFFINE = {"Add", "Sub", "Mul", "Div"}  # with a constant: a bias or a temperature
PASS_THROUGH = {"Identity", "Cast", "Dropout", "Reshape", "Flatten", "Squeeze", "Unsqueeze"}
QUANTISING = {"QuantizeLinear", "DequantizeLinear"}
QUANTISED = {
    *("MatMulInteger", "QLinearMatMul", "QGemm", "DynamicQuantizeMatMul"),
    *("MatMulIntegerToFloat", "MatMulNBits", "MatMulBnb4"),
}
MAX_CANDIDATES = 20  # layers tried for a suggestion, each at the cost of a walk through the graph
NAME_IT = "name the layer whose input is the features with {argument}"

# --- dataflow ------------------------------------------------------------------------------------


class Dataflow:
    """The producers of all tensors, and the tensors that depend on the graph input."""

    def __init__(self, graph: GraphProto) -> None:
        self.nodes = list(graph.node)
        self.outputs = [output.name for output in graph.output]
        self.producer = {name: node for node in self.nodes for name in node.output if name}
        self.dynamic = self.downstream(value.name for value in runtime_inputs(graph))

    def downstream(self, tensors: Iterable[str]) -> set[str]:
        """Collect these tensors and all that are computed from them."""
        reached = set(tensors)
        for node in self.nodes:  # ONNX requires topological order
            if not reached.isdisjoint(_read_by(node)):
                reached.update(name for name in node.output if name)  # "" is an omitted output
        return reached

    def from_sizes(self) -> list[str]:
        """List tensors that depend only on the input's sizes, and that other nodes read."""
        found: set[str] = set()
        for node in self.nodes:
            inputs = self.dynamic.intersection(_read_by(node))
            if inputs and (node.op_type in ("Shape", "Size") or inputs <= found):
                found.update(node.output)
        others = (node for node in self.nodes if not found.issuperset(node.output))
        return sorted(found.intersection(name for node in others for name in _read_by(node)))

    def data_inputs(self, node: NodeProto) -> list[str]:
        """List the inputs of a node that are not constants."""
        return [name for name in node.input if name in self.dynamic]


def _read_by(node: NodeProto) -> Iterator[str]:
    """Iterate over the tensors that a node and its subgraphs read."""
    yield from node.input
    for graph in subgraphs(node):
        for inner in graph.node:
            yield from _read_by(inner)


def runtime_inputs(graph: GraphProto) -> list[ValueInfoProto]:
    """List the inputs without an initializer; old exporters list the weights as inputs too."""
    known = initial_values(graph)
    return [value for value in graph.input if known[value.name] is None]


def initial_values(graph: GraphProto | FunctionProto) -> dict[str, TensorProto | None]:
    """Map inputs and initializers to their values; None for an input without an initializer."""
    if not hasattr(graph, "initializer"):  # a function has names as inputs and no initializers
        return dict.fromkeys(graph.input)
    inputs: dict[str, TensorProto | None] = {value.name: None for value in graph.input}
    sparse = {tensor.values.name: tensor.values for tensor in graph.sparse_initializer}
    return inputs | sparse | {tensor.name: tensor for tensor in graph.initializer}


def all_graphs(graph: GraphProto | FunctionProto) -> Iterator[GraphProto | FunctionProto]:
    """Iterate over a graph and all its subgraphs, at any depth."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from all_graphs(inner)


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """Iterate over the subgraphs of a node: branches of an If, the body of a Loop."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def set_outputs(model: ModelProto, tensors: Iterable[str]) -> None:
    """Replace the graph's outputs by these tensors."""
    del model.graph.output[:]
    for name in tensors:
        model.graph.output.add(name=name)  # the runtime infers type and shape


def cast_outputs(model: ModelProto) -> None:
    """Cast the graph's outputs to float32 inside the graph."""
    from onnx import TensorProto, helper

    names = [output.name for output in model.graph.output]
    for name in names:
        node = helper.make_node("Cast", [name], [f"caster/{name}"], to=TensorProto.FLOAT)
        model.graph.node.append(node)
    set_outputs(model, [f"caster/{name}" for name in names])


def set_row_outputs(model: ModelProto, widths: dict[str, int | None]) -> None:
    """Replace the graph's outputs by these tensors, flattened to float32 rows of these widths."""
    from onnx import TensorProto, helper

    del model.graph.output[:]
    for tensor, width in widths.items():
        flat, rows = f"caster/{tensor}/flat", f"caster/{tensor}/rows"
        model.graph.node.append(helper.make_node("Flatten", [tensor], [flat]))
        model.graph.node.append(helper.make_node("Cast", [flat], [rows], to=TensorProto.FLOAT))
        rows_of = helper.make_tensor_value_info(rows, TensorProto.FLOAT, [None, width])
        model.graph.output.append(rows_of)


def operator_of(node: NodeProto) -> str:
    """Name the operator of a node, with its domain unless that is the standard one."""
    return node.op_type if node.domain in STANDARD else f"{node.domain}.{node.op_type}"


def label_of(node: NodeProto) -> str:
    """Name a node in a message: by its name or, as that is optional, its first output."""
    return node.name or next(iter(node.output), "")


def described(node: NodeProto) -> str:
    """Describe a node in a message: its operator and its name."""
    return f"{operator_of(node)} `{label_of(node)}`"


def listed(names: Iterable[str]) -> str:
    """List the first few names for a message."""
    return first_few((f"`{name}`" for name in names), 8)


# --- the classifier layer ------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """Names of the tensors that hold the features and the logits."""

    features: str
    logits: str


def find_head(model: ModelProto, name: str | None) -> Head:
    """Find features and logits, from the only output or from a name that the user gave.

    An output is traced back to the linear layer that computes it. Any other name is that of a node,
    or of a tensor that stands for its producer. That node is the head, whatever it computes: its
    first non-constant input is the features, and the only output that depends on it is the logits.
    """
    flow = Dataflow(model.graph)
    if name is None:
        if len(flow.outputs) != 1:
            outputs = listed(flow.outputs) or "none"
            message = f"name the output that holds the logits with {{argument}}: {outputs}"
            raise CasterError(message, argument="head")
        name = flow.outputs[0]
    if name not in flow.outputs:
        return _named_head(flow, name)
    logits, node = _trace_back(flow, name)
    if node is not None and _is_linear(flow, node):
        return Head(node.input[0], logits)
    raise CasterError(_no_linear_layer(model, flow, name, node), argument="head")


def _trace_back(flow: Dataflow, output: str) -> tuple[str, NodeProto | None]:
    """Trace an output back to the logits, and to the node that computes them."""
    logits = tensor = output
    while (node := flow.producer.get(tensor)) is not None:
        kind, data = operator_of(node), flow.data_inputs(node)
        step = kind in PASS_THROUGH | QUANTISING | SOFTMAX or (kind in AFFINE and len(data) == 1)
        if not step or not data:
            break
        tensor = data[0]
        # The integers from a final QuantizeLinear are not logits. If a DequantizeLinear follows,
        # its output is the logits.
        if kind in SOFTMAX or (kind == "QuantizeLinear" and logits in node.output):
            logits = tensor
    return logits, node


def _is_linear(flow: Dataflow, node: NodeProto) -> bool:
    """Whether a node multiplies rows of data by a constant matrix, unlike attention."""
    data_first = flow.data_inputs(node) == list(node.input[:1])
    return operator_of(node) in LINEAR and data_first and not _transposes_data(node)


def _transposes_data(node: NodeProto) -> bool:
    return any(attribute.name == "transA" and attribute.i for attribute in node.attribute)


def _named_head(flow: Dataflow, name: str) -> Head:
    """Find the head at a node or tensor that the user named."""
    nodes = [node for node in flow.nodes if name and node.name == name]
    nodes = nodes or [node for node in flow.nodes if name and name in node.output]
    if len(nodes) != 1:
        found = f"{len(nodes)} nodes are" if nodes else "no output, node or tensor is"
        raise CasterError(f"{found} named {name!r}; the outputs are {listed(flow.outputs)}")
    data = flow.data_inputs(nodes[0])
    if not data:
        raise CasterError(f"{name!r} does not depend on the input: {NAME_IT}", argument="head")
    after = flow.downstream(output for output in nodes[0].output if output)
    logits = {_trace_back(flow, output)[0] for output in flow.outputs if output in after}
    if len(logits) > 1:
        several = listed(sorted(logits))
        message = f"{several} all come from {name!r}: {{argument}} must name the logits"
        raise CasterError(message, argument="head")
    if not logits or not logits <= after:
        raise CasterError(f"{name!r} does not lead to the logits: {NAME_IT}", argument="head")
    return Head(data[0], logits.pop())


def _no_linear_layer(model: ModelProto, flow: Dataflow, output: str, last: NodeProto | None) -> str:
    """Explain why an output has no linear head, and suggest layers to name instead."""
    candidates = _candidates(model, flow)
    advice = f"{NAME_IT}, such as {listed(candidates)}"
    products = [node.op_type for node in flow.nodes if node.op_type in LINEAR | QUANTISED]
    if products and products[-1] in QUANTISED:
        advice = advice if candidates else "quantise it to the QDQ format, which keeps floats"
        return f"the last layer is quantised ({products[-1]}), but floats are needed: {advice}"
    found = "no node" if last is None else described(last)
    advice = advice if candidates else "no layer takes one row of floats per image"
    return f"`{output}` comes from {found}, not from a Gemm or MatMul with constants: {advice}"


def _candidates(model: ModelProto, flow: Dataflow) -> list[str]:
    """Suggest up to three layers that the user could name, the nearest to the output first."""
    from onnx import checker, shape_inference

    try:
        graph = shape_inference.infer_shapes(model).graph
    # The graph is damaged or too large.
    except (shape_inference.InferenceError, checker.ValidationError, ValueError):
        graph = model.graph
    values = (*graph.value_info, *graph.output, *graph.input)
    rows = {value.name for value in values if _holds_rows(value.type.tensor_type)}
    layers = [
        node
        for node in reversed(flow.nodes)
        if operator_of(node) not in PASS_THROUGH | AFFINE | SOFTMAX | {"DequantizeLinear"}
        and not rows.isdisjoint(flow.data_inputs(node)[:1])
    ]
    found: list[str] = []
    for node in layers[:MAX_CANDIDATES]:
        with suppress(CasterError):  # suggest only names that work
            _named_head(flow, label_of(node))
            found.append(label_of(node))
    return found[:3]


def _holds_rows(tensor: TypeProto.Tensor) -> bool:
    """Whether a tensor is (B, d) of floats, up to trailing axes of length 1."""
    from onnx import TensorProto

    floats = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)
    sizes = [size.dim_value for size in tensor.shape.dim]
    return tensor.elem_type in floats and len(sizes) > 1 and set(sizes[2:]) <= {1}


# --- weights of the classifier layer, folded into one matrix and one bias ------------------------


@dataclass(frozen=True)
class Step:
    """A node between features and logits, with its constant inputs."""

    node: NodeProto
    data_first: bool  # whether its first input depends on the features
    constants: tuple[str, ...]


def affine_path(model: ModelProto, head: Head) -> list[Step]:
    """List the nodes from features to logits: one matrix product, then elementwise constants.

    Raises if there is any other node, since then the classifier is not linear.
    """
    flow = Dataflow(model.graph)
    path: list[Step] = []
    tensor = head.logits
    while tensor != head.features:
        node = flow.producer.get(tensor)
        data = [] if node is None else flow.data_inputs(node)
        if node is None or len(data) == 0 or not _is_affine(node, data):
            found = "the input" if node is None else described(node)
            raise CasterError(f"{found} is between features and logits: not a linear classifier")
        others = tuple(name for name in node.input if name and name not in data)
        if operator_of(node) not in PASS_THROUGH:  # the constants of those are shapes
            path.append(Step(node, node.input[0] == data[0], others))
        tensor = data[0]
    path.reverse()
    if [operator_of(step.node) in LINEAR for step in path].count(True) != 1:
        raise CasterError("features and logits are not one Gemm or MatMul apart")
    if operator_of(path[0].node) not in LINEAR:
        raise CasterError(f"{operator_of(path[0].node)} changes the features before the classifier")
    return path


def _is_affine(node: NodeProto, data: list[str]) -> bool:
    """Whether a node is affine in its only data input."""
    kind, data_first = operator_of(node), bool(node.input[0] == data[0])
    if kind in PASS_THROUGH:  # a shape may be computed from the batch
        return data_first
    divides = kind == "Div" and not data_first
    product = kind in LINEAR and data_first and not _transposes_data(node)
    return len(data) == 1 and (product or (kind in AFFINE and not divides))


def constants_of(path: list[Step]) -> list[str]:
    """List the constants that a path uses."""
    return list(dict.fromkeys(name for step in path for name in step.constants))


def keep_constants(model: ModelProto, names: list[str]) -> None:
    """Prune a model to the nodes that compute these constants, and output them in float32."""
    flow = Dataflow(model.graph)
    nodes = [node for node in model.graph.node if flow.dynamic.isdisjoint(node.output)]
    dropped = {value.name for value in runtime_inputs(model.graph)}
    inputs = [value for value in model.graph.input if value.name not in dropped]
    del model.graph.node[:], model.graph.input[:]
    model.graph.node.extend(nodes)
    model.graph.input.extend(inputs)
    set_outputs(model, names)
    cast_outputs(model)


Numbers = NDArray[np.float64]


def fold(
    path: list[Step], values: dict[str, NDArray[Any]]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:  # (n, d), (n,)
    """Fold a path into one weight and bias, given the values of its constants."""
    weight, bias = _product(path[0], values)
    for step in path[1:]:
        (number,) = (_per_class(values[name], len(bias)) for name in step.constants)
        kind = operator_of(step.node)
        if kind in ("Mul", "Div"):
            factor = number if kind == "Mul" else 1 / number
            weight, bias = weight * factor[:, None], bias * factor
        elif kind == "Add":
            bias = bias + number
        elif step.data_first:
            bias = bias - number
        else:  # constant minus data
            weight, bias = -weight, number - bias
    return weight.astype(np.float32), bias.astype(np.float32)


def _product(step: Step, values: dict[str, NDArray[Any]]) -> tuple[Numbers, Numbers]:
    """Weight (n, d) and bias (n,) of a Gemm or MatMul."""
    settings = {a.name: a.f if a.name in ("alpha", "beta") else a.i for a in step.node.attribute}
    matrix, *rest = (values[name].astype(np.float64) for name in step.constants)
    if matrix.ndim != 2:
        raise CasterError(f"the weight of `{label_of(step.node)}` has {matrix.ndim} axes, not two")
    weight = settings.get("alpha", 1.0) * (matrix if settings.get("transB") else matrix.T)
    bias = _per_class(rest[0], len(weight)) if rest else np.zeros(len(weight))
    return weight, settings.get("beta", 1.0) * bias


def _per_class(number: NDArray[Any], n: int) -> Numbers:  # (n,)
    """Broadcast an elementwise constant to one number per class."""
    if number.size not in (1, n) or number.shape[-1:] not in ((), (1,), (n,)):
        raise CasterError(f"a constant of shape {number.shape} does not fit {n} logits")
    return np.broadcast_to(number.astype(np.float64).reshape(-1), n)
