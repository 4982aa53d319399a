"""Mixup, CutMix and smooth labels: what an image is, as shares of the classes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, one_hot

from caster_bench.engine.train.recipe import Recipe


@dataclass(frozen=True)
class Mix:
    """How a batch is mixed with itself, one image on: by weight, or by a box of the other's."""

    kept: float  # share of an image that stays its own
    box: tuple[slice, slice] | None = None  # that the other fills; None: a weighted mean

    def __call__(self, batch: Tensor) -> Tensor:  # (B, 3, H, W)
        """Images mixed; batches come shuffled, so that the next image is any image."""
        if self.kept == 1:
            return batch
        other = batch.roll(1, 0)
        if self.box is None:
            return torch.lerp(other, batch, self.kept)
        mixed = batch.clone()
        mixed[:, :, *self.box] = other[:, :, *self.box]
        return mixed

    def targets(self, codes: Tensor, n_classes: int, smoothing: float) -> Tensor:  # (B, C)
        """Shares of the classes, which are 1 together."""
        own = one_hot(codes, n_classes).float()
        mixed = self.kept * own + (1 - self.kept) * own.roll(1, 0)
        return (1 - smoothing) * mixed + smoothing / n_classes


UNMIXED = Mix(1.0)


def draw(recipe: Recipe, size: int, rng: np.random.Generator) -> Mix:
    """How the next batch is mixed.

    >>> recipe = Recipe.of("deit_base")
    >>> 0 <= draw(recipe, 32, np.random.default_rng(0)).kept <= 1
    True
    """
    kinds = [kind for kind in ("mixup", "cutmix") if getattr(recipe, kind) > 0]
    chosen, kind_draw = rng.random(2)
    if not kinds or chosen >= recipe.mixed:
        return UNMIXED
    kind = kinds[int(kind_draw * len(kinds))]
    alpha = getattr(recipe, kind)
    kept = float(rng.beta(alpha, alpha))
    if kind == "mixup":
        return Mix(kept)
    side = size * np.sqrt(1 - kept)
    rows, columns = (_interval(int(rng.integers(size)), side, size) for _ in range(2))
    area = (rows.stop - rows.start) * (columns.stop - columns.start)
    return Mix(1 - area / size**2, (rows, columns))


def _interval(centre: int, length: float, size: int) -> slice:
    """An interval about a pixel, as much of it as is inside."""
    first, last = round(centre - length / 2), round(centre + length / 2)
    return slice(max(first, 0), min(last, size))


def loss(logits: Tensor, targets: Tensor) -> Tensor:  # (B, C), (B, C) -> ()
    """Cross-entropy with shares of classes, in float32."""
    return -(targets * log_softmax(logits.float(), dim=1)).sum(dim=1).mean()
