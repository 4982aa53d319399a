"""Class prior of shuffled samples: its MAP estimate, and whether to trust it.

The probabilities of a classifier include the class prior it was trained with. If samples follow
another prior, EM estimates it (Saerens, Latinne and Decaestecker 2002), and the ratio of the two
priors corrects the probabilities. A shifted network is also biased towards some classes, and EM
cannot tell such a bias from a prior. Two checks can. A class bias mostly explains held-out samples
less well than a long tail does. And predictions that carry more information than the entropy of the
estimated prior contradict it. Neither check is conclusive; in between, the prior is in doubt.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ROUNDS = 20  # of EM, at most
CONVERGED = 1e-3  # L1 change of the prior below which EM stops
MIN_SAMPLES_TO_DOUBT = 64  # samples needed to doubt the source's prior
# Samples needed to believe another one, or one per class if that is more. So with more classes than
# `stream_labels.PRIOR_WINDOW` none is believed.
MIN_SAMPLES_TO_BELIEVE = 256
# Held-out gain in log likelihood per sample, in units of log C, from which the source's prior is
# doubted and from which the new one is believed: a single class would gain 1. Chosen on the spare
# corruptions with two ResNet-18s (C = 10), whose class bias gains at most 0.06, tails of 20 : 1
# 0.09 to 0.13 and tails of 100 : 1 0.16 to 0.23, and on shifted digits with four small networks,
# where a bias that the surplus does not reveal gains up to 0.19. Units of log C: after ResNet-18, C
# = 100.
MIN_GAIN_DOUBTED = 0.08
MIN_GAIN_BELIEVED = 0.17
# A prior stays in doubt, whatever its gain, if the predictions carry this much more information
# than its entropy, in units of log C. True priors over few classes (C = 2, 20 : 1) can exceed this;
# they are then never believed.
PRIOR_SURPLUS = 0.03
MIN_PROBABILITY = 1e-300  # smallest probability whose logarithm is taken


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
        pi = (apply_prior(p, pi, pi_s).sum(axis=0) + alpha * pi_s) / (len(p) + alpha)
        if np.abs(pi - before).sum() < CONVERGED:
            break
    return pi


def apply_prior(p: NDArray[Any], pi: Floats, pi_s: Floats) -> Floats:  # (n, C)
    """Replace the prior pi_s inside probabilities by pi."""
    joint = p * (pi / pi_s)
    return np.asarray(joint / joint.sum(axis=1, keepdims=True))


def log_likelihood_ratio(p: NDArray[Any], pi: Floats, pi_s: Floats) -> float:
    """Mean log likelihood ratio of the prior pi against pi_s, in nats per sample.

    >>> p, pi, pi_s = np.array([[1.0, 0.0]]), np.array([1.0, 0.0]), np.array([0.5, 0.5])
    >>> log_likelihood_ratio(p, pi, pi_s) == math.log(2)
    True
    """
    return float(np.log(p @ (pi / pi_s)).mean())


def entropy(p: Floats) -> Floats:  # (..., C) -> (...)
    """Entropy in nats.

    >>> float(entropy(np.array([0.5, 0.5]))) == math.log(2)
    True
    """
    return np.asarray(-(p * np.log(p.clip(min=MIN_PROBABILITY))).sum(axis=-1))


def mutual_information(p: Floats) -> float:  # (n, C)
    """Mutual information between sample and predicted label, in nats."""
    return float(entropy(p.mean(axis=0)) - entropy(p).mean())


def select_prior(p: NDArray[Any], pi_s: Floats) -> Floats | None:  # (n, C), (C,) -> (C,)
    """Estimate the prior of samples: pi_s unless another one fits clearly better; None if in doubt.

    The gain is cross-validated: a prior estimated on one half is scored on the other half, so that
    fitting noise gains nothing.
    """
    C = len(pi_s)
    if len(p) < MIN_SAMPLES_TO_DOUBT:
        return pi_s
    halves = p[::2], p[1::2]
    gains = [
        log_likelihood_ratio(held_out, estimated_prior(half, pi_s, C), pi_s)
        for half, held_out in (halves, halves[::-1])
    ]
    gain = float(np.mean(gains)) / math.log(C)
    if gain < MIN_GAIN_DOUBTED:
        return pi_s
    if gain < MIN_GAIN_BELIEVED or len(p) < max(MIN_SAMPLES_TO_BELIEVE, C):
        return None
    pi = estimated_prior(p, pi_s, C)
    return None if mutual_information(p) > entropy(pi) + PRIOR_SURPLUS * math.log(C) else pi
