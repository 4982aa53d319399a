"""Functions on arrays of a graph, built and run by ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnxruntime
from spox import Tensor, argument, build

from caster.export.graph_arrays import GraphArray, under_construction


def compiled(function, *examples, also_open=()):
    """A function of GraphArrays as one of arrays like the examples.

    The first, and those `also_open`, may have any number of rows.
    """
    arrays = [np.asarray(each) for each in examples]
    shapes = [
        tuple(
            None if axis == each.ndim - 2 and i in (0, *also_open) else size
            for axis, size in enumerate(each.shape)
        )
        for i, each in enumerate(arrays)
    ]
    arguments = {
        f"x{i}": argument(Tensor(each.dtype, shape))
        for i, (each, shape) in enumerate(zip(arrays, shapes, strict=True))
    }
    with under_construction():
        found = function(*map(GraphArray, arguments.values()))
        found = found if isinstance(found, (list, tuple)) else [found]
        model = build(arguments, {f"y{i}": each.var for i, each in enumerate(found)})
    session = onnxruntime.InferenceSession(model.SerializeToString())

    def run(*inputs):
        given = session.run(None, dict(zip(arguments, map(np.asarray, inputs), strict=True)))
        return given[0] if len(given) == 1 else given

    return run


def evaluate(function, *inputs):
    """What a function of GraphArrays gives for arrays."""
    return compiled(function, *inputs)(*inputs)
