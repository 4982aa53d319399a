"""A sticky Markov chain over the labels of a stream, for streams whose classes come in runs.

A stream is *correlated* if neighbours tend to share their class: frames of a video, a sorted
folder, one patient after the other. The chain is the simplest model with that property,

    y_t = y_{t-1} with probability rho, otherwise a new draw from the class prior g.

The network's probabilities p_t give the likelihood of each label. The network is under shift, so a
fraction e of p_t is treated as noise: the likelihood is ((1 - e) p_t + e pi_s) / pi_s, where pi_s
is the source's class mixture, the prior inside p_t. Neither rho nor e is known. A small grid of
pairs (rho, e) is filtered in parallel, and each pair is weighted by how well it predicts the next
sample. The grid includes rho = 0, under which the posterior is p_t itself; a stream counts as
shuffled while rho = 0 has most of the weight.

A shifted network is biased towards some classes, and a constant bias must not look like runs. So
the evidence for rho > 0 is measured against independent labels with the class frequencies observed
so far. A strong bias would still look like runs: among ten classes, one that receives almost half
of the predictions of an uncertain network, or almost two thirds of those of a confident one. The
information in the predictions can reveal such a bias: if they distinguish samples that the runs
assign to one class, the runs are doubted. A long run that the network often misclassifies is
doubted too. With many classes a weak bias looks like runs, until the frequencies rest on about one
sample per class; until then, runs are doubted unless the predictions confirm them.

Everything runs in NumPy: n x C probabilities are few, and the recursion is sequential.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from caster.core.class_prior import apply_prior, entropy

Floats = NDArray[np.float64]

# Chosen on the four spare corruptions with ResNet-18 on CIFAR-10. Two follow failures of other
# networks on the same corruptions: `MAX_FREQUENCY`, with frequencies by EM, after ConvNeXt's
# long-tailed streams were mistaken for runs, and `P_SHUFFLED` after the first batches of
# ResNet-20's shuffled streams were.
STICKINESS = (0.3, 0.6, 0.85, 0.95, 0.99)
NOISE = (0.05, 0.2)
RHO = np.array([0.0, *np.repeat(STICKINESS, len(NOISE))])
EPSILON = np.array([0.0, *NOISE * len(STICKINESS)])
P_SHUFFLED = 0.99  # prior probability of rho = 0
LOG_PRIOR = np.log(np.array([P_SHUFFLED, *[(1 - P_SHUFFLED) / (len(RHO) - 1)] * (len(RHO) - 1)]))
WINDOW = 256  # time constant of the evidence in samples, so that a stream may change its order
MAX_EVIDENCE = 20.0  # bound on the log evidence: more would delay the detection of a change
HISTORY = 4096  # samples in the class frequencies
SOURCE_WEIGHT = 64  # weight of the source's mixture in the frequencies, in samples
MAX_FREQUENCY = 0.8  # of any class: a stream of a single class is not a bias of the network
NEGLIGIBLE = 1e-4  # weight below which a pair is left out of the posterior
# Runs are doubted from this surplus of information on, in units of log C. Chosen on the spare
# corruptions with two ResNet-18s on CIFAR-10 and on shifted digits with four small networks: the
# first batch of a true run has up to 0.46, the fourth at most 0.1; most biased networks, 0.2 to
# 0.5.
RUN_SURPLUS = 0.2
# Share of sum_c p_c^2 that confirms runs: less than 1, because labels in runs keep some noise even
# if the network has none. True runs of EfficientNet-Lite0 have 1.2 to 1.5, a class bias 0.4 to 0.9.
CONFIRMED = 0.99


@dataclass(frozen=True, eq=False)
class LabelChain:
    """Filtered state of the chain after a stream's past samples.

    >>> chain = LabelChain.start(np.full(4, 0.25))
    >>> run = np.full((16, 4), 0.1) + 0.6 * np.eye(4)[np.repeat([0, 3], 8)]
    >>> chain = chain.observe(run)
    >>> chain.is_correlated
    True
    >>> unsure = np.array([[0.35, 0.3, 0.2, 0.15]])
    >>> posterior, chain = chain.advance(run).smooth(unsure)
    >>> posterior.round(1)
    array([[0.1, 0.1, 0. , 0.8]])
    """

    prior: Floats  # (C,) pi_s
    last: Floats  # (G, C) probabilities of the last label
    evidence: Floats  # (G,) log likelihood ratio of each pair against rho = 0
    totals: Floats  # (C,) sums of label probabilities, corrected to the class frequencies
    count: float  # samples in `totals`, fractional once older ones are discounted
    sums: Floats  # (2, C) decayed sums of p and of smoothed labels, of batches with evident runs
    entropies: float  # decayed sum of the entropies of p over the same samples
    agreement: Floats  # (2,) decayed sums, over them too, of p times smoothed labels and p times p
    mixture: Floats | None = None  # (C,) of smoothed labels in the last batch, if runs are evident

    @classmethod
    def start(cls, prior: NDArray[Any]) -> Self:  # (C,)
        """Start a stream without samples."""
        pi = np.asarray(prior, np.float64)
        nothing = np.zeros(len(RHO))
        last, none = np.tile(pi, (len(RHO), 1)), np.zeros((2, len(pi)))
        return cls(pi, last, nothing, np.zeros(len(pi)), 0.0, none, 0.0, np.zeros(2))

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
        """Whether the predictions contradict the evident runs, which may then be a class bias."""
        unsupported = not (self.knows_frequencies or self.is_confirmed)
        return self.is_evident and (self.surplus >= RUN_SURPLUS or unsupported)

    @property
    def is_correlated(self) -> bool:
        """Whether classes come in runs that are evident and not doubted."""
        return self.is_evident and not self.is_doubted

    @property
    def surplus(self) -> float:
        """Information in p beyond the entropy of the labels in runs, in units of log C."""
        n = self.sums[0].sum()
        if not n:
            return 0.0
        answers, labels = entropy(self.sums / n)
        return float((answers - self.entropies / n - labels) / math.log(len(self.prior)))

    @property
    def knows_frequencies(self) -> bool:
        """Whether the class frequencies rest on about one sample per class."""
        return self.count + SOURCE_WEIGHT >= min(len(self.prior), HISTORY)

    @property
    def is_confirmed(self) -> bool:
        """Whether predictions support the labels in runs as much as a calibrated network would.

        Such a network gives the true label the probability sum_c p_c^2 on average. Labels in runs
        that are a class bias, or similar classes side by side, get less.
        """
        return bool(self.agreement[0] >= CONFIRMED * self.agreement[1])

    @property
    def frequencies(self) -> Floats:  # (C,)
        """Class frequencies so far: shrunk towards the source's, and at most `MAX_FREQUENCY`."""
        found = (self.totals + SOURCE_WEIGHT * self.prior) / (self.count + SOURCE_WEIGHT)
        top = int(found.argmax())
        if found[top] > MAX_FREQUENCY > self.prior[top]:
            share = (found[top] - MAX_FREQUENCY) / (found[top] - self.prior[top])
            found = found + share * (self.prior - found)
        return np.asarray(found)

    def observe(self, p: NDArray[Any]) -> Self:  # (n, C)
        """Update frequencies and evidence with the probabilities of the next batch."""
        p = np.asarray(p, np.float64)
        kept = min(1.0, max(0.0, HISTORY - len(p)) / max(self.count, 1.0))
        labels = apply_prior(p, self.frequencies, self.prior)  # E-step for the frequencies
        totals, count = kept * self.totals + labels.sum(axis=0), kept * self.count + len(p)
        seen = replace(self, totals=totals, count=count)
        gains = self._gains(p, seen.frequencies)
        decay = (1 - 1 / WINDOW) ** np.arange(len(p), -1, -1)
        evidence = decay[0] * self.evidence + gains @ decay[1:]
        seen = replace(seen, evidence=np.clip(evidence, -MAX_EVIDENCE, MAX_EVIDENCE))
        sums, entropies, mixture = decay[0] * self.sums, decay[0] * self.entropies, None
        agreement = decay[0] * self.agreement
        if seen.is_evident:
            runs = seen.in_runs(p)
            sums = sums + np.stack([decay[1:] @ p, decay[1:] @ runs])
            entropies = entropies + float(decay[1:] @ entropy(p))
            agreement = agreement + np.array([(p * r).sum(axis=1) @ decay[1:] for r in (runs, p)])
            mixture = np.asarray(runs.mean(axis=0))
        found = {"sums": sums, "entropies": float(entropies), "agreement": agreement}
        return replace(seen, **found, mixture=mixture)

    def smooth(self, p: NDArray[Any]) -> tuple[Floats, Self]:  # (n, C) -> (n, C)
        """Label probabilities given the whole batch and the past; and the advanced chain."""
        used, weights = self._used()
        likelihoods, filtered = self._filtered(p, used)
        smoothed = self._smoothed(likelihoods, filtered, used)
        return np.asarray(np.tensordot(weights, smoothed, 1)), self._advanced(filtered, used)

    def in_runs(self, p: NDArray[Any]) -> Floats:  # (n, C) -> (n, C)
        """Smoothed label probabilities given that the stream is correlated, rho > 0."""
        used, weights = self._used()
        sticky = weights[1:] / weights[1:].sum()
        smoothed = self._smoothed(*self._filtered(p, used), used)
        return np.asarray(np.tensordot(sticky, smoothed[1:], 1))

    def advance(self, p: NDArray[Any]) -> Self:  # (n, C)
        """Filter the batch, so that its last label becomes the past of the next batch."""
        used, _ = self._used()
        _, filtered = self._filtered(p, used)
        return self._advanced(filtered, used)

    def _gains(self, p: Floats, frequencies: Floats) -> Floats:  # (n, C), (C,) -> (G, n)
        """Log likelihood ratio of each sample: runs against independent labels."""
        likelihoods = _likelihoods(p, self.prior, EPSILON)
        _, predicted = _filter(likelihoods, self.last, RHO, frequencies)
        return np.asarray(np.log(predicted / (likelihoods @ frequencies)))

    def _used(self) -> tuple[NDArray[np.bool_], Floats]:  # (G,), (G',)
        """Select the pairs with weight: rho = 0, and at least one other."""
        used = self.weights > NEGLIGIBLE
        used[0] = True
        if not used[1:].any():
            used[1 + self.weights[1:].argmax()] = True
        weights = self.weights[used]
        return used, weights / weights.sum()

    def _filtered(
        self, p: NDArray[Any], used: NDArray[np.bool_]
    ) -> tuple[Floats, Floats]:  # (G', n, C) both
        """Likelihoods and filtered label probabilities under each of the pairs."""
        likelihoods = _likelihoods(np.asarray(p, np.float64), self.prior, EPSILON[used])
        filtered, _ = _filter(likelihoods, self.last[used], RHO[used], self.prior)
        return likelihoods, filtered

    def _smoothed(
        self, likelihoods: Floats, filtered: Floats, used: NDArray[np.bool_]
    ) -> Floats:  # (G', n, C)
        """Forward-backward label probabilities under each of the pairs."""
        found = filtered * _future(likelihoods, RHO[used], self.prior)
        return np.asarray(found / found.sum(axis=2, keepdims=True))

    def _advanced(self, filtered: Floats, used: NDArray[np.bool_]) -> Self:
        last = np.tile(self.prior, (len(RHO), 1))
        last[used] = filtered[:, -1]
        return replace(self, last=last)


def _likelihoods(p: Floats, prior: Floats, epsilon: Floats) -> Floats:  # (n, C) -> (G, n, C)
    """Likelihood of each label, ((1 - e) p + e pi_s) / pi_s, up to a factor per sample."""
    e = epsilon[:, None, None]
    return np.asarray(((1 - e) * p + e * prior) / prior)


def _filter(
    likelihoods: Floats,  # (G, n, C)
    last: Floats,  # (G, C)
    rho: Floats,  # (G,)
    g: Floats,  # (C,)
) -> tuple[Floats, Floats]:  # (G, n, C), (G, n)
    """Forward pass: P(y_t | samples up to t), and each sample's predictive likelihood."""
    filtered, predicted = np.empty_like(likelihoods), np.empty(likelihoods.shape[:2])
    stay, fresh = rho[:, None], np.multiply.outer(1 - rho, g)
    for t in range(likelihoods.shape[1]):
        joint = (stay * last + fresh) * likelihoods[:, t]
        predicted[:, t] = joint.sum(axis=1)
        last = filtered[:, t] = joint / predicted[:, t, None]
    return filtered, predicted


def _future(likelihoods: Floats, rho: Floats, g: Floats) -> Floats:  # (G, n, C) -> (G, n, C)
    """Backward pass: P(samples after t | y_t), up to a factor per sample."""
    future = np.ones_like(likelihoods)
    for t in range(likelihoods.shape[1] - 1, 0, -1):
        seen = likelihoods[:, t] * future[:, t]
        before = rho[:, None] * seen + ((1 - rho) * (seen @ g))[:, None]
        future[:, t - 1] = before / before.sum(axis=1, keepdims=True)
    return future
