"""Put existing ONNX graphs into one that is built with spox.

spox sees a placeholder node, and the graph takes its place when the rest is built: with its weights
as initializers of the (sub)graph around the node, where ONNX Runtime optimises them, and in the
operator set it was written for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from spox import inline

from caster.errors import CasterError
from caster.export.graph_arrays import GraphArray
from caster.models.onnx.graph import STANDARD, all_graphs, label_of

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto

OPSET = 18  # of what is built with spox, which later ones have unchanged
DOMAIN = "caster.embedded"  # of placeholders


def in_opset(model: ModelProto) -> ModelProto:
    """A model of standard operators only, converted if its operator set is older than `OPSET`."""
    from onnx import version_converter

    for graph in all_graphs(model.graph):
        for node in graph.node:
            if node.domain not in STANDARD:
                raise CasterError(
                    f"`{label_of(node)}` is a {node.domain} {node.op_type}: only standard "
                    "operators can be compiled"
                )
    version = standard_version(model)
    if version >= OPSET:
        return model
    try:
        return version_converter.convert_version(model, OPSET)
    except Exception as error:  # the converter's errors have no other common base
        raise CasterError(
            f"operator set {version} cannot be converted to {OPSET}, export it again: {error}"
        ) from None


def standard_version(model: ModelProto) -> int:
    """The version of the standard operators."""
    return int(next(each.version for each in model.opset_import if each.domain in STANDARD))


def call(name: str, model: ModelProto, *inputs: GraphArray) -> list[GraphArray]:
    """The outputs of a model that `embed` puts in place under this name."""
    from onnx import helper

    graph = model.graph
    node = helper.make_node(
        name, [v.name for v in graph.input], [v.name for v in graph.output], domain=DOMAIN
    )
    stub = helper.make_model(
        helper.make_graph([node], name, graph.input, graph.output),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)],
    )
    found = inline(stub)(*(each.var for each in inputs))
    return [GraphArray(var) for var in found.values()]


def embed(model: ModelProto, parts: Mapping[str, ModelProto]) -> None:
    """Replace the placeholders in a model by the graphs they are named after."""
    for graph in reversed(list(all_graphs(model.graph))):  # nodes that stay are copied with theirs
        nodes = list(graph.node)
        if not any(node.domain == DOMAIN for node in nodes):
            continue
        del graph.node[:]
        for node in nodes:
            if node.domain == DOMAIN:
                _put(graph, parts[node.op_type].graph, node.op_type, node.input, node.output)
            else:
                graph.node.append(node)
    version = max(standard_version(part) for part in parts.values())
    del model.opset_import[:]
    model.opset_import.add(domain="", version=max(OPSET, version))
    model.ir_version = max(model.ir_version, *(part.ir_version for part in parts.values()))


def _put(
    graph: GraphProto,
    part: GraphProto,
    name: str,
    inputs: list[str],
    outputs: list[str],
) -> None:
    """Append the nodes and weights of a part, under names of their own."""
    from onnx import helper

    own = _renamed(part, f"{name}/")
    for given, value in zip(inputs, own.input, strict=True):
        graph.node.append(helper.make_node("Identity", [given], [value.name]))
    graph.node.extend(own.node)
    graph.initializer.extend(own.initializer)
    stated = (each for each in own.value_info if each.type.tensor_type.HasField("shape"))
    graph.value_info.extend(stated)
    for value, wanted in zip(own.output, outputs, strict=True):
        graph.node.append(helper.make_node("Identity", [value.name], [wanted]))


def _renamed(graph: GraphProto, prefix: str) -> GraphProto:
    """A copy of a graph whose tensors and nodes have a prefix, in its branches and loops too.

    `onnx.compose` leaves names alone that a branch takes from the graph around it.
    """
    from onnx import GraphProto

    own = GraphProto()
    own.CopyFrom(graph)
    for each in all_graphs(own):
        for value in (*each.input, *each.output, *each.initializer, *each.value_info):
            value.name = prefix + value.name
        for node in each.node:
            node.name = node.name and prefix + node.name  # unnamed nodes stay so: names are unique
            for names in (node.input, node.output):
                names[:] = [name and prefix + name for name in names]
    return own
