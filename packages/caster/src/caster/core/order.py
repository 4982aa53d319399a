"""Whether a batch's classes come as the source's did: mixed, and in the source's proportions.

Transport matches the moments of a batch with those of the whole source, so a batch of few classes
is stretched over all of them. The certificate cannot see that where classes lie far apart: the
residuals are small after the stretch. The frozen model's answers, in the order they came, can.

Both constants were chosen on the four spare corruptions with a ResNet-18 on CIFAR-10
(docs/small-sources.md). A network that a severe shift makes answer one class throughout looks like
a stream of one class, and is rejected too: the frozen answer is kept where the two look alike.
"""

from __future__ import annotations

from array_api_compat import array_namespace, device

from caster.core.linalg import Array

MOST_NEIGHBOURS = 3.0  # standard errors of the share of equal neighbours above chance
MOST_EXCESS = 0.15  # concentration of the answers: 0 is the source's, 1 a single class


def order_evidence(
    assigned: Array,  # (B,), class indices in the order the samples came, B >= 2
    priors: Array,  # (C,), of the source
) -> Array:  # (2,)
    """Neighbours that agree beyond chance, in standard errors, and excess concentration.

    Chance is what a random order of the same answers would give, so a network biased towards one
    class does not look ordered. The probability that two samples have the same answer is compared
    with that of two source samples.

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
    alike = xp.sum(counts * (counts - 1)) / (B * (B - 1))
    neighbours = xp.mean(xp.astype(assigned[1:] == assigned[:-1], priors.dtype))
    tiny = xp.finfo(priors.dtype).eps
    error = xp.sqrt(xp.clip(alike * (1 - alike), min=tiny) / (B - 1))
    expected = xp.sum(priors * priors)
    excess = (alike - expected) / (1 - expected)
    return xp.stack([(neighbours - alike) / error, excess])


def is_ordered(neighbours: float, excess: float) -> bool:
    """Whether a batch's classes come in runs, or are too few for the source's mixture.

    >>> is_ordered(13.3, 0.0), is_ordered(0.0, 1.0), is_ordered(1.2, 0.05)
    (True, True, False)
    """
    return neighbours > MOST_NEIGHBOURS or excess > MOST_EXCESS
