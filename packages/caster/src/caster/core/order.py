"""Detect batches whose classes are not mixed in the source's proportions.

Transport matches the moments of a batch with those of the whole source, so it stretches a batch of
few classes over all of them. The certificate cannot detect that if classes lie far apart: the
residuals are small after the stretch. The order of the frozen model's predictions can.

Both thresholds were chosen on the four spare corruptions with a ResNet-18 on CIFAR-10
(docs/small-sources.md). A network that collapses to one class under a severe shift looks like a
stream of one class. The two cannot be told apart, so such a batch is rejected too.
"""

from __future__ import annotations

from array_api_compat import device

from caster.core.linalg import Array, vector
from caster.core.namespaces import array_namespace

MOST_NEIGHBOURS = 3.0  # excess of equal neighbours over chance, in standard errors
MOST_EXCESS = 0.15  # concentration of the predictions: 0 as in the source, 1 for a single class


def order_evidence(
    assigned: Array,  # (B,), class indices in stream order, B >= 2
    priors: Array,  # (C,), of the source
) -> Array:  # (2,)
    """Excess of equal neighbours over chance, in standard errors, and excess concentration.

    Chance means a random order of the same predictions, so a network biased towards one class does
    not look ordered. Concentration compares the probability that two samples get the same
    prediction with the probability that two source samples have the same class.

    >>> import numpy as np
    >>> sorted_batch = np.repeat(np.arange(4), 16)
    >>> order_evidence(sorted_batch, np.full(4, 0.25)).round(2)
    array([13.31, -0.02])
    >>> order_evidence(np.zeros(64, dtype=int), np.full(4, 0.25))
    array([0., 1.])
    """
    xp = array_namespace(priors)
    B = assigned.shape[0]
    classes = xp.arange(priors.shape[0], dtype=assigned.dtype, device=device(assigned))
    counts = xp.sum(xp.astype(assigned[:, None] == classes, priors.dtype), axis=0)
    alike = (counts @ (counts - 1)) / (B * (B - 1))
    neighbours = xp.sum(xp.astype(assigned[1:] == assigned[:-1], priors.dtype)) / (B - 1)
    variance, tiny = alike * (1 - alike), xp.finfo(priors.dtype).eps
    error = xp.sqrt(xp.where(variance > tiny, variance, tiny) / (B - 1))
    expected = priors @ priors
    excess = (alike - expected) / (1 - expected)
    return vector((neighbours - alike) / error, excess)


def is_ordered(neighbours: float, excess: float) -> bool:
    """Whether the classes of a batch come in runs, or are too few for the source's mixture.

    >>> is_ordered(13.3, 0.0), is_ordered(0.0, 1.0), is_ordered(1.2, 0.05)
    (True, True, False)
    """
    return neighbours > MOST_NEIGHBOURS or excess > MOST_EXCESS
