"""Batches as a model takes them, turned into pixels between 0 and 1 and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from caster.models.preprocessing import Preprocessing

Numbers = float | Sequence[float]  # one for all channels, or one a channel


@dataclass(frozen=True, eq=False)
class Scale:
    """Which values of a batch stand for black and for white.

    >>> Scale.normalised(mean=0.5, std=0.25).pixels(torch.full((1, 3, 1, 1), -1.0)).unique().item()
    0.25
    """

    black: Tensor  # (), (1, 1, 1) or (C, 1, 1)
    white: Tensor
    reverse: bool = False  # channels are blue, green and red

    @classmethod
    def normalised(cls, mean: Numbers, std: Numbers, largest: float = 1.0) -> Self:
        """Of values (pixel - mean) / std, where the largest pixel is this."""
        shift, by = (torch.tensor(v, dtype=torch.float32).reshape(-1, 1, 1) for v in (mean, std))
        return cls((0 - shift) / by, (largest - shift) / by)

    @classmethod
    def stated(cls, how: Preprocessing) -> Self:
        """As a preprocessing says."""
        known = cls.normalised(how.mean, how.std, how.range)
        return replace(known, reverse=how.channels == "BGR")

    @classmethod
    def of(cls, batch: Tensor) -> Self:
        """By a batch alone: its smallest value is black, its largest white."""
        black, white = torch.aminmax(batch.float())
        # A batch of one value has no range; any will do.
        return cls(black, torch.where(white > black, white, black + 1))

    def beside(self, batch: Tensor) -> Self:
        """On a batch's device."""
        return replace(self, black=self.black.to(batch.device), white=self.white.to(batch.device))

    def pixels(self, batch: Tensor) -> Tensor:  # (B, C, H, W)
        """A batch as pixels in [0, 1], red first; what lies outside is clipped."""
        values = ((batch.float() - self.black) / (self.white - self.black)).clamp(0, 1)
        return values.flip(1) if self.reverse else values

    def values(self, pixels: Tensor, like: Tensor) -> Tensor:  # (B, C, H, W)
        """Pixels as a batch like another."""
        pixels = pixels.flip(1) if self.reverse else pixels
        return torch.lerp(self.black, self.white, pixels).to(like.dtype)
