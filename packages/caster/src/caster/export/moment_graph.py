"""Channel moments of all sites as a graph: `core.channels` and `class_moments`, side by side.

The moments of S sites with D channels in all are one (2, D) float32 array of means and variances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caster.core.channels import ROUNDING, ChannelMoments
from caster.core.class_moments import ClassChannelMoments
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


@dataclass(frozen=True, eq=False)
class ClassTable:
    """Class moments of several sites as a state file has them: float16, in units of all samples.

    z and s are the means and deviations within classes, about the mean and in deviations of all
    samples at a channel. The graph shrinks them (`ClassChannelMoments.shrunk`) when it is loaded,
    and maps each channel so that the mixture of the source has its moments (`centred_on`).
    """

    z: Floats  # (C, d) float16
    s: Floats  # (C, d) float16
    own: Floats  # (C, 1), the weights w of `shrunk`
    background: Floats  # (2, d), of z
    scale: Floats  # (d,), from shrunk z to the channels' units
    shift: Floats  # (d,)

    @classmethod
    def of(cls, sites: Sequence[ChannelMoments], few: float) -> ClassTable:
        """The classes at sites that have them, shrunk by so many samples."""
        (counts,) = {tuple(site.classes.counts) for site in sites if site.classes is not None}
        both = zip(*map(_relative, sites), strict=True)
        z, s = (np.concatenate(parts, axis=1).astype(np.float16) for parts in both)
        wide = ClassChannelMoments(
            np.asarray(counts), z.astype(np.float64), s.astype(np.float64) ** 2
        )
        own, background = wide.weights(few)
        pooled = wide.shrunk(few).pooled()
        mean, variance = (
            np.concatenate([getattr(site, name) for site in sites]).astype(np.float64)
            for name in ("mean", "variance")
        )
        scale = np.sqrt(variance / np.where(pooled.variance > 0, pooled.variance, np.inf))
        f32 = np.float32
        return cls(
            z,
            s,
            own[:, None].astype(f32),
            np.stack([background.mean, background.variance]).astype(f32),
            scale.astype(f32),
            (mean - scale * pooled.mean).astype(f32),
        )

    def mixture(self, pi: GraphArray) -> GraphArray:  # (C,) -> (2, d)
        """m(pi) = sum_c pi_c m_c and v(pi) = sum_c pi_c (v_c + (m_c - m(pi))^2)."""
        z, s = (constant(part).astype(np.float32) for part in (self.z, self.s))
        w, background = constant(self.own), constant(self.background)
        step = z - background[0]
        means = background[0] + w * step
        variances = w * (s * s) + (1.0 - w) * background[1] + w * (1.0 - w) * (step * step)
        weights = pi.astype(np.float32)
        mean = weights @ means
        step = means - mean
        variance = weights @ (variances + step * step)
        scale = constant(self.scale)
        return stack([constant(self.shift) + scale * mean, scale * scale * variance])


def _relative(site: ChannelMoments) -> tuple[Floats, Floats]:  # (C, c), (C, c)
    """Means and deviations of classes about the mean and in deviations of all samples."""
    assert site.classes is not None
    deviation = np.sqrt(np.asarray(site.variance, np.float64))
    unit = np.where(deviation > 0, deviation, np.inf)  # a channel that does not vary gives 0
    mean = np.asarray(site.mean, np.float64)
    return (site.classes.means - mean) / unit, np.sqrt(site.classes.variances) / unit


def divergence(recent: GraphArray, past: GraphArray) -> GraphArray:  # (2, D), (2, D) -> (D,)
    """Kullback-Leibler divergence of each channel's Gaussian from the past's, in nats."""
    one, other = (each[1] > ROUNDING * (each[0] * each[0]) for each in (past, recent))
    varies = one & other
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
