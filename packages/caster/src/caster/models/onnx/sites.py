"""Find the sites of an ONNX graph: where its layers can be measured and aligned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from caster.core.channels import Site
from caster.errors import CasterError
from caster.models.onnx.graph import Dataflow, Head, label_of, operator_of

if TYPE_CHECKING:
    from onnx import ModelProto


@dataclass(frozen=True)
class OnnxSite:
    """A tensor of a graph where a network's values are transported."""

    site: Site  # its module is the name of the tensor
    width: int  # number of channels
    rank: int  # number of axes
    node: str  # that computes the tensor


def standardised(model: ModelProto, head: Head) -> ModelProto:
    from onnx import shape_inference

    return shape_inference.infer_shapes(model, data_prop=True)


def find_onnx_sites(model: ModelProto, head: Head) -> list[OnnxSite]:
    """Find every site of a graph, in topological order."""
    inferred = standardised(model, head).graph
    flow = Dataflow(inferred)
    shapes = {
        value.name: [size.dim_value or None for size in value.type.tensor_type.shape.dim]
        for value in (*inferred.value_info, *inferred.input, *inferred.output)
    }
    kinds = {node.op_type for node in flow.nodes}
    first = "BatchNormalization" if "BatchNormalization" in kinds else "Conv"
    sites = []
    for node in flow.nodes:
        if operator_of(node) == first:
            shape = shapes[node.output[0]]
            site = Site(node.output[0], "out", 1)
            sites.append(OnnxSite(site, shape[1], len(shape), label_of(node)))
    return sites
