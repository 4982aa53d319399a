"""Copies of a network for resting streams: maps are graph inputs, and nothing is measured.

Weights that depend on a graph input keep ONNX Runtime from its fast layout for constant ones
(NCHWc), and a map that is applied to activations makes them leave that layout and return to it. So
a map is folded into the weights only where that costs the convolution least: the first one, and
small 1x1 ones. Images are processed in small pieces, whose activations stay in the caches. Every
piece has its own copy of the nodes, which cost little; in a loop, a graph of its own, the weights
would no longer be constants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from caster.models.onnx.builder import LAST, GraphBuilder, ImageValues
from caster.models.onnx.folded import Convolution
from caster.models.onnx.graph import Head
from caster.models.onnx.graph_sites import OnnxSite

if TYPE_CHECKING:
    import onnx_ir as ir

FOLDED = 256  # largest number of inputs of a 1x1 convolution to fold a diagonal map into
COLOURS = 4  # largest number of channels of images, which have no fast layout anyway


@dataclass(frozen=True)
class Pieces:
    """How resting copies split a batch."""

    copies: int = 1
    rows: int = 0  # per piece; the last one takes the remainder
    fixed: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # see `layers.fixed_sizes`


@dataclass(frozen=True, eq=False)
class GivenMap:
    """x -> scale x + shift, or A x + shift where there is an A."""

    scale: ir.Value  # (c,)
    shift: ir.Value  # (c,)
    matrix: ir.Value | None = None  # (c, c)


def add_resting_copies(
    build: GraphBuilder,
    head: Head,
    maps: Mapping[OnnxSite, GivenMap],
    pieces: Pieces,
) -> None:
    """Add the input `caster.resting`, images, and the features and logits that they get.

    Outputs: `caster.resting_features` and `caster.resting_logits`.
    """
    import onnx_ir as ir

    images = build.images("caster.resting")
    copies = []
    for k in range(pieces.copies):
        end = LAST if k == pieces.copies - 1 else (k + 1) * pieces.rows
        piece = images
        if pieces.copies > 1:
            ends = build.ints(k * pieces.rows), build.ints(end)
            piece = build.op("Slice", images, *ends, build.ints(0))
            # Where ONNX Runtime cannot tell which values have equal sizes, it takes long to find
            # memory for them when it loads the graph.
            piece.shape = ir.Shape([f"caster.{k}.rows", *(images.shape or ())[1:]])
            piece.type = images.type
        copy = build.copy(piece, f"caster.{k}")
        for name, value in pieces.fixed.items():
            ir.convenience.replace_all_uses_with(copy[name], build.constant(value))
        copies.append(copy)
    for site, given in maps.items():
        _align(build, site, given, copies)
    for name, tensor in (("features", head.features), ("logits", head.logits)):
        parts = [build.as_float(copy[tensor]) for copy in copies]
        whole = parts[0] if len(parts) == 1 else build.op("Concat", *parts, axis=0)
        shape = ["caster.resting.rows", *build.shape_of(tensor)[1:]]
        build.output(f"caster.resting_{name}", whole, shape)


def _align(
    build: GraphBuilder,
    site: OnnxSite,
    given: GivenMap,
    copies: Sequence[dict[str, ir.Value]],
) -> None:
    """Map the values of a site in all copies."""
    name, folded = site.site.module, None
    behind = [Convolution.behind(copy[name]) for copy in copies]
    if behind[0] is not None:
        folded = _folded(build, behind[0], given)
    for copy, found in zip(copies, behind, strict=True):
        values = copy[name]
        readers = tuple(values.uses())
        if folded is not None and found is not None:
            aligned = found.with_weights(build, *folded)
        else:
            x = ImageValues(build, site, values)
            if given.matrix is not None:
                aligned = x.multiplied(given.matrix, given.shift)
            elif len(copies) > 1:
                aligned = x.mapped_in_cache(given.scale, given.shift)
            else:
                aligned = x.mapped(given.scale, given.shift)
        for node, index in readers:
            node.replace_input_with(index, aligned)
        copy[name] = aligned


def _folded(
    build: GraphBuilder, found: Convolution, given: GivenMap
) -> tuple[ir.Value, ir.Value] | None:
    """Weight and bias of a convolution with the map folded in; None to leave them constant."""
    op, ints, sizes = build.op, build.ints, found.W.shape
    is_small = sizes[1] <= FOLDED or given.matrix is not None
    is_pointwise = math.prod(sizes[2:]) == 1
    if found.grouped or not (sizes[1] <= COLOURS or (is_pointwise and is_small)):
        return None
    gain, bias = (build.constant(p.astype(np.float32)) for p in (found.gain, found.bias))
    if given.matrix is None:
        columns = op("Reshape", op("Mul", given.scale, gain), ints(-1, *(1 for _ in sizes[1:])))
        weight, own = op("Mul", found.weight, columns), op("Mul", given.scale, bias)
    else:
        columns = op("Reshape", found.weight, ints(sizes[0], -1))
        product = op("MatMul", op("Mul", given.matrix, gain), columns)
        weight = op("Reshape", product, ints(*sizes))
        column = op("MatMul", given.matrix, op("Reshape", bias, ints(-1, 1)))  # for WebGPU
        own = op("Reshape", column, ints(-1))
    return weight, op("Add", own, given.shift)
