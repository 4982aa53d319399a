"""Checks of an ONNX model before anything walks or runs it: its order, its size, what it opens."""

from __future__ import annotations

from collections import ChainMap
from graphlib import CycleError, TopologicalSorter
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from caster.errors import CasterError
from caster.models.onnx.graph import STANDARD, initial_values, inside, kind_of, nested, title_of

if TYPE_CHECKING:
    from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

MAX_DEPTH = 100  # functions that call one another in a chain, as in the onnx package
MAX_NODES = 100_000  # with functions expanded: ONNX Runtime takes minutes to load more
MAX_STEPS = 10_000_000  # nodes run for a batch, as far as constant trip counts tell
ENDLESS = 2**63  # trips of a Loop without a trip count
COPIES = ("Identity", "Cast")

Key = tuple[str, str, str]  # domain, name and overload of a function
Scope = ChainMap[str, "NodeProto | TensorProto | None"]  # what makes a tensor; None for an input


class Size(NamedTuple):
    """How large a graph is once its functions are expanded."""

    nodes: int = 0
    steps: int = 0  # nodes run: those of a Loop count once a trip
    depth: int = 0  # of function calls


def check_model(model: ModelProto) -> None:
    """Reject a model that is cyclic, expands or runs without bound, or opens other files.

    A trip count that the model computes, or keeps in an external file, is not known here: such a
    Loop counts as one trip, and so does one whose body computes when to stop.
    """
    functions = {_key(function): function for function in model.functions}
    if len(functions) < len(model.functions):
        raise CasterError("two of its functions have the same name")
    calls = {
        key: {_key(node) for graph in nested(function) for node in graph.node} & functions.keys()
        for key, function in functions.items()
    }
    sizes: dict[Key, Size] = {}
    try:
        for key in TopologicalSorter(calls).static_order():
            sizes[key] = _measure(functions[key], ChainMap(), sizes)
            if sizes[key].depth > MAX_DEPTH:
                raise CasterError(f"its functions call one another more than {MAX_DEPTH} deep")
    except CycleError:
        raise CasterError("its functions call one another in a cycle") from None
    expanded = _measure(model.graph, ChainMap(), sizes).nodes
    if functions and expanded > MAX_NODES:
        raise CasterError(f"its functions expand to more than {MAX_NODES:,} nodes")


def _measure(
    graph: GraphProto | FunctionProto,
    outer: Scope,  # what the graph sees of those around it
    functions: dict[Key, Size],
) -> Size:
    """Size of a graph whose nodes are in order and have no output in common, or an error."""
    scope: Scope = outer.new_child(initial_values(graph))
    nodes = steps = depth = 0
    for node in graph.node:
        for name in node.input:
            if name and name not in scope:
                raise CasterError(
                    f"{kind_of(node)} `{title_of(node)}` reads `{name}`, which no node before it "
                    "makes: the graph is cyclic, not sorted or incomplete"
                )
        if node.op_type == "EPContext" and any(
            attribute.name == "embed_mode" and not attribute.i for attribute in node.attribute
        ):
            raise CasterError(
                f"EPContext `{title_of(node)}` runs a compiled model from another file: export "
                "with embed_mode 1"
            )
        parts = [_measure(inner, scope, functions) for inner in inside(node)]
        called = functions.get(_key(node))
        parts += [] if called is None else [called._replace(depth=called.depth + 1)]
        trips = _trips(node, scope)
        steps += 1 + trips * sum(part.steps for part in parts)
        nodes += 1 + sum(part.nodes for part in parts)
        depth = max([depth, *(part.depth for part in parts)])
        if steps > MAX_STEPS:
            often = "without end" if trips == ENDLESS else f"{trips:,} times"
            found = f"Loop `{title_of(node)}` runs {often}" if trips > 1 else "its functions expand"
            raise CasterError(f"{found}: caster runs at most {MAX_STEPS:,} nodes for a batch")
        for name in filter(None, node.output):
            if name in scope:
                raise CasterError(f"more than one node or value is named `{name}`")
            scope[name] = node
    return Size(nodes, steps, depth)


def _trips(node: NodeProto, scope: Scope) -> int:
    """How often a Loop runs; 1 where that is computed, and for every other node."""
    bodies = [attribute.g for attribute in node.attribute if attribute.name == "body"]
    if kind_of(node) != "Loop" or not bodies or not bodies[0].output:
        return 1
    (body,) = bodies
    makers = {name: each for each in body.node for name in each.output}
    inner: Scope = scope.new_child(initial_values(body) | makers)
    goes_on = _origin(body.output[0].name, inner)
    unchanged = goes_on in [value.name for value in body.input[1:2]]
    if not unchanged and not _scalar(goes_on, inner):
        return 1
    if not node.input or not node.input[0]:
        return ENDLESS
    return max(_scalar(node.input[0], scope) or 1, 1)


def _origin(name: str, scope: Scope) -> str:
    """The tensor that a tensor is a copy of."""
    from onnx import NodeProto

    while (
        isinstance(maker := scope.get(name), NodeProto)
        and kind_of(maker) in COPIES
        and len(maker.input) == 1
    ):
        name = maker.input[0]
    return name


def _scalar(name: str, scope: Scope) -> int | None:
    """The number that a tensor holds; None if it is computed, stored elsewhere or not one."""
    from onnx import NodeProto, TensorProto, numpy_helper

    source = scope.get(_origin(name, scope))
    if isinstance(source, NodeProto):
        values = {attribute.name: attribute for attribute in source.attribute}
        if kind_of(source) != "Constant" or len(values) != 1:
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
    except ValueError:  # damaged: the runtime says so
        return None


def _key(value: FunctionProto | NodeProto) -> Key:
    name = value.op_type if hasattr(value, "op_type") else value.name
    domain = "" if value.domain in STANDARD else value.domain
    return domain, name, getattr(value, "overload", "")  # which onnx 1.16 added
