"""Affine statistics transport of a layer: a channel's moments, and the map back to the source's.

A site of a network carries values of c channels at many positions. What is known of a channel is
its mean and variance over samples and positions; a target's are carried to the source's by
x -> scale x + shift, so that the next layer is given what it was trained on.

On a GPU a kernel launch costs more than this arithmetic, so `caster.models.torch_channels` and
`full_maps` fuse four of these definitions for torch; their tests hold them to this module:
`measure` and `measure_full` to `ChannelMoments.of`, `blended` to `shrunk`, `ToSource` to
`to_source`, `FullToSource` to `to_source_full`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from array_api_compat import array_namespace

from caster.core.linalg import Array, identity_like, symmetric_roots

Side = Literal["in", "out"]
# Which values of a site moments are of: told beside what is kept, so that what was measured
# otherwise, as with class tokens once, is measured anew.
MEASURED = "what comes of pictures"


@dataclass(frozen=True)
class Site:
    """Where a network's values are transported: what a module is given, or what it returns.

    >>> str(Site("blocks.3", "out", axis=-1))
    'blocks.3:out'
    """

    module: str  # its name within the network
    side: Side
    axis: int  # of the channels: 1 or -1
    added: int = 0  # tokens that come first and of no image, as a class token: left as they are

    def of_images(self, values: Array) -> Array:  # (n, ...) -> (n, ...)
        """The values that are transported: those that came of images.

        >>> import numpy as np
        >>> Site("blocks.3", "out", axis=-1, added=1).of_images(np.zeros((8, 65, 768))).shape
        (8, 64, 768)
        """
        return values[:, self.added :] if self.added else values

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
    covariance: Array | None = None  # (c, c), where it was asked for; its diagonal the variance

    @classmethod
    def of(cls, values: Array, axis: int, full: bool = False) -> Self:  # (n, ...)
        """The moments of a batch, over all its axes but one; the first counts the samples."""
        xp = array_namespace(values)
        others = tuple(i for i in range(values.ndim) if i != axis % values.ndim)
        mean, variance = (find(values, axis=others) for find in (xp.mean, xp.var))
        if not full:
            return cls(float(values.shape[0]), mean, variance)
        rows = xp.reshape(xp.moveaxis(values, axis, -1), (-1, values.shape[axis])) - mean
        return cls(float(values.shape[0]), mean, variance, rows.T @ rows / rows.shape[0])

    def __add__(self, other: Self) -> Self:
        count = self.count + other.count
        share = other.count / count
        step = other.mean - self.mean
        return type(self)(
            count,
            self.mean + share * step,
            (1 - share) * self.variance + share * other.variance + share * (1 - share) * step**2,
            None
            if self.covariance is None or other.covariance is None
            else (1 - share) * self.covariance
            + share * other.covariance
            + share * (1 - share) * (step[:, None] * step[None, :]),
        )

    def at_most(self, samples: float) -> Self:
        """The same moments, weighed as no more than so many samples.

        `past.at_most(M - n) + batch` after every batch of n < M counts all samples until there are
        M, and from then on forgets: a batch enters with weight n / M.

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
        None
        if target.covariance is None or source.covariance is None
        else (1 - own) * source.covariance + own * target.covariance,
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


def optimal_map(
    C_t: Array,  # (c, c)
    root: Array,  # (c, c), the symmetric root of the source's covariance C_s
) -> Array:  # (c, c)
    """The symmetric A with A C_t A = C_s: A = R (R C_t R)^-1/2 R, where R R = C_s.

    Between Gaussians about their means this is the optimal transport from target to source. The
    inverse of Eq. 3's map, R C_t^-1/2, has the same effect on the covariance and turns the
    channels besides; of all maps that have it, this one moves values the least. The two agree
    where the covariances commute, as diagonal ones do.

    >>> import numpy as np
    >>> optimal_map(np.diag([4.0, 1.0]), np.diag([1.0, 3.0]))
    array([[0.5, 0. ],
           [0. , 3. ]])
    """
    _, inverse = symmetric_roots(root @ C_t @ root, 0.0)
    return root @ inverse @ root


def to_source_full(
    target: ChannelMoments, source: ChannelMoments, eps: float
) -> tuple[Array, Array]:  # (c, c), (c,)
    """A and b that carry a target's mean and covariance to the source's, as `to_source` does.

    >>> import numpy as np
    >>> moments = (ChannelMoments(9.0, np.ones(1), np.ones(1), s * np.eye(1)) for s in (4.0, 9.0))
    >>> to_source_full(*moments, eps=0.0)
    (array([[1.5]]), array([-0.5]))
    """
    root, _ = symmetric_roots(source.covariance, eps)
    A = optimal_map(target.covariance + eps * identity_like(root), root)
    return A, source.mean - A @ target.mean
