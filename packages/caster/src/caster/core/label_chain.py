"""Labels that come in runs: a sticky Markov chain over the labels of a stream.

A stream is *correlated* if neighbours tend to share their class: frames of a video, a sorted
folder, one patient after the other. The model is the simplest one with that property,

    y_t = y_{t-1} with probability rho, otherwise a new draw from the class prior g,

and a sample's probabilities p_t say how likely each label is. They come from a network under shift,
so a share e of them is noise: the label's likelihood is ((1 - e) p_t + e pi_s) / pi_s, where pi_s
is the source's mixture, the prior inside p_t. Neither rho nor e is known. All pairs of a small grid
run side by side, weighted by how well each predicts the next sample; rho = 0 is one of them, and a
stream is shuffled while it leads. With rho = 0 the posterior is p_t itself.

A shifted network prefers some classes, and a constant preference must not pass for runs. So the
evidence for rho > 0 is measured against labels drawn independently from the frequencies seen so
far. A strong preference would still pass for runs: among ten classes, one that takes almost half of
the predictions of an uncertain network, or almost two thirds of those of a confident one. What may
give it away is information: answers that tell samples apart contradict a run that says they are
alike. Then the runs are doubted. So is a long run that the network often answers wrongly.

Everything runs in NumPy: n x C probabilities are few, and the recursion goes from sample to sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from caster.core.class_prior import corrected, entropy

Floats = NDArray[np.float64]

# Chosen on the four spare corruptions with ResNet-18 on CIFAR-10, but for two that follow failures
# of other networks on the same corruptions: `MOST`, with frequencies by EM, after ConvNeXt's long
# tails passed for runs, and `SHUFFLED` after the first batches of ResNet-20's shuffled streams did.
STICKINESS = (0.3, 0.6, 0.85, 0.95, 0.99)
NOISE = (0.05, 0.2)
RHO = np.array([0.0, *np.repeat(STICKINESS, len(NOISE))])
EPSILON = np.array([0.0, *NOISE * len(STICKINESS)])
SHUFFLED = 0.99  # prior probability of rho = 0
LOG_PRIOR = np.log(np.array([SHUFFLED, *[(1 - SHUFFLED) / (len(RHO) - 1)] * (len(RHO) - 1)]))
WINDOW = 256  # samples over which evidence fades, so that a stream may change its order
BOUND = 20.0  # of the log evidence: past it a change would go unnoticed for long
HISTORY = 4096  # samples behind the frequencies
AGREED = 64  # weight of the source's mixture in them, in samples
MOST = 0.8  # upper limit of each: a stream of one class is not a preference
NEGLIGIBLE = 1e-4  # weight below which a pair is left out of the posterior
# Surplus of information, over log C, from which on runs are doubted. Chosen on the spare
# corruptions with two ResNet-18s on CIFAR-10 and on shifted digits with four small networks: the
# first batch of a true run has up to 0.46, the fourth at most 0.1; most preferences 0.2 to 0.5.
SURPLUS = 0.2


@dataclass(frozen=True, eq=False)
class LabelChain:
    """What a stream's past says about the labels of its next samples.

    >>> chain = LabelChain.start(np.full(4, 0.25))
    >>> run = np.full((16, 4), 0.1) + 0.6 * np.eye(4)[np.repeat([0, 3], 8)]
    >>> chain = chain.observe(run)
    >>> chain.is_correlated
    True
    >>> unsure = np.array([[0.35, 0.3, 0.2, 0.15]])
    >>> chain.advance(run).posterior(unsure).round(1)
    array([[0.1, 0.1, 0. , 0.8]])
    """

    prior: Floats  # (C,) pi_s
    last: Floats  # (G, C) probabilities of the last label
    evidence: Floats  # (G,) log likelihood ratio of each pair against rho = 0
    totals: Floats  # (C,) sums of labels' probabilities under the frequencies
    count: float  # samples in them
    sums: Floats  # (2, C) faded sums of p and of the labels in runs, of batches with evident runs
    entropies: float  # faded sum of the entropies of p, likewise

    @classmethod
    def start(cls, prior: NDArray[Any]) -> Self:  # (C,)
        """The chain of a stream without samples."""
        pi = np.asarray(prior, np.float64)
        nothing = np.zeros(len(RHO))
        last, none = np.tile(pi, (len(RHO), 1)), np.zeros((2, len(pi)))
        return cls(pi, last, nothing, np.zeros(len(pi)), 0.0, none, 0.0)

    @cached_property
    def weights(self) -> Floats:  # (G,)
        """Posterior probabilities of the pairs (rho, e)."""
        log = self.evidence + LOG_PRIOR
        raw = np.exp(log - log.max())
        return np.asarray(raw / raw.sum())

    @property
    def is_evident(self) -> bool:
        """Whether rho > 0 is the better explanation of the stream."""
        return bool(self.weights[0] < 0.5)

    @property
    def is_doubted(self) -> bool:
        """Whether evident runs may be a preference of the network: its answers contradict them."""
        return self.is_evident and self.surplus >= SURPLUS

    @property
    def is_correlated(self) -> bool:
        """Whether the stream comes in runs: evident, and not doubted."""
        return self.is_evident and not self.is_doubted

    @property
    def surplus(self) -> float:
        """Information in p beyond what the labels in runs can carry, over log C."""
        n = self.sums[0].sum()
        if not n:
            return 0.0
        answers, labels = entropy(self.sums / n)
        return float((answers - self.entropies / n - labels) / math.log(len(self.prior)))

    @property
    def frequencies(self) -> Floats:  # (C,)
        """Class frequencies so far, shrunk towards the source's mixture and at most `MOST`."""
        found = (self.totals + AGREED * self.prior) / (self.count + AGREED)
        top = int(found.argmax())
        if found[top] > MOST > self.prior[top]:
            share = (found[top] - MOST) / (found[top] - self.prior[top])
            found = found + share * (self.prior - found)
        return np.asarray(found)

    def observe(self, p: NDArray[Any]) -> Self:  # (n, C)
        """Update the evidence by the probabilities of the next samples."""
        p = np.asarray(p, np.float64)
        kept = min(1.0, max(0.0, HISTORY - len(p)) / max(self.count, 1.0))
        labels = corrected(p, self.frequencies, self.prior)  # a step of EM for the frequencies
        totals, count = kept * self.totals + labels.sum(axis=0), kept * self.count + len(p)
        seen = replace(self, totals=totals, count=count)
        gains = self._gains(p, seen.frequencies)
        fading = (1 - 1 / WINDOW) ** np.arange(len(p), -1, -1)
        evidence = fading[0] * self.evidence + gains @ fading[1:]
        seen = replace(seen, evidence=np.clip(evidence, -BOUND, BOUND))
        sums, entropies = fading[0] * self.sums, fading[0] * self.entropies
        if seen.is_evident:
            sums = sums + np.stack([fading[1:] @ p, fading[1:] @ seen._runs(p)])
            entropies = entropies + float(fading[1:] @ entropy(p))
        return replace(seen, sums=sums, entropies=float(entropies))

    def posterior(self, p: NDArray[Any]) -> Floats:  # (n, C) -> (n, C)
        """Probabilities of the samples' labels, given all samples of the batch and the past."""
        used, weights = self._used()
        return np.asarray(np.tensordot(weights, self._smoothed(p, used), 1))

    def mixture(self, p: NDArray[Any]) -> Floats:  # (n, C) -> (C,)
        """The class mixture of a batch if the stream is correlated."""
        return np.asarray(self._runs(p).mean(axis=0))

    def advance(self, p: NDArray[Any]) -> Self:  # (n, C)
        """Move past the samples: their labels are the past of the next ones."""
        used, _ = self._used()
        likelihoods = _likelihoods(np.asarray(p, np.float64), self.prior, EPSILON[used])
        filtered, _ = _filter(likelihoods, self.last[used], RHO[used], self.prior)
        last = np.tile(self.prior, (len(RHO), 1))
        last[used] = filtered[:, -1]
        return replace(self, last=last)

    def _gains(self, p: Floats, frequencies: Floats) -> Floats:  # (n, C), (C,) -> (G, n)
        """Log likelihood ratios of every sample, in runs against labels of these frequencies."""
        likelihoods = _likelihoods(p, self.prior, EPSILON)
        _, predicted = _filter(likelihoods, self.last, RHO, frequencies)
        return np.asarray(np.log(predicted / (likelihoods @ frequencies)))

    def _runs(self, p: NDArray[Any]) -> Floats:  # (n, C) -> (n, C)
        """Probabilities of the samples' labels if the stream is correlated."""
        used, weights = self._used()
        sticky = weights[1:] / weights[1:].sum()
        return np.asarray(np.tensordot(sticky, self._smoothed(p, used)[1:], 1))

    def _used(self) -> tuple[NDArray[np.bool_], Floats]:
        used = self.weights > NEGLIGIBLE
        used[0] = True
        if not used[1:].any():
            used[1 + self.weights[1:].argmax()] = True
        weights = self.weights[used]
        return used, weights / weights.sum()

    def _smoothed(self, p: NDArray[Any], used: NDArray[np.bool_]) -> Floats:  # (G', n, C)
        likelihoods = _likelihoods(np.asarray(p, np.float64), self.prior, EPSILON[used])
        filtered, _ = _filter(likelihoods, self.last[used], RHO[used], self.prior)
        found = filtered * _future(likelihoods, RHO[used], self.prior)
        return np.asarray(found / found.sum(axis=2, keepdims=True))


def _likelihoods(p: Floats, prior: Floats, epsilon: Floats) -> Floats:  # (n, C) -> (G, n, C)
    """((1 - e) p + e pi_s) / pi_s, up to a factor per sample."""
    e = epsilon[:, None, None]
    return np.asarray(((1 - e) * p + e * prior) / prior)


def _filter(
    likelihoods: Floats,  # (G, n, C)
    last: Floats,  # (G, C)
    rho: Floats,  # (G,)
    g: Floats,  # (C,)
) -> tuple[Floats, Floats]:  # (G, n, C), (G, n)
    """P(y_t | samples up to t), and the likelihood of each sample given those before it."""
    filtered, predicted = np.empty_like(likelihoods), np.empty(likelihoods.shape[:2])
    stay, fresh = rho[:, None], np.multiply.outer(1 - rho, g)
    for t in range(likelihoods.shape[1]):
        joint = (stay * last + fresh) * likelihoods[:, t]
        predicted[:, t] = joint.sum(axis=1)
        last = filtered[:, t] = joint / predicted[:, t, None]
    return filtered, predicted


def _future(likelihoods: Floats, rho: Floats, g: Floats) -> Floats:  # (G, n, C) -> (G, n, C)
    """P(samples after t | y_t), up to a factor per sample."""
    future = np.ones_like(likelihoods)
    for t in range(likelihoods.shape[1] - 1, 0, -1):
        seen = likelihoods[:, t] * future[:, t]
        before = rho[:, None] * seen + ((1 - rho) * (seen @ g))[:, None]
        future[:, t - 1] = before / before.sum(axis=1, keepdims=True)
    return future
