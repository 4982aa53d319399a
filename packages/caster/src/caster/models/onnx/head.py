"""The classifier layer of an ONNX graph: found on the way back from an output, or named."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from caster.errors import CasterError
from caster.models.onnx.graph import Links, kind_of, listed, title_of

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TypeProto

LINEAR = {"Gemm", "MatMul"}
SOFTMAX = {"Softmax", "LogSoftmax"}
AFFINE = {"Add", "Sub", "Mul", "Div"}  # by a constant: a bias, a temperature
PASSING = {"Identity", "Cast", "Dropout", "Reshape", "Flatten", "Squeeze", "Unsqueeze"}
QUANTISING = {"QuantizeLinear", "DequantizeLinear"}
QUANTISED = {
    *("MatMulInteger", "QLinearMatMul", "QGemm", "DynamicQuantizeMatMul"),
    *("MatMulIntegerToFloat", "MatMulNBits", "MatMulBnb4"),
}
MOST_LOOKED_AT = 20  # layers, for a suggestion: each takes a walk through the whole graph
NAME_IT = "name the layer whose input is the features with {argument}"


@dataclass(frozen=True)
class Head:
    """Names of the two tensors a frozen model hands out."""

    features: str
    logits: str


def find_head(model: ModelProto, name: str | None) -> Head:
    """Features and logits, from the only output or from what a person named.

    An output is followed back to the linear layer behind it. A node, or a tensor in place of the
    node that makes it, is the head itself, whatever it computes: its first input that is no
    constant is the features, and the one output that depends on it the logits.
    """
    links = Links(model.graph)
    if name is None:
        if len(links.outputs) != 1:
            outputs = listed(links.outputs) or "none"
            message = f"say with {{argument}} which output holds the logits: {outputs}"
            raise CasterError(message, argument="head")
        name = links.outputs[0]
    if name not in links.outputs:
        return _named(links, name)
    logits, node = _behind(links, name)
    if node is not None and _is_linear(links, node):
        return Head(node.input[0], logits)
    raise CasterError(_no_linear_layer(model, links, name, node), argument="head")


def _behind(links: Links, output: str) -> tuple[str, NodeProto | None]:
    """The logits behind an output, and the node on the way back that makes them what they are."""
    logits = tensor = output
    while (node := links.maker.get(tensor)) is not None:
        kind, data = kind_of(node), links.data_inputs(node)
        step = kind in PASSING | QUANTISING | SOFTMAX or (kind in AFFINE and len(data) == 1)
        if not step or not data:
            break
        tensor = data[0]
        # codes of a last QuantizeLinear are no logits; with a DequantizeLinear after it, what
        # comes out of the pair is the model's answer
        if kind in SOFTMAX or (kind == "QuantizeLinear" and logits in node.output):
            logits = tensor
    return logits, node


def _is_linear(links: Links, node: NodeProto) -> bool:
    """Rows of data by a constant matrix: not attention, nor a matrix by columns of data."""
    by_columns = any(attribute.name == "transA" and attribute.i for attribute in node.attribute)
    only_the_first = links.data_inputs(node) == list(node.input[:1])
    return kind_of(node) in LINEAR and only_the_first and not by_columns


def _named(links: Links, name: str) -> Head:
    """The head that a person named."""
    nodes = [node for node in links.nodes if name and node.name == name]
    nodes = nodes or [node for node in links.nodes if name and name in node.output]
    if len(nodes) != 1:
        found = f"{len(nodes)} nodes are" if nodes else "no output, node or tensor is"
        raise CasterError(f"{found} named {name!r}; the outputs are {listed(links.outputs)}")
    data = links.data_inputs(nodes[0])
    if not data:
        raise CasterError(f"{name!r} does not depend on the input: {NAME_IT}", argument="head")
    after = links.after(output for output in nodes[0].output if output)
    logits = {_behind(links, output)[0] for output in links.outputs if output in after}
    if len(logits) > 1:
        several = listed(sorted(logits))
        message = f"{several} all come from {name!r}: {{argument}} must name the logits"
        raise CasterError(message, argument="head")
    if not logits or not logits <= after:
        raise CasterError(f"{name!r} does not lead to the logits: {NAME_IT}", argument="head")
    return Head(data[0], logits.pop())


def _no_linear_layer(model: ModelProto, links: Links, output: str, last: NodeProto | None) -> str:
    """Why an output has no head, and which layers might do."""
    candidates = _candidates(model, links)
    advice = f"{NAME_IT}, such as {listed(candidates)}"
    products = [node.op_type for node in links.nodes if node.op_type in LINEAR | QUANTISED]
    if products and products[-1] in QUANTISED:
        advice = advice if candidates else "quantise it to the QDQ format, which keeps floats"
        return f"the last layer is quantised ({products[-1]}), its float input is needed: {advice}"
    found = f"{kind_of(last)} `{title_of(last)}`" if last is not None else "no node"
    advice = advice if candidates else "none of its layers takes a row of floats an image"
    return f"`{output}` comes from {found}, not from a Gemm or MatMul with constants: {advice}"


def _candidates(model: ModelProto, links: Links) -> list[str]:
    """Up to three layers that could be named by hand, those nearest to the output first."""
    from onnx import checker, shape_inference

    try:
        graph = shape_inference.infer_shapes(model).graph
    # the graph is damaged or too large
    except (shape_inference.InferenceError, checker.ValidationError, ValueError):
        graph = model.graph
    values = (*graph.value_info, *graph.output, *graph.input)
    rows = {value.name for value in values if _holds_rows(value.type.tensor_type)}
    layers = [
        node
        for node in reversed(links.nodes)
        if kind_of(node) not in PASSING | AFFINE | SOFTMAX | {"DequantizeLinear"}
        and not rows.isdisjoint(links.data_inputs(node)[:1])
    ]
    found: list[str] = []
    for node in layers[:MOST_LOOKED_AT]:
        with suppress(CasterError):  # only names that would do
            _named(links, title_of(node))
            found.append(title_of(node))
    return found[:3]


def _holds_rows(tensor: TypeProto.Tensor) -> bool:
    """Whether a tensor is (B, d) of floats, but for axes of 1 behind."""
    from onnx import TensorProto

    floats = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)
    sizes = [size.dim_value for size in tensor.shape.dim]
    return tensor.elem_type in floats and len(sizes) > 1 and set(sizes[2:]) <= {1}
