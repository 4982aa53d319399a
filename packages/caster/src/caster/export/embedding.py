"""Embed existing ONNX graphs in a graph that is built with spox.

spox sees a placeholder node. Once it has built its graph, `embed` replaces the placeholder by the
existing graph in its own opset. The weights become initializers of the (sub)graph that contains the
placeholder, where ONNX Runtime can optimise them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from spox import inline

from caster.errors import CasterError
from caster.export.graph_arrays import GraphArray
from caster.models.onnx.graph import STANDARD, all_graphs, label_of
from caster.models.onnx.standard import OPSET

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto

DOMAIN = "caster.embedded"  # of placeholder nodes


def check_operators(model: ModelProto) -> None:
    """Raise if a model has operators that are not standard ones."""
    for graph in all_graphs(model.graph):
        for node in graph.node:
            if node.domain not in STANDARD:
                raise CasterError(
                    f"`{label_of(node)}` is a {node.domain} {node.op_type}: only standard "
                    "operators can be compiled"
                )


def call(name: str, model: ModelProto, *inputs: GraphArray) -> list[GraphArray]:
    """Add a placeholder for a model, which `embed` replaces; return its outputs."""
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
    """Replace the placeholders in a model by these graphs, by name."""
    for graph in reversed(list(all_graphs(model.graph))):  # innermost first, as nodes are copied
        nodes = list(graph.node)
        if not any(node.domain == DOMAIN for node in nodes):
            continue
        del graph.node[:]
        for node in nodes:
            if node.domain == DOMAIN:
                _put(graph, parts[node.op_type].graph, node.op_type, node.input, node.output)
            else:
                graph.node.append(node)
    used = (each for part in parts.values() for each in part.opset_import)
    version = max([OPSET, *(each.version for each in used if each.domain in STANDARD)])
    del model.opset_import[:]
    model.opset_import.add(domain="", version=version)
    model.ir_version = max(model.ir_version, *(part.ir_version for part in parts.values()))


def _put(
    graph: GraphProto, part: GraphProto, name: str, inputs: list[str], outputs: list[str]
) -> None:
    """Append the nodes and weights of a part, with prefixed names."""
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
    """Copy a graph with a prefix on the names of all tensors and nodes, also in subgraphs.

    `onnx.compose` does not rename what a subgraph reads from the enclosing graph.
    """
    from onnx import GraphProto

    own = GraphProto()
    own.CopyFrom(graph)
    for each in all_graphs(own):
        for value in (*each.input, *each.output, *each.initializer, *each.value_info):
            value.name = prefix + value.name
        for node in each.node:
            node.name = node.name and prefix + node.name  # names are unique, so "" stays ""
            for names in (node.input, node.output):
                names[:] = [name and prefix + name for name in names]
    return own
