"""Normalise an ONNX graph before its sites are searched and nodes are added to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from caster.errors import CasterError
from caster.models.onnx.graph import STANDARD, Head, runtime_inputs
from caster.models.protocol import error_line

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto

OPSET = 18  # of the nodes that caster adds
IR_VERSION = 8  # that belongs to this opset
ROWS = 1009  # a batch size that no other size in a graph is likely to equal
UNSUPPORTED = "the layers of this graph cannot be aligned"


def standardised(model: ModelProto, head: Head) -> ModelProto:
    """Copy a model with its functions inlined, in opset 18 or later, for any batch size.

    Tensors outside functions keep their names. They also keep their declared shapes, because the
    runtime's optimisations, and with them the last bits of its results, depend on those.
    """
    from onnx import ModelProto, inliner

    copy = ModelProto()
    copy.CopyFrom(inliner.inline_local_functions(model) if model.functions else model)
    copy = in_opset(copy)
    (images,) = runtime_inputs(copy.graph)
    size = images.type.tensor_type.shape.dim[0] if images.type.tensor_type.shape.dim else None
    if size is not None and size.dim_value > 0:
        fixed, size.dim_value = size.dim_value, ROWS
        del copy.graph.value_info[:]
        for output in copy.graph.output:
            output.type.tensor_type.ClearField("shape")
        _check_rows(copy, head, fixed)
        size.dim_param = "batch"
    return copy


def in_opset(model: ModelProto) -> ModelProto:
    """Convert a model to `OPSET` if its standard operators are older."""
    from onnx import version_converter

    versions = {entry.domain: entry.version for entry in model.opset_import}
    version = next((versions[name] for name in STANDARD if name in versions), OPSET)
    if version >= OPSET:
        return model
    try:
        converted = version_converter.convert_version(model, OPSET)
    except Exception as error:  # the converter's errors have no other common base
        raise CasterError(
            f"the graph has opset {version} and cannot be converted to {OPSET} "
            f"({error_line(error)}): export it with opset {OPSET} or later"
        ) from None
    converted.ir_version = max(converted.ir_version, IR_VERSION)
    return converted


def _check_rows(model: ModelProto, head: Head, fixed: int) -> None:
    """Raise unless a graph returns as many rows of features and logits as it gets images."""
    try:
        shapes = shapes_of(inferred(model, strict=True).graph)
    except CasterError:
        shapes = {}
    if any(shapes.get(name, [None])[:1] != [ROWS] for name in (head.features, head.logits)):
        raise CasterError(
            f"the graph takes {fixed} image{'s' * (fixed > 1)} at a time and depends on that "
            "number: export it with a dynamic batch size"
        )


def shapes_of(graph: GraphProto) -> dict[str, list[int | None]]:
    """List the known shapes of tensors in a graph; None for a dynamic size."""
    return {
        value.name: [size.dim_value or None for size in value.type.tensor_type.shape.dim]
        for value in (*graph.value_info, *graph.input, *graph.output)
        if value.type.tensor_type.HasField("shape")
    } | {tensor.name: list(tensor.dims) for tensor in graph.initializer}


def inferred(model: ModelProto, strict: bool = False) -> ModelProto:
    """Copy a model with all types and shapes of tensors that can be inferred."""
    from onnx import checker, shape_inference

    try:
        return shape_inference.infer_shapes(model, strict_mode=strict, data_prop=True)
    except (shape_inference.InferenceError, checker.ValidationError, ValueError) as error:
        reason = error_line(error)
        raise CasterError(f"the shapes in the graph cannot be inferred: {reason}") from None
