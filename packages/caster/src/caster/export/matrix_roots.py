"""Roots of symmetric matrices in a graph, by products alone since ONNX has no eigensolver."""

from __future__ import annotations

import numpy as np

from caster.core.linalg import step_scales
from caster.export import graph_arrays as xp
from caster.export.graph_arrays import GraphArray


def scaled_roots(
    matrices: GraphArray,  # (..., k, k), semidefinite, float64
    identity: GraphArray,  # (k, k)
    smallest: float,  # resolved root of an eigenvalue, relative to the Frobenius norm
) -> tuple[GraphArray, GraphArray, GraphArray]:  # (..., k, k), (..., k, k), (..., 1, 1)
    """Root and inverse root of a matrix divided by its scale, and the root of the scale.

    Runs coupled Newton-Schulz iterations, as `newton_schulz_roots` does: T = (3 a - a^3 Z Y) / 2
    moves the roots of all eigenvalues, scaled into [0, 1], closer to 1. Roots below `smallest` are
    not resolved; their contribution to the result is smaller than they are.
    """
    scale = xp.sqrt((matrices * matrices).sum(-1, keepdims=True).sum(-2, keepdims=True))
    start = matrices / scale  # the scale is at least the largest eigenvalue

    def step(both: GraphArray, a: GraphArray) -> tuple[GraphArray, list[GraphArray]]:
        Y, Z = both[0], both[1]
        T = 1.5 * a * identity - 0.5 * a * a * a * (Z @ Y)
        return xp.stack([Y @ T, T @ Z]), []

    scales = xp.constant(np.array(step_scales(smallest)))
    (both,) = xp.scan(xp.stack([start, identity + 0.0 * start]), scales, step)
    return both[0], both[1], xp.sqrt(scale)
