"""Affine statistics transport of a layer: channel moments, and the map to the source.

A site of a network has values of c channels at many positions. A per-channel affine map x -> scale
x + shift takes the mean and variance over samples and positions from the target's to the source's,
so that the next layer sees the statistics it was trained on.

On a GPU a kernel launch costs more than this arithmetic, so torch models use fused versions of four
of these functions; tests compare them with this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Self

from array_api_compat import array_namespace

from caster.core.linalg import Array, identity_like, symmetric_roots

if TYPE_CHECKING:
    from caster.core.class_moments import ClassChannelMoments

Side = Literal["in", "out"]
# Version tag of stored statistics: those with another tag are measured again.
MEASURED = "image patches on a grid, all and per class, with covariances"
POSITIONS = 196  # approximate number measured per sample: neighbouring positions are redundant
ROUNDING = 1e-6  # relative to a squared mean: a smaller float32 variance is rounding noise
FULL_MAP_CHANNELS = 128  # at most, because every batch costs the square root of a c x c matrix
FULL_MAP_ROWS = 50  # times c: smallest number of values per channel, over samples and positions
FULL_MAP_EPS = 1e-3  # added to eigenvalues, relative to a site's mean variance: less is noise


@dataclass(frozen=True)
class Site:
    """The input or output of a module, whose values are transported.

    >>> str(Site("blocks.3", "out", axis=-1))
    'blocks.3:out'
    """

    module: str  # name within the network
    side: Side
    axis: int  # channel axis: 1 or -1
    prefix_tokens: int = 0  # leading tokens that are not image patches, such as a class token

    def patch_values(self, values: Array) -> Array:  # (n, ...) -> (n, ...)
        """Select the values to transport: those of image patches.

        >>> import numpy as np
        >>> site = Site("blocks.3", "out", axis=-1, prefix_tokens=1)
        >>> site.patch_values(np.zeros((8, 65, 768))).shape
        (8, 64, 768)
        """
        return values[:, self.prefix_tokens :] if self.prefix_tokens else values

    def on_grid(self, values: Array) -> Array:  # (n, ...) -> (n, ...)
        """Select the values to measure, on a regular grid of about `POSITIONS` positions.

        >>> import numpy as np
        >>> Site("conv1", "out", axis=1).on_grid(np.zeros((8, 64, 112, 56))).shape
        (8, 64, 14, 14)
        """
        first, last = (2, values.ndim) if self.axis == 1 else (1, values.ndim - 1)
        grid = measured_grid(values.shape[first:last])
        if all(each.step == 1 for each in grid):
            return values
        return values[(*[slice(None)] * first, *grid, ...)]

    def __str__(self) -> str:
        return f"{self.module}:{self.side}"


def measured_grid(sizes: Sequence[int]) -> list[slice]:
    """Positions to measure along every axis.

    >>> measured_grid((56, 14))
    [slice(None, None, 4), slice(None, None, 1)]
    """
    per_axis = round(POSITIONS ** (1 / max(1, len(sizes))))
    return [slice(None, None, max(1, size // per_axis)) for size in sizes]


@dataclass(frozen=True, eq=False)
class ChannelMoments:
    """Mean and variance of every channel, and the number of samples.

    Samples have equal weight, however many positions they have. `+` merges the moments of two sets
    of samples (Chan, Golub and LeVeque).

    >>> import numpy as np
    >>> one, other = (ChannelMoments.of(np.array(x)[:, None], 1) for x in ([1.0, 3.0], [5.0]))
    >>> both = one + other
    >>> both.count, both.mean, both.variance * 3
    (3.0, array([3.]), array([8.]))
    """

    count: float  # samples; fractional if the past is discounted
    mean: Array  # (c,)
    variance: Array  # (c,), divided by n
    covariance: Array | None = None  # (c, c), if requested; its diagonal is the variance
    # Per class, for the same samples; only for the source.
    classes: ClassChannelMoments | None = field(default=None, kw_only=True)

    @classmethod
    def of(cls, values: Array, axis: int, full: bool = False) -> Self:  # (n, ...)
        """Compute the moments of a batch over all axes but `axis`; the first axis is samples."""
        xp = array_namespace(values)
        others = tuple(i for i in range(values.ndim) if i != axis % values.ndim)
        mean, variance = (find(values, axis=others) for find in (xp.mean, xp.var))
        if not full:
            return cls(float(values.shape[0]), mean, variance)
        rows = xp.reshape(xp.moveaxis(values, axis, -1), (-1, values.shape[axis])) - mean
        return cls(float(values.shape[0]), mean, variance, rows.T @ rows / rows.shape[0])

    def map(self, function: Callable[[Array], Array]) -> Self:
        """Apply a function to every array, such as a conversion to another namespace."""
        return replace(
            self,
            mean=function(self.mean),
            variance=function(self.variance),
            covariance=None if self.covariance is None else function(self.covariance),
            classes=None if self.classes is None else self.classes.map(function),
        )

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
            classes=None
            if self.classes is None or other.classes is None
            else self.classes + other.classes,
        )

    def at_most(self, samples: float) -> Self:
        """Cap the weight of the moments at a number of samples; drops the classes.

        Updating with `past.at_most(M - n) + batch` for every batch of n < M samples gives all
        samples equal weight until there are M; from then on older ones decay, and a batch has
        weight n / M.

        >>> import numpy as np
        >>> ChannelMoments(90.0, np.zeros(1), np.ones(1)).at_most(64).count
        64.0
        """
        return replace(self, count=min(self.count, float(samples)), classes=None)


def divergence(recent: ChannelMoments, past: ChannelMoments) -> Array:  # (c,)
    """Kullback-Leibler divergence of each channel's Gaussian from the past's, in nats.

    0 for a channel that has not varied so far: its variance is rounding noise, which depends on how
    samples are batched.

    >>> import numpy as np
    >>> past = ChannelMoments(9.0, np.zeros(2), np.array([1.0, 0.0]))
    >>> divergence(ChannelMoments(9.0, np.array([2.0, 5.0]), np.ones(2)), past)
    array([2., 0.])
    """
    xp = array_namespace(past.mean)
    varies = (past.variance > ROUNDING * past.mean**2) & (
        recent.variance > ROUNDING * recent.mean**2
    )
    one = xp.ones_like(past.variance)
    v_s, v = xp.where(varies, past.variance, one), xp.where(varies, recent.variance, one)
    found = 0.5 * (v / v_s + (recent.mean - past.mean) ** 2 / v_s - 1 - xp.log(v / v_s))
    return xp.where(varies, found, xp.zeros_like(found))


def shrunk(target: ChannelMoments, source: ChannelMoments, prior: float) -> ChannelMoments:
    """Shrink a target's moments towards the source's: weights n/(N+n) and N/(N+n).

    N, the `prior`, is the weight of the source in samples. The mean is the posterior mean, under a
    prior centred at the source's mean with 1/N of a sample's variance. The variance is blended with
    the same weights, as in BatchNorm adaptation (Schneider et al. 2020): both terms estimate the
    variance about the target's own mean, so the difference of the means is not added, as it would
    be for a mixture of both distributions.

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
    target: ChannelMoments, source: ChannelMoments, eps: float | Array
) -> tuple[Array, Array]:  # (c,), (c,)
    """Scale and shift that map a target's moments to the source's; eps is added to variances.

    Between Gaussians this is the optimal transport of each channel on its own. It is the inverse of
    the diagonal map of Eq. 3, which moves the source's classes to the target. BatchNorm with the
    source's moments, applied after it, equals BatchNorm with the target's and the same eps.

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

    Between centred Gaussians this is the optimal transport from target to source: of all maps that
    turn C_t into C_s it moves values the least. The inverse of the map in Eq. 3, R C_t^-1/2, also
    rotates the channels. The two agree if the covariances commute, as diagonal ones do.

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
    """A and b that map a target's mean and covariance to the source's (full-map `to_source`).

    >>> import numpy as np
    >>> moments = (ChannelMoments(9.0, np.ones(1), np.ones(1), s * np.eye(1)) for s in (4.0, 9.0))
    >>> to_source_full(*moments, eps=0.0)
    (array([[1.5]]), array([-0.5]))
    """
    root, _ = symmetric_roots(source.covariance, eps)
    A = optimal_map(target.covariance + eps * identity_like(root), root)
    return A, source.mean - A @ target.mean
