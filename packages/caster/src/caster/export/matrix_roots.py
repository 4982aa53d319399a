"""Roots of symmetric matrices in a graph: ONNX has no eigenvalues, so by products alone."""

from __future__ import annotations

import numpy as np

from caster.core.linalg import step_scales
from caster.export.graph_arrays import GraphArray, constant, scan, sqrt, stack


def scaled_roots(
    matrices: GraphArray,  # (..., k, k), semidefinite, float64
    identity: GraphArray,  # (k, k)
    smallest: float,  # root of an eigenvalue, relative to the Frobenius norm, that is resolved
) -> tuple[GraphArray, GraphArray, GraphArray]:  # (..., k, k), (..., k, k), (..., 1, 1)
    """Root and inverse root of a matrix over its scale, and the root of the scale.

    Coupled Newton-Schulz iterations, as in `newton_schulz_roots`: T = (3 a - a^3 Z Y) / 2 moves the
    roots of all eigenvalues, scaled into [0, 1], closer to 1. Smaller ones are not resolved: what
    they add to the root is less than they are.
    """
    scale = sqrt((matrices * matrices).sum(-1, keepdims=True).sum(-2, keepdims=True))
    start = matrices / scale  # the scale is at least the largest eigenvalue

    def step(both: GraphArray, a: GraphArray) -> tuple[GraphArray, list[GraphArray]]:
        Y, Z = both[0], both[1]
        T = 1.5 * a * identity - 0.5 * a * a * a * (Z @ Y)
        return stack([Y @ T, T @ Z]), []

    scales = constant(np.array(step_scales(smallest)))
    (both,) = scan(stack([start, identity + 0.0 * start]), scales, step)
    return both[0], both[1], sqrt(scale)
