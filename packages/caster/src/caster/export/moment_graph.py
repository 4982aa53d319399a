"""Channel moments of all sites as a graph: `core.channels` and `class_moments`, side by side.

The moments of S sites with D channels in all are one (2, D) float32 array of means and variances.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from caster.core.class_moments import ClassMoments
from caster.export.graph_arrays import GraphArray, constant, log, sqrt, stack, where

Floats = NDArray[np.floating]


def merged(past: GraphArray, batch: GraphArray, share: GraphArray) -> GraphArray:  # (2, D)
    """Moments of all samples together, a `share` of which is the batch's."""
    step = batch[0] - past[0]
    mean = past[0] + share * step
    variance = past[1] + share * (batch[1] - past[1]) + share * (1.0 - share) * (step * step)
    return stack([mean, variance])


def blended(target: GraphArray, source: GraphArray, own: GraphArray) -> GraphArray:  # (2, D)
    """The target's moments, shrunk towards the source's: `own` is their weight."""
    return source + own * (target - source)


def to_source(target: GraphArray, reference: GraphArray) -> GraphArray:  # (2, D), (3, D) -> (2, D)
    """Scale and shift that map a target's moments to the reference's, which has eps as well."""
    mean, variance, eps = (reference[i] for i in range(3))
    scale = sqrt((variance + eps) / (target[1] + eps))
    return stack([scale, mean - scale * target[0]])


def mixture(classes: ClassMoments, pi: GraphArray) -> GraphArray:  # (C,) -> (2, D)
    """m(pi) = sum_c pi_c m_c and v(pi) = sum_c pi_c (v_c + (m_c - m(pi))^2)."""
    means, variances = constant(classes.means), constant(classes.variances)
    weights = pi.astype(means.dtype)
    mean = weights @ means
    step = means - mean
    return stack([mean, weights @ (variances + step * step)])


def divergence(recent: GraphArray, past: GraphArray) -> GraphArray:  # (2, D), (2, D) -> (D,)
    """Kullback-Leibler divergence of each channel's Gaussian from the past's, in nats."""
    varies = (past[1] > 0.0) & (recent[1] > 0.0)
    v_s, v = (where(varies, moments[1], 1.0) for moments in (past, recent))
    step = recent[0] - past[0]
    found = 0.5 * (v / v_s + step * step / v_s - 1.0 - log(v / v_s))
    return where(varies, found, 0.0)


def change(
    recent: GraphArray,  # (2, d) at shallow sites
    past: GraphArray,  # (2, d)
    widths: Sequence[int],  # channels of those sites
) -> GraphArray:  # ()
    """Mean divergence of the sites."""
    weights = np.concatenate([np.full(width, 1 / width / len(widths)) for width in widths])
    return (divergence(recent, past) * constant(weights, np.float32)).sum()
