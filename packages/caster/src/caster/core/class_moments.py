"""Channel moments of every class at a site, and of any mixture of the classes.

In deep layers, a channel's mean and variance over a batch depend on which classes the batch holds.
Per-class moments of the source give the reference moments for the batch's own class mixture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from array_api_compat import array_namespace
from array_api_extra import one_hot

from caster.core.channels import ChannelMoments
from caster.core.linalg import Array
from caster.core.moments import update_rows


@dataclass(frozen=True, eq=False)
class ClassChannelMoments:
    """Mean and variance of every channel within every class, over samples and positions.

    Like `ChannelMoments`, these are sums over samples: `+` merges two class by class (Chan, Golub
    and LeVeque). A class that one side has no samples of, or no row for, comes from the other side.

    >>> import numpy as np
    >>> x, y = np.array([[1.0], [3.0], [7.0]]), np.array([0, 0, 1])
    >>> found = ClassChannelMoments.of(x, 1, y, n_classes=2)
    >>> found.means.tolist(), found.variances.tolist()
    ([[2.0], [7.0]], [[1.0], [0.0]])
    >>> found.mixture(np.array([0.5, 0.5])).variance  # 1 / 2 within + 2.5^2 between
    array([6.75])
    """

    counts: Array  # (C,) samples of each class, floating
    means: Array  # (C, c); zeros for a class without samples
    variances: Array  # (C, c) within a class, over samples and positions, divided by n

    @classmethod
    def of(
        cls,
        values: Array,  # (n, ...)
        axis: int,  # of the channels
        targets: Array,  # (n,) class indices
        n_classes: int,
    ) -> Self:
        """Compute the moments of a batch over all axes but the channels', with sums in float64."""
        xp = array_namespace(values)
        by_sample = xp.moveaxis(values, axis, 1)
        by_sample = xp.reshape(by_sample, (*by_sample.shape[:2], -1))
        means, variances = xp.mean(by_sample, axis=2), xp.var(by_sample, axis=2)
        return cls.of_samples(means, variances, targets, n_classes)

    @classmethod
    def of_samples(
        cls,
        means: Array,  # (n, c) over the positions of one sample
        variances: Array,  # (n, c)
        targets: Array,  # (n,) class indices
        n_classes: int,
    ) -> Self:
        """Pool the moments of single samples by class, in float64."""
        xp = array_namespace(means, targets)
        means, variances = (xp.astype(part, xp.float64) for part in (means, variances))
        member = one_hot(targets, n_classes, dtype=xp.float64)  # (n, C)
        counts = xp.sum(member, axis=0)
        share = member.T / xp.clip(counts, min=1.0)[:, None]  # (C, n), rows sum to 1 or 0
        origin = means[:1, :]  # centred, so that a common offset costs no digits
        offsets = share @ (means - origin)
        steps = means - origin - xp.take(offsets, targets, axis=0)
        seen = xp.astype(counts > 0, xp.float64)[:, None]
        return cls(counts, offsets + origin * seen, share @ (variances + steps**2))

    def including(
        self,
        means: Array,  # (n, c) over the positions of one sample
        variances: Array,  # (n, c)
        targets: Array,  # (n,) class indices
        n_classes: int,
    ) -> Self:
        """Add samples in place, with new rows for new classes.

        >>> import numpy as np
        >>> x, y = np.array([[1.0], [3.0], [7.0]]), np.array([0, 0, 1])
        >>> found = ClassChannelMoments.of_samples(x[:1], 0 * x[:1], y[:1], 1)
        >>> found.including(x[1:], 0 * x[1:], y[1:], 2).means.tolist()
        [[2.0], [7.0]]
        """
        total = self._with_rows(n_classes)
        classes, own = array_namespace(means, targets).unique_inverse(targets)
        chunk = type(self).of_samples(means, variances, own, int(classes.shape[0]))
        update_rows(total, classes, chunk)
        return total

    def map(self, function: Callable[[Array], Array]) -> Self:
        """Apply a function to every array."""
        return type(self)(*map(function, (self.counts, self.means, self.variances)))

    def __add__(self, other: Self) -> Self:
        n_classes = max(self.counts.shape[0], other.counts.shape[0])
        a, b = self._with_rows(n_classes), other._with_rows(n_classes)
        xp = array_namespace(a.means, b.means)
        counts = a.counts + b.counts
        share = (b.counts / xp.clip(counts, min=1.0))[:, None]
        step = b.means - a.means
        between = share * (1 - share) * step**2
        return type(self)(
            counts,
            (1 - share) * a.means + share * b.means,
            (1 - share) * a.variances + share * b.variances + between,
        )

    def _with_rows(self, n_classes: int) -> Self:
        """Append classes without samples."""
        if self.counts.shape[0] == n_classes:
            return self
        xp = array_namespace(self.means)
        more = n_classes - self.counts.shape[0]
        none = [xp.zeros_like(part[:1, ...]) for part in (self.counts, self.means)]
        return type(self)(
            xp.concat([self.counts, *none[:1] * more]),
            xp.concat([self.means, *none[1:] * more]),
            xp.concat([self.variances, *none[1:] * more]),
        )

    @cached_property
    def total(self) -> float:
        """Number of samples of all classes."""
        return float(array_namespace(self.counts).sum(self.counts))

    def pooled(self) -> ChannelMoments:
        """Moments of all samples together."""
        return self.mixture(self.counts / self.total)

    def mixture(
        self,
        pi: Array,  # (C,) sums to 1
    ) -> ChannelMoments:
        """m(pi) = sum_c pi_c m_c and v(pi) = sum_c pi_c (v_c + (m_c - m(pi))^2).

        A per-channel affine map x -> a x + b maps the means of all classes and mixtures alike, and
        scales their variances by a^2. So alignment with the mixture of the batch, whatever it is,
        undoes a per-channel affine shift exactly.
        """
        mean = pi @ self.means
        return ChannelMoments(self.total, mean, pi @ (self.variances + (self.means - mean) ** 2))

    def shrunk(self, samples: float) -> Self:
        """Shrink classes of few samples towards the moments of all, with weight n_c / (n_c + N).

        Class c keeps the weight w_c = n_c / (n_c + N); a background shared by all classes has the
        rest, 1 - w_c. In the background, class c has a weight proportional to pi_c (1 - w_c), the
        weight it gave up, where pi_c = n_c / n. So the mixture of shrunk classes in the source's
        proportions keeps the pooled moments, and no variance can become negative. If all classes
        have equally many samples, the background is the pooled source. A class without samples gets
        the pooled moments.

        >>> import numpy as np
        >>> means = np.array([[0.0], [4.0]])
        >>> found = ClassChannelMoments(np.array([6.0, 2.0]), means, np.ones((2, 1)))
        >>> few = found.shrunk(2.0)
        >>> few.means.round(3).tolist(), few.pooled().mean, few.pooled().variance
        ([[0.4], [2.8]], array([1.]), array([4.]))
        """
        xp = array_namespace(self.means)
        seen = self.counts > 0
        own, background = self.weights(samples)
        pooled, w = self.pooled(), own[:, None]
        means = w * self.means + (1 - w) * background.mean
        between = w * (1 - w) * (self.means - background.mean) ** 2
        variances = w * self.variances + (1 - w) * background.variance + between
        return type(self)(
            self.counts,
            xp.where(seen[:, None], means, pooled.mean),
            xp.where(seen[:, None], variances, pooled.variance),
        )

    def weights(self, samples: float) -> tuple[Array, ChannelMoments]:  # (C,)
        """The w_c of `shrunk`, and its background."""
        xp = array_namespace(self.means)
        seen = self.counts > 0
        lost = samples / xp.where(seen, self.counts + samples, xp.ones_like(self.counts))  # 1 - w
        given = self.counts * lost if samples else self.counts  # N = 0: any background will do
        return 1 - lost, self.mixture(given / xp.sum(given))

    def centred_on(self, pooled: ChannelMoments) -> Self:
        """Map each channel so that the pooled moments are exactly these.

        Restores rounded moments: the mixture in the source's proportions is exactly the source.

        >>> import numpy as np
        >>> means = np.array([[0.0], [4.0]])
        >>> found = ClassChannelMoments(np.ones(2), means, np.zeros((2, 1)))
        >>> found.centred_on(ChannelMoments(2.0, np.array([1.0]), np.array([9.0]))).means.tolist()
        [[-2.0], [4.0]]
        """
        xp = array_namespace(self.means)
        own = self.pooled()
        varies = own.variance > 0
        ratio = pooled.variance / xp.where(varies, own.variance, xp.ones_like(own.variance))
        ratio = xp.where(varies, ratio, xp.zeros_like(ratio))
        means = pooled.mean + xp.sqrt(ratio) * (self.means - own.mean)
        return type(self)(self.counts, means, ratio * self.variances)
