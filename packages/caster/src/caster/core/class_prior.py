"""The class prior of shuffled samples: maximum a posteriori, and whether to believe it.

The probabilities of a classifier contain the class prior it was trained with. Where samples have
another one, it is found by EM (Saerens, Latinne and Decaestecker 2002), and probabilities are
corrected by the ratio of the two. A shifted network also prefers some classes, and EM cannot tell
that preference from a prior. Only its size can: preferences seen on shuffled streams explain
held-out samples far less well than a long tail does.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ROUNDS = 20  # of EM, at most
CONVERGED = 1e-3  # change of all probabilities together, below which a round was the last
FEWEST = 64  # samples needed to believe another prior
# Nats per sample that a prior must explain, over log C: a single class would explain log C. Chosen
# on the spare corruptions with ResNet-18 (C = 10), above what preferences explain and below a tail
# of 100 : 1; that it scales with log C came after ResNet-18 with C = 100.
BELIEVED = 0.08


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


def believed_prior(p: NDArray[Any], pi_s: Floats) -> Floats:  # (n, C), (C,) -> (C,)
    """The prior of these samples if it explains held-out ones well enough, else pi_s.

    Each half of the samples is explained by the prior of the other, so that noise explains nothing.
    """
    C = len(pi_s)
    if len(p) < FEWEST:
        return pi_s
    halves = p[::2], p[1::2]
    other_way = halves[::-1]
    gains = [
        explained(held_out, estimated_prior(half, pi_s, C), pi_s)
        for half, held_out in zip(halves, other_way, strict=True)
    ]
    if np.mean(gains) < BELIEVED * math.log(C):
        return pi_s
    return estimated_prior(p, pi_s, C)
