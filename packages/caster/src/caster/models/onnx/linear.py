"""The classifier of an ONNX graph as one weight and one bias, folded from its constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError
from caster.models.onnx.graph import Links, expose, fed, kind_of, title_of, widen
from caster.models.onnx.head import AFFINE, LINEAR, PASSING, Head

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Step:
    """A node between features and logits, and which of its inputs are constants."""

    node: NodeProto
    first: bool  # whether its first input is the one that depends on the features
    constants: tuple[str, ...]


def affine_path(model: ModelProto, head: Head) -> list[Step]:
    """The nodes from features to logits, first to last: one matrix product, the rest by element.

    Anything else on the way is an error: features and logits are then not tied by a matrix.
    """
    links = Links(model.graph)
    path: list[Step] = []
    tensor = head.logits
    while tensor != head.features:
        node = links.maker.get(tensor)
        data = [] if node is None else links.data_inputs(node)
        if node is None or len(data) == 0 or not _is_affine(node, data):
            found = "the input" if node is None else f"{kind_of(node)} `{title_of(node)}`"
            raise CasterError(f"between features and logits is {found}: no linear classifier")
        others = tuple(name for name in node.input if name and name not in data)
        if kind_of(node) not in PASSING:  # where a constant is only a shape
            path.append(Step(node, node.input[0] == data[0], others))
        tensor = data[0]
    path.reverse()
    if [kind_of(step.node) in LINEAR for step in path].count(True) != 1:
        raise CasterError("features and logits are not one Gemm or MatMul apart")
    if kind_of(path[0].node) not in LINEAR:
        raise CasterError(f"{kind_of(path[0].node)} changes the features before the classifier")
    return path


def _is_affine(node: NodeProto, data: list[str]) -> bool:
    """Whether what a node makes is a matrix times, or numbers by element with, one input."""
    kind, first = kind_of(node), bool(node.input[0] == data[0])
    by_columns = any(attribute.name == "transA" and attribute.i for attribute in node.attribute)
    if kind in PASSING:  # a shape may be computed from the batch
        return first
    divides = kind == "Div" and not first
    product = kind in LINEAR and first and not by_columns
    return len(data) == 1 and (product or (kind in AFFINE and not divides))


def constants_of(path: list[Step]) -> list[str]:
    """Names of the constants the nodes of a path take."""
    return list(dict.fromkeys(name for step in path for name in step.constants))


def keep_constants(model: ModelProto, names: list[str]) -> None:
    """Cut a model down to what computes these constants, and have it hand them out in float32."""
    links = Links(model.graph)
    nodes = [node for node in model.graph.node if links.data.isdisjoint(node.output)]
    fed_names = {value.name for value in fed(model.graph)}
    known = [value for value in model.graph.input if value.name not in fed_names]
    del model.graph.node[:], model.graph.input[:]
    model.graph.node.extend(nodes)
    model.graph.input.extend(known)
    expose(model, names)
    widen(model)


def fold(
    path: list[Step], values: dict[str, NDArray[Any]]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:  # (n, d), (n,)
    """Weight and bias of a path, given its constants."""
    weight, bias = _product(path[0], values)
    for step in path[1:]:
        (number,) = (_by_class(values[name], len(bias)) for name in step.constants)
        kind = kind_of(step.node)
        if kind in ("Mul", "Div"):
            factor = number if kind == "Mul" else 1 / number
            weight, bias = weight * factor[:, None], bias * factor
        elif kind == "Add":
            bias = bias + number
        elif step.first:
            bias = bias - number
        else:  # the constant less the data
            weight, bias = -weight, number - bias
    return weight.astype(np.float32), bias.astype(np.float32)


def _product(step: Step, values: dict[str, NDArray[Any]]) -> tuple[Numbers, Numbers]:
    """Weight (n, d) and bias (n,) of a Gemm or MatMul."""
    settings = {a.name: a.f if a.name in ("alpha", "beta") else a.i for a in step.node.attribute}
    matrix, *rest = (values[name].astype(np.float64) for name in step.constants)
    if matrix.ndim != 2:
        raise CasterError(f"the weight of `{title_of(step.node)}` has {matrix.ndim} axes, not two")
    weight = settings.get("alpha", 1.0) * (matrix if settings.get("transB") else matrix.T)
    bias = _by_class(rest[0], len(weight)) if rest else np.zeros(len(weight))
    return weight, settings.get("beta", 1.0) * bias


def _by_class(number: NDArray[Any], n: int) -> Numbers:  # (n,)
    """A constant that is added or multiplied, as one number a class."""
    if number.size not in (1, n) or number.shape[-1:] not in ((), (1,), (n,)):
        raise CasterError(f"a constant of shape {number.shape} does not go with {n} logits")
    return np.broadcast_to(number.astype(np.float64).reshape(-1), n)
