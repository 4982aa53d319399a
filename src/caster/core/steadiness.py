"""Whether a stream's mixture changes from block to block more than chance would have it.

Moments of a batch stand for a shift only if its mixture of classes does not matter to them. Classes
that come in turns make the means of neighbouring blocks differ by more than the spread within the
blocks explains. Measured on the frozen model's features that needs no class, no label and no
source, and it sees a few classes of a thousand as well as one of ten.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from array_api_compat import array_namespace

from caster.core.linalg import Array

PAIRS = 4  # of neighbouring blocks that count, the last ones
DEVIATIONS = 3.0  # of chance that are allowed


@dataclass(frozen=True, eq=False)
class Block:
    """Neighbouring samples: how many, their sum and the sum of their squared lengths."""

    count: int
    total: Array  # (k,)
    squares: Array  # ()

    @classmethod
    def of(cls, z: Array) -> Self:  # (n, k)
        """Of all rows."""
        xp = array_namespace(z)
        return cls(int(z.shape[0]), xp.sum(z, axis=0), xp.sum(z**2))

    def __add__(self, other: Self) -> Self:
        return type(self)(
            self.count + other.count, self.total + other.total, self.squares + other.squares
        )

    @property
    def mean(self) -> Array:  # (k,)
        """Of its samples."""
        return self.total / self.count

    @property
    def chance(self) -> Array:  # ()
        """How far the mean lies from that of endless samples, squared, were they independent."""
        xp = array_namespace(self.total)
        spread = self.squares - xp.sum(self.total**2) / self.count
        return spread / (self.count - 1) / self.count


@dataclass(frozen=True, eq=False)
class Steadiness:
    """Squared steps between neighbouring blocks' means, and what chance gives, of the last pairs.

    >>> import numpy as np
    >>> steady = Steadiness(size=2).shown(np.array([[0.0], [2.0], [1.0], [3.0]]))
    >>> steady = steady.shown(np.array([[9.0], [11.0]]))
    >>> [(float(step), float(chance)) for step, chance in steady.pairs]
    [(1.0, 2.0), (64.0, 2.0)]
    """

    size: int  # least samples of a block, 2 or more
    open: Block | None = None  # still growing
    last: Block | None = None
    pairs: tuple[tuple[Array, Array], ...] = ()  # (), ()

    def shown(self, z: Array) -> Self:  # (n, k), the next samples of the stream
        """With more samples: a block closes when it is full, and a long batch is one block.

        The order within a batch does not matter to its moments. Only a stream's first batch is cut
        in two, if it is long enough, for it has no other to be held against.
        """
        n = int(z.shape[0])
        if self.last is not None or self.open is not None or n < 2 * self.size:
            return self._joined(Block.of(z))
        return self._joined(Block.of(z[: n // 2, :]))._joined(Block.of(z[n // 2 :, :]))

    def _joined(self, part: Block) -> Self:
        block = part if self.open is None else self.open + part
        if block.count < self.size:
            return replace(self, open=block)
        closed = replace(self, open=None, last=block)
        if self.last is None:
            return closed
        xp = array_namespace(part.total)
        step = xp.sum((block.mean - self.last.mean) ** 2)
        pair = step, block.chance + self.last.chance
        return replace(closed, pairs=(*self.pairs, pair)[-PAIRS:])

    def sums(self) -> tuple[Array, Array]:  # (), ()
        """Of the steps of all pairs, and of what chance gives; there must be one."""
        steps, chances = zip(*self.pairs, strict=True)
        return sum(steps), sum(chances)

    def limit(self, freedom: float) -> float:
        """How many times what chance gives the steps may be.

        One pair's squared step over its mean has variance 2 / freedom among independent samples.
        """
        return 1 + DEVIATIONS * math.sqrt(2 / (freedom * len(self.pairs)))


def freedom(covariance: Array) -> float:  # (k, k)
    """In how many directions samples spread, effectively: squared trace over trace of the square.

    >>> import numpy as np
    >>> freedom(np.diag([1.0, 1.0, 0.0])), freedom(np.diag([5.0, 0.0]))
    (2.0, 1.0)
    """
    xp = array_namespace(covariance)
    return float(xp.linalg.trace(covariance) ** 2 / xp.sum(covariance**2))
