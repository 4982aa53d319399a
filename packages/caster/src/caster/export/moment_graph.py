"""Channel moments of all sites in a graph, after `core.channels` and `core.class_moments`.

S sites with D channels in all share one (2, D) float32 array of means and variances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caster.core.channels import ROUNDING, ChannelMoments
from caster.core.class_moments import ClassChannelMoments
from caster.export import graph_arrays as xp
from caster.export.graph_arrays import GraphArray

Floats = NDArray[np.floating]


def merged(past: GraphArray, batch: GraphArray, share: GraphArray) -> GraphArray:  # (2, D)
    """Merge moments; `share` is the batch's share of all samples."""
    step = batch[0] - past[0]
    mean = past[0] + share * step
    variance = past[1] + share * (batch[1] - past[1]) + share * (1.0 - share) * (step * step)
    return xp.stack([mean, variance])


def blended(target: GraphArray, source: GraphArray, own: GraphArray) -> GraphArray:  # (2, D)
    """Shrink the target's moments towards the source's; `own` is the weight of the target."""
    return source + own * (target - source)


def to_source(target: GraphArray, reference: GraphArray) -> GraphArray:  # (2, D), (3, D) -> (2, D)
    """Scale and shift that map a target's moments to those of the reference."""
    mean, variance, eps = (reference[i] for i in range(3))
    scale = xp.sqrt((variance + eps) / (target[1] + eps))
    return xp.stack([scale, mean - scale * target[0]])


@dataclass(frozen=True, eq=False)
class ClassTable:
    """Class moments of several sites in the float16 units of a state file.

    z and s are the class means and standard deviations, standardised by the mean and deviation of
    all samples per channel. The graph shrinks them (`ClassChannelMoments.shrunk`) when it is
    loaded, and maps each channel so that the source's class mixture has the source's moments
    (`centred_on`).
    """

    z: Floats  # (C, d) float16
    s: Floats  # (C, d) float16
    own: Floats  # (C, 1), the weights w of `shrunk`
    background: Floats  # (2, d), mean and variance that z is shrunk towards
    scale: Floats  # (d,), from shrunk z to the units of the channels
    shift: Floats  # (d,)

    @classmethod
    def of(cls, sites: Sequence[ChannelMoments], few: float) -> ClassTable:
        """Tabulate the classes at sites with class moments, shrunk by `few` samples."""
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
        z, s = (xp.constant(part).astype(np.float32) for part in (self.z, self.s))
        w, background = xp.constant(self.own), xp.constant(self.background)
        step = z - background[0]
        means = background[0] + w * step
        variances = w * (s * s) + (1.0 - w) * background[1] + w * (1.0 - w) * (step * step)
        weights = pi.astype(np.float32)
        mean = weights @ means
        step = means - mean
        variance = weights @ (variances + step * step)
        scale = xp.constant(self.scale)
        return xp.stack([xp.constant(self.shift) + scale * mean, scale * scale * variance])


def _relative(site: ChannelMoments) -> tuple[Floats, Floats]:  # (C, c), (C, c)
    """Class means and deviations, standardised by the mean and deviation of all samples."""
    assert site.classes is not None
    deviation = np.sqrt(np.asarray(site.variance, np.float64))
    unit = np.where(deviation > 0, deviation, np.inf)  # a constant channel gives 0
    mean = np.asarray(site.mean, np.float64)
    return (site.classes.means - mean) / unit, np.sqrt(site.classes.variances) / unit


def divergence(recent: GraphArray, past: GraphArray) -> GraphArray:  # (2, D), (2, D) -> (D,)
    """Kullback-Leibler divergence between each channel's recent and past Gaussian, in nats."""
    one, other = (each[1] > ROUNDING * (each[0] * each[0]) for each in (past, recent))
    varies = one & other
    v_s, v = (xp.where(varies, moments[1], 1.0) for moments in (past, recent))
    step = recent[0] - past[0]
    found = 0.5 * (v / v_s + step * step / v_s - 1.0 - xp.log(v / v_s))
    return xp.where(varies, found, 0.0)


def change(
    recent: GraphArray,  # (2, d) at shallow sites
    past: GraphArray,  # (2, d)
    widths: Sequence[int],  # channels of those sites
) -> GraphArray:  # ()
    """Mean divergence over sites."""
    weights = np.concatenate([np.full(width, 1 / width / len(widths)) for width in widths])
    return (divergence(recent, past) * xp.constant(weights, np.float32)).sum()
