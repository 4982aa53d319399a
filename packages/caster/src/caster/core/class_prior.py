"""The class prior of shuffled samples: maximum a posteriori, and whether to believe it.

The probabilities of a classifier contain the class prior it was trained with. Where samples have
another one, it is found by EM (Saerens, Latinne and Decaestecker 2002), and probabilities are
corrected by the ratio of the two. A shifted network also prefers some classes, and EM cannot tell
that preference from a prior. Two things can. Preferences mostly explain held-out samples less well
than a long tail does. And answers that carry more information than the entropy of the prior tell
samples apart that the prior says are alike. Neither is sure: then the prior is in doubt.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ROUNDS = 20  # of EM, at most
CONVERGED = 1e-3  # change of all probabilities together, below which a round was the last
FEWEST = 64  # samples needed to doubt the source's prior
ENOUGH = 256  # samples needed to believe another one
# Nats per sample that a prior must explain, over log C, to be doubted or believed: a single class
# would explain log C. Chosen on the spare corruptions with two ResNet-18s (C = 10), whose
# preferences explain at most 0.06, tails of 20 : 1 0.09 to 0.13 and tails of 100 : 1 0.16 to 0.23,
# and on shifted digits with four small networks, where preferences that the surplus does not
# give away explain up to 0.19. That it scales with log C came after ResNet-18 with C = 100.
DOUBTED = 0.08
BELIEVED = 0.17
# Information beyond the entropy of the prior, over log C, from which on it is doubted, whatever it
# explains. True priors of few classes (C = 2, 20 : 1) may have more: they are then never believed.
SURPLUS = 0.03
TINY = 1e-300  # smallest probability whose logarithm is taken


def estimated_prior(
    p: NDArray[Any],  # (n, C), under the prior pi_s
    pi_s: Floats,  # (C,)
    alpha: float,  # weight of pi_s, in samples
) -> Floats:  # (C,)
    """EM: r_ic ~ p_ic pi_c / pi_s,c;  pi_c <- (sum_i r_ic + alpha pi_s,c) / (n + alpha).

    >>> p = np.array([[0.9, 0.1]] * 9 + [[0.1, 0.9]])
    >>> estimated_prior(p, np.array([0.5, 0.5]), alpha=2.0).round(2)
    array([0.85, 0.15])
    >>> estimated_prior(p, np.array([0.5, 0.5]), alpha=math.inf)
    array([0.5, 0.5])
    """
    if math.isinf(alpha):
        return pi_s
    pi = pi_s
    for _ in range(ROUNDS):
        before = pi
        pi = (corrected(p, pi, pi_s).sum(axis=0) + alpha * pi_s) / (len(p) + alpha)
        if np.abs(pi - before).sum() < CONVERGED:
            break
    return pi


def corrected(p: NDArray[Any], pi: Floats, pi_s: Floats) -> Floats:  # (n, C)
    """Probabilities under the prior pi instead of pi_s."""
    joint = p * (pi / pi_s)
    return np.asarray(joint / joint.sum(axis=1, keepdims=True))


def explained(p: NDArray[Any], pi: Floats, pi_s: Floats) -> float:
    """Mean log likelihood ratio of samples under the prior pi against pi_s, in nats.

    >>> explained(np.array([[1.0, 0.0]]), np.array([1.0, 0.0]), np.array([0.5, 0.5])) == math.log(2)
    True
    """
    return float(np.log(p @ (pi / pi_s)).mean())


def entropy(p: Floats) -> Floats:  # (..., C) -> (...)
    """Entropy in nats.

    >>> float(entropy(np.array([0.5, 0.5]))) == math.log(2)
    True
    """
    return np.asarray(-(p * np.log(p.clip(min=TINY))).sum(axis=-1))


def information(p: Floats) -> float:  # (n, C)
    """Mutual information of sample and label, if the label's probabilities are p, in nats."""
    return float(entropy(p.mean(axis=0)) - entropy(p).mean())


def believed_prior(p: NDArray[Any], pi_s: Floats) -> Floats | None:  # (n, C), (C,) -> (C,)
    """The prior of these samples if it differs clearly from pi_s, else pi_s; None if in doubt.

    Each half of the samples is explained by the prior of the other, so that noise explains nothing.
    """
    C = len(pi_s)
    if len(p) < FEWEST:
        return pi_s
    halves = p[::2], p[1::2]
    gains = [
        explained(held_out, estimated_prior(half, pi_s, C), pi_s)
        for half, held_out in (halves, halves[::-1])
    ]
    gain = float(np.mean(gains)) / math.log(C)
    if gain < DOUBTED:
        return pi_s
    if gain < BELIEVED or len(p) < ENOUGH:
        return None
    pi = estimated_prior(p, pi_s, C)
    return None if information(p) > entropy(pi) + SURPLUS * math.log(C) else pi
