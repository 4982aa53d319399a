"""Affine statistics transport of a layer: a channel's moments, and the map back to the source's.

A site of a network carries values of c channels at many positions. What is known of a channel is
its mean and variance over samples and positions; a target's are carried to the source's by
x -> scale x + shift, so that the next layer is given what it was trained on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from array_api_compat import array_namespace

from caster.core.linalg import Array

Side = Literal["in", "out"]


@dataclass(frozen=True)
class Site:
    """Where a network's values are transported: what a module is given, or what it returns.

    >>> str(Site("blocks.3", "out", axis=-1))
    'blocks.3:out'
    """

    module: str  # its name within the network
    side: Side
    axis: int  # of the channels: 1 or -1

    def __str__(self) -> str:
        return f"{self.module}:{self.side}"


@dataclass(frozen=True, eq=False)
class ChannelMoments:
    """Mean and variance of every channel, and how many samples they rest on.

    Every sample counts the same, however many positions it has. `+` merges two: the moments of all
    samples of both, with what the means differ in among the variance (Chan, Golub and LeVeque).

    >>> import numpy as np
    >>> one, other = (ChannelMoments.of(np.array(x)[:, None], 1) for x in ([1.0, 3.0], [5.0]))
    >>> both = one + other
    >>> both.count, both.mean, both.variance * 3
    (3.0, array([3.]), array([8.]))
    """

    count: float  # samples; a fraction of one where the past is discounted
    mean: Array  # (c,)
    variance: Array  # (c,), divided by n

    @classmethod
    def of(cls, values: Array, axis: int) -> Self:  # (n, ...), channels along `axis`
        """The moments of a batch, over all its axes but one; the first counts the samples."""
        xp = array_namespace(values)
        others = tuple(i for i in range(values.ndim) if i != axis % values.ndim)
        if hasattr(xp, "var_mean"):  # torch's, in one pass over the values
            variance, mean = xp.var_mean(values, others, correction=0)
        else:
            mean = xp.mean(values, axis=others)
            variance = xp.var(values, axis=others)
        return cls(float(values.shape[0]), mean, variance)

    def __add__(self, other: Self) -> Self:
        count = self.count + other.count
        share = other.count / count
        step = other.mean - self.mean
        return type(self)(
            count,
            self.mean + share * step,
            (1 - share) * self.variance + share * other.variance + share * (1 - share) * step**2,
        )

    def at_most(self, samples: float) -> Self:
        """The same moments, weighed as no more than so many samples.

        `past.at_most(M) + batch` after every batch counts all samples until there are M, and from
        then on forgets: a batch of n enters with weight n / (M + n), whatever n is.

        >>> import numpy as np
        >>> ChannelMoments(90.0, np.zeros(1), np.ones(1)).at_most(64).count
        64.0
        """
        return replace(self, count=min(self.count, float(samples)))


def shrunk(target: ChannelMoments, source: ChannelMoments, prior: float) -> ChannelMoments:
    """A target's moments, shrunk towards the source's: N/(N+n) of those, n/(N+n) of its own.

    N, the `prior`, is how many samples the source's moments weigh as. The mean is the posterior
    mean where the target's is believed to lie about the source's with 1/N of a sample's variance.
    The variance is blended by the same weights, as BatchNorm adaptation does it (Schneider et al.
    2020): both estimate the spread about the target's own mean, so the step between the two means
    is no part of it, as it would be of a mixture of both distributions.

    >>> import numpy as np
    >>> batch = ChannelMoments(8.0, np.array([4.0]), np.array([3.0]))
    >>> found = shrunk(batch, ChannelMoments(1e4, np.array([0.0]), np.array([1.0])), prior=8.0)
    >>> found.mean, found.variance
    (array([2.]), array([2.]))
    """
    own = target.count / (prior + target.count)
    return ChannelMoments(
        prior + target.count,
        (1 - own) * source.mean + own * target.mean,
        (1 - own) * source.variance + own * target.variance,
    )


def to_source(
    target: ChannelMoments, source: ChannelMoments, eps: float
) -> tuple[Array, Array]:  # (c,), (c,)
    """Scale and shift that carry a target's moments to the source's; eps is added to variances.

    Between Gaussians this is the optimal transport of every channel by itself. The diagonal map of
    Eq. 3 is its inverse: that one moves the source's classes to the target, this one the target's
    values to the source. Behind it, a BatchNorm with the source's moments and the same eps gives
    what it would with the target's.

    >>> import numpy as np
    >>> source = ChannelMoments(9.0, np.array([1.0]), np.array([4.0]))
    >>> to_source(ChannelMoments(9.0, np.array([5.0]), np.array([1.0])), source, eps=0.0)
    (array([2.]), array([-9.]))
    """
    xp = array_namespace(target.mean)
    scale = xp.sqrt((source.variance + eps) / (target.variance + eps))
    return scale, source.mean - scale * target.mean
