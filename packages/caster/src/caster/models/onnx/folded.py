"""Build an ONNX graph with constant maps at its sites, folded into convolutions where possible.

ONNX Runtime runs such a graph as fast as the model itself, because it can pack constant weights for
the processor. It cannot fold maps that are graph inputs into them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from caster.core.channels import Site
from caster.models.onnx.builder import LAST, GraphBuilder
from caster.models.onnx.graph import Head
from caster.models.onnx.graph_sites import OnnxSite

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnx import ModelProto

Map = tuple[NDArray[Any], NDArray[Any]]  # (c,) or (c, c), and (c,): scale x + shift, or A x + shift


def folded_model(
    model: ModelProto, head: Head, sites: Sequence[OnnxSite], maps: Mapping[Site, Map]
) -> ModelProto:
    """Build a graph that computes features and logits with these maps applied at the sites."""
    build = GraphBuilder(model, head)
    for site in sites:
        values = build.values[site.site.module]
        readers = tuple(values.uses())
        scale, shift = (np.asarray(part, np.float64) for part in maps[site.site])
        aligned = _in_convolution(build, values, scale, shift)
        if aligned is None:
            aligned = _mapped(build, site, values, scale, shift)
        for node, index in readers:
            node.replace_input_with(index, aligned)
        outputs = build.graph.outputs
        outputs[:] = [aligned if each is values else each for each in outputs]
    return build.pruned()


def _mapped(
    build: GraphBuilder, site: OnnxSite, values: ir.Value, scale: NDArray[Any], shift: NDArray[Any]
) -> ir.Value:
    """Map the activations of a site with separate nodes."""
    op, first, x = build.op, site.site.axis == 1, build.as_float(values)
    wide, prefix = x is not values, site.site.prefix_tokens
    if prefix:
        x = op("Slice", x, build.ints(prefix), build.ints(LAST), build.ints(1))
    ones = [1] * (site.rank - 2 if first else 0)
    offset = build.constant(shift.astype(np.float32).reshape(-1, *ones))
    if scale.ndim == 1:  # the runtime fuses these with a preceding convolution
        mapped = op("Mul", x, build.constant(scale.astype(np.float32).reshape(-1, *ones)))
        mapped = op("Add", mapped, offset)
    elif first:
        weight = build.constant(scale.astype(np.float32).reshape(*scale.shape, *ones))
        mapped = op("Conv", x, weight, build.constant(shift.astype(np.float32)))
    else:
        mapped = op("Add", op("MatMul", x, build.constant(scale.T.astype(np.float32))), offset)
    if wide and values.dtype is not None:
        mapped = op("CastLike", mapped, values)
    if prefix:
        front = op("Slice", values, build.ints(0), build.ints(prefix), build.ints(1))
        mapped = op("Concat", front, mapped, axis=1)
    return mapped


@dataclass(frozen=True, eq=False)
class Convolution:
    """The convolution that computes a site, optionally followed by a BatchNormalization.

    With z = W x + b and y = g z + h, A y + s is a convolution with weight A diag(g) W and bias
    A (g b + h) + s.
    """

    node: ir.Node
    weight: ir.Value
    W: NDArray[np.float32]  # the values of `weight`
    gain: NDArray[np.float64]  # (c,), g
    bias: NDArray[np.float64]  # (c,), g b + h

    @classmethod
    def behind(cls, values: ir.Value) -> Convolution | None:
        """Find the convolution with constant weights that computes these activations, if any."""
        node = values.producer()
        g, h = np.ones(1), np.zeros(1)
        if node is not None and node.op_type == "BatchNormalization":
            parts = _constants(node.inputs[1:])
            if parts is None:
                return None
            weight, bias, mean, variance = parts
            g = weight / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
            h = bias - g * mean
            inner = node.inputs[0]
            node = inner.producer() if inner is not None and len(inner.uses()) == 1 else None
        if node is None or node.op_type != "Conv":
            return None
        weight_of, parts = _constant(node.inputs[1]), _constants(node.inputs[2:])
        if weight_of is None or parts is None:
            return None
        b = parts[0] if parts else np.zeros(1)
        found = (np.broadcast_to(each, weight_of.shape[0]) for each in (g, g * b + h))
        return cls(node, cast("ir.Value", node.inputs[1]), weight_of, *found)

    @property
    def grouped(self) -> bool:
        """Whether the convolution has groups, so that its weight cannot absorb a full map."""
        return self.node.attributes.get_int("group", 1) > 1

    def with_weights(self, build: GraphBuilder, weight: ir.Value, bias: ir.Value) -> ir.Value:
        """Add the same convolution with another weight and bias; return its output."""
        attributes = {name: each.value for name, each in self.node.attributes.items()}
        inputs = cast("ir.Value", self.node.inputs[0]), weight, bias
        return build.op("Conv", *inputs, **attributes)


def _in_convolution(
    build: GraphBuilder, values: ir.Value, scale: NDArray[Any], shift: NDArray[Any]
) -> ir.Value | None:
    """Fold a map into the convolution that computes a site; None if that is not possible."""
    found = Convolution.behind(values)
    if found is None or (scale.ndim == 2 and found.grouped):
        return None
    W = found.W
    columns = found.gain.reshape(-1, 1) * W.reshape(len(W), -1)
    columns = scale[:, None] * columns if scale.ndim == 1 else scale @ columns
    b = (scale * found.bias if scale.ndim == 1 else scale @ found.bias) + shift
    parts = (build.constant(part.astype(np.float32)) for part in (columns.reshape(W.shape), b))
    return found.with_weights(build, *parts)


def _constants(values: Sequence[ir.Value | None]) -> list[NDArray[np.float64]] | None:
    """Read float32 initializers as float64; None if any value is something else."""
    found = [_constant(value) for value in values]
    return None if any(x is None for x in found) else [np.asarray(x, np.float64) for x in found]


def _constant(value: ir.Value | None) -> NDArray[np.float32] | None:
    """Read a float32 initializer; None if the value is something else."""
    import onnx_ir as ir

    tensor = None if value is None else value.const_value
    if tensor is None or isinstance(tensor, ir.ExternalTensor):
        return None
    return tensor.numpy() if tensor.dtype == ir.DataType.FLOAT else None
