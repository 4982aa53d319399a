"""Random numbers by counting, so that a whole batch draws at once and every image its own.

An image's numbers are the outputs of SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", 2014), started from a key that its pixels and a salt decide.
Everything up to 32 random bits is arithmetic of whole numbers: the same on every device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

# As signed numbers, for torch multiplies and shifts those only.
STEP = 0x9E3779B97F4A7C15 - 2**64
FIRST = 0xBF58476D1CE4E5B9 - 2**64
SECOND = 0x94D049BB133111EB - 2**64


def mixed(
    words: Tensor,  # int64, changed in place
) -> Tensor:
    """SplitMix64's last step: every bit of a word depends on every bit that came in.

    >>> hex(int(mixed(torch.tensor([STEP]))) % 2**64)  # the first output of the seed 0
    '0xe220a8397b1dcdaf'
    """
    for shift, factor in ((30, FIRST), (27, SECOND), (31, 1)):
        # The shift copies the sign into the bits it frees, and the mask clears them.
        words ^= (words >> shift) & (2 ** (64 - shift) - 1)
        words *= factor
    return words


def keys(
    images: Tensor,  # (n, H, W, 3) uint8
    salt: bytes,
) -> Tensor:  # (n,) int64
    """Where the numbers of each image start: a multilinear hash of its bytes, and the salt.

    Images stay where they are, where SHA-256 would have to fetch them. Sums of whole numbers
    are the same in any order, so neither the batch nor the device has a say.

    >>> black, other = torch.zeros((2, 1, 4, 4, 3), dtype=torch.uint8)
    >>> other[0, 3, 3, 2] = 1
    >>> bool(keys(black, b"fog") == keys(other, b"fog"))
    False
    """
    values = images.flatten(1)
    weights = mixed(counted(0, values.shape[1], images.device))
    start = int.from_bytes(hashlib.sha256(salt).digest()[:8], "little", signed=True)
    return mixed((values * weights).sum(dim=1) + start)


def counted(used: int, count: int, device: torch.device) -> Tensor:  # (count,) int64
    """The multiples of SplitMix64's step that come after the used ones."""
    return torch.arange(used + 1, used + count + 1, device=device) * STEP


class Draws:
    """A stream of numbers for every image of a batch; each call goes on where the last stopped.

    >>> draws = Draws(lambda: torch.tensor([3, 4]))
    >>> draws.uniform(5).shape, draws.normal(2, 3).shape
    (torch.Size([2, 5]), torch.Size([2, 2, 3]))
    """

    def __init__(self, start: Callable[[], Tensor]) -> None:
        self._start = start  # asked at the first draw only: most changes of colour never come to it
        self._used = 0

    @cached_property
    def _keys(self) -> Tensor:  # (n,) int64
        return self._start()

    def uniform(self, *shape: int) -> Tensor:  # (n, *shape) float64
        """Numbers between 0 and 1, the middles of 2**32 equal parts: never quite the one or other.

        They have so few digits that a whole number up to 2**20 can be added without rounding.
        """
        count = math.prod(shape)
        halves = self._words(-(-count // 2)).view(torch.int32)[:, :count]
        return ((halves.double() + (2**31 + 0.5)) / 2**32).reshape(len(self._keys), *shape)

    def normal(self, *shape: int) -> Tensor:  # (n, *shape) float64
        """Standard normal numbers by Box and Muller's method; none lies beyond 6.8.

        In double precision: what a logarithm's last digit is may depend on the place in a batch,
        and no image should.
        """
        count = math.prod(shape)
        pairs = self.uniform(-(-count // 2), 2)
        radius = pairs[..., 0].log().mul_(-2).sqrt_()
        angle = pairs[..., 1] * (2 * math.pi)
        both = torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)
        return both[:, :count].reshape(len(self._keys), *shape)

    def _words(self, count: int) -> Tensor:  # (n, count) int64
        """The next outputs of the generators."""
        steps = counted(self._used, count, self._keys.device)
        self._used += count
        return mixed(self._keys[:, None] + steps)
