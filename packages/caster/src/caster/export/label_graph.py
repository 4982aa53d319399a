"""Infer the classes of a stream in a graph: `core.label_chain`, `class_prior`, `stream_labels`.

Everything is float64, as in `core`. Likelihoods have the samples first, (n, G, C), so that a loop
can scan them. All G pairs (rho, e) are computed; negligible ones have no weight in the posterior.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self, get_args

import numpy as np
from numpy.typing import NDArray

from caster.core import class_prior, stream_labels
from caster.core.label_chain import (
    CONFIRMED,
    EPSILON,
    HISTORY,
    LOG_PRIOR,
    MAX_EVIDENCE,
    MAX_FREQUENCY,
    NEGLIGIBLE,
    RHO,
    RUN_SURPLUS,
    SOURCE_WEIGHT,
    WINDOW,
    LabelChain,
)
from caster.core.stream_labels import Kind
from caster.export import graph_arrays as xp
from caster.export.graph_arrays import GraphArray

Floats = NDArray[np.float64]
PAIRS = len(RHO)
KINDS: tuple[Kind, ...] = get_args(Kind)  # a graph stores an index into this


# --- runs ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ChainGraph:
    """`LabelChain` on arrays of a graph."""

    prior: GraphArray  # (C,), a constant
    last: GraphArray  # (G, C)
    evidence: GraphArray  # (G,)
    totals: GraphArray  # (C,)
    count: GraphArray  # ()
    sums: GraphArray  # (2, C)
    entropies: GraphArray  # ()
    agreement: GraphArray  # (2,)

    @cached_property
    def weights(self) -> GraphArray:  # (G,)
        """Posterior probabilities of the pairs (rho, e)."""
        found = self.evidence + xp.constant(LOG_PRIOR)
        raw = xp.exp(found - found.max())
        return raw / raw.sum()

    @property
    def is_evident(self) -> GraphArray:  # ()
        """Whether rho > 0, that is runs of equal labels, explains the stream better."""
        return self.weights[0] < 0.5

    @property
    def is_contradicted(self) -> GraphArray:  # ()
        """Whether the predictions contradict runs, evident or not."""
        knows_frequencies = self.count + SOURCE_WEIGHT >= min(self.prior.shape[0], HISTORY)
        is_confirmed = self.agreement[0] >= CONFIRMED * self.agreement[1]
        found: GraphArray = (self.surplus >= RUN_SURPLUS) | ~(knows_frequencies | is_confirmed)
        return found

    @property
    def surplus(self) -> GraphArray:  # ()
        """Information in p beyond what labels in runs can carry, divided by log C."""
        n = xp.maximum(self.sums[0].sum(), class_prior.MIN_PROBABILITY)
        found = entropy(self.sums / n)
        return (found[0] - self.entropies / n - found[1]) / math.log(self.prior.shape[0])

    @property
    def frequencies(self) -> GraphArray:  # (C,)
        """Class frequencies so far: shrunk towards the source's, and at most `MAX_FREQUENCY`."""
        found = (self.totals + SOURCE_WEIGHT * self.prior) / (self.count + SOURCE_WEIGHT)
        largest = found.max()
        source = xp.where(xp.is_first_maximum(found), self.prior, 0.0).sum()
        share = (largest - MAX_FREQUENCY) / (largest - source)
        above = (largest > MAX_FREQUENCY) & (source < MAX_FREQUENCY)
        return xp.where(above, found + share * (self.prior - found), found)

    def observe(self, p: GraphArray) -> tuple[Self, GraphArray]:  # (n, C) -> and (C,)
        """Update the evidence with the probabilities of the next samples.

        Also returns their class mixture if runs are evident, as that takes the same smoothing.
        """
        n = xp.length(p).astype(np.float64)
        kept = xp.minimum(xp.maximum(HISTORY - n, 0.0) / xp.maximum(self.count, 1.0), 1.0)
        labels = apply_prior(p, self.frequencies, self.prior)
        totals, count = kept * self.totals + labels.sum(0), kept * self.count + n
        seen = replace(self, totals=totals, count=count)
        found = likelihoods(p, self.prior)
        _, predicted = filtered(found, self.last, seen.frequencies)
        gains = xp.log(predicted / (found @ seen.frequencies))  # (n, G)
        rate = math.log(1 - 1 / WINDOW)
        fading = xp.exp(rate * (n - 1.0 - xp.arange(xp.length(p)).astype(np.float64)))
        faded = xp.exp(rate * n)
        evidence = faded * self.evidence + fading @ gains
        seen = replace(seen, evidence=xp.minimum(xp.maximum(evidence, -MAX_EVIDENCE), MAX_EVIDENCE))
        sums, entropies = faded * self.sums, faded * self.entropies
        agreement = faded * self.agreement

        def grown() -> list[GraphArray]:
            runs = seen._runs(p)
            new = xp.stack([fading @ p, fading @ runs])
            agree = xp.stack([fading @ (p * labels).sum(1) for labels in (runs, p)])
            information = entropies + fading @ entropy(p)
            return [sums + new, information, agreement + agree, runs.mean(0)]

        sums, entropies, agreement, mixture = xp.choose(
            seen.is_evident, grown, lambda: [sums, entropies, agreement, self.prior + 0.0]
        )
        return replace(seen, sums=sums, entropies=entropies, agreement=agreement), mixture

    def posterior(self, p: GraphArray) -> GraphArray:  # (n, C) -> (n, C)
        """Posterior of the labels, given all samples of the batch and the past."""
        return self._smoothed(p, self._used_weights())

    def advance(self, p: GraphArray) -> Self:  # (n, C)
        """Make the last of these samples the predecessor of the next ones."""
        found, _ = filtered(likelihoods(p, self.prior), self.last, self.prior)
        return replace(self, last=xp.where(self._used.reshape(PAIRS, 1), found[-1], self.prior))

    def _runs(self, p: GraphArray) -> GraphArray:  # (n, C) -> (n, C)
        """Posterior of the labels given that the stream is correlated."""
        sticky = xp.constant((np.arange(PAIRS) > 0).astype(np.float64))
        return self._smoothed(p, self._used_weights() * sticky)

    @cached_property
    def _used(self) -> GraphArray:  # (G,)
        """Mask of the pairs that are not negligible: rho = 0 and at least one other."""
        weights = self.weights
        first = xp.constant(np.arange(PAIRS) == 0)
        sticky = xp.where(first, np.zeros(PAIRS), weights)
        return (weights > NEGLIGIBLE) | first | xp.is_first_maximum(sticky)

    def _used_weights(self) -> GraphArray:  # (G,)
        return self.weights * self._used.astype(np.float64)

    def _smoothed(self, p: GraphArray, weights: GraphArray) -> GraphArray:  # (n, C), (G,) -> (n, C)
        """Posterior of the labels for each pair, averaged with these weights."""
        weights = weights / weights.sum()
        found = likelihoods(p, self.prior)
        past, _ = filtered(found, self.last, self.prior)
        joint = past * future(found, self.prior)
        return (weights.reshape(1, PAIRS, 1) * (joint / joint.sum(2, keepdims=True))).sum(1)


def likelihoods(p: GraphArray, prior: GraphArray) -> GraphArray:  # (n, C), (C,) -> (n, G, C)
    """((1 - e) p + e pi_s) / pi_s, up to a factor per sample."""
    e = xp.constant(EPSILON[:, None])
    each = p.reshape(0, 1, -1)
    return ((1.0 - e) * each + e * prior) / prior


def filtered(
    likelihood: GraphArray,  # (n, G, C)
    last: GraphArray,  # (G, C)
    g: GraphArray,  # (C,)
) -> tuple[GraphArray, GraphArray]:  # (n, G, C), (n, G)
    """Forward pass: P(y_t | samples up to t), and the likelihood of each sample given the past."""
    stay, fresh = xp.constant(RHO[:, None]), xp.constant(1 - RHO[:, None]) * g

    def step(last: GraphArray, found: GraphArray) -> tuple[GraphArray, list[GraphArray]]:
        joint = (stay * last + fresh) * found
        predicted = joint.sum(1, keepdims=True)
        following = joint / predicted
        return following, [following, predicted]

    _, past, predicted = xp.scan(last, likelihood, step)
    return past, predicted.reshape(0, PAIRS)


def future(likelihood: GraphArray, g: GraphArray) -> GraphArray:  # (n, G, C), (C,) -> (n, G, C)
    """Backward pass: P(samples after t | y_t), up to a factor per sample."""
    stay, fresh = xp.constant(RHO[:, None]), xp.constant(1 - RHO[:, None])

    def step(after: GraphArray, found: GraphArray) -> tuple[GraphArray, list[GraphArray]]:
        seen = found * after
        before = stay * seen + fresh * (seen @ g).reshape(PAIRS, 1)
        return before / before.sum(1, keepdims=True), [after]

    ones = xp.constant(np.ones((PAIRS, 1))) + 0.0 * g  # (G, C)
    _, found = xp.scan(ones, likelihood, step, backwards=True)
    return found


# --- a class prior -------------------------------------------------------------------------------


def apply_prior(p: GraphArray, pi: GraphArray, pi_s: GraphArray) -> GraphArray:  # (n, C)
    """Probabilities under the class prior pi instead of pi_s."""
    joint = p * (pi / pi_s)
    return joint / joint.sum(1, keepdims=True)


def estimated_prior(p: GraphArray, pi_s: GraphArray, alpha: float) -> GraphArray:  # (C,)
    """`class_prior.estimated_prior`, with two matrix-vector products per iteration."""
    n = xp.length(p).astype(np.float64)

    def step(pi: GraphArray) -> tuple[GraphArray, list[GraphArray]]:
        ratio = pi / pi_s
        members = ratio * ((1.0 / (p @ ratio)) @ p)  # sum_i r_ic
        following = (members + alpha * pi_s) / (n + alpha)
        return xp.absolute(following - pi).sum() >= class_prior.CONVERGED, [following]

    (pi,) = xp.repeat(class_prior.ROUNDS, [pi_s], step)
    return pi


def log_likelihood_ratio(p: GraphArray, pi: GraphArray, pi_s: GraphArray) -> GraphArray:  # ()
    """Mean log likelihood ratio of samples under the prior pi against pi_s, in nats."""
    return xp.log(p @ (pi / pi_s)).mean()


def entropy(p: GraphArray) -> GraphArray:  # (..., C) -> (...)
    """Entropy in nats."""
    return -((p * xp.log(xp.maximum(p, class_prior.MIN_PROBABILITY))).sum(-1))


def select_prior(
    p: GraphArray,  # (n, C)
    pi_s: GraphArray,  # (C,)
) -> list[GraphArray]:  # (C,), ()
    """The estimated prior of these samples if believed, else pi_s, and its kind."""
    n_classes = pi_s.shape[0]
    log_C, enough = math.log(n_classes), max(class_prior.MIN_SAMPLES_TO_BELIEVE, n_classes)
    source, doubted, prior = (number_of(kind) for kind in ("source", "doubted", "prior"))

    def tested() -> list[GraphArray]:
        halves = p[::2], p[1::2]
        gains = [
            log_likelihood_ratio(held_out, estimated_prior(half, pi_s, n_classes), pi_s)
            for half, held_out in (halves, halves[::-1])
        ]
        gain = (gains[0] + gains[1]) / (2.0 * log_C)

        def estimated() -> list[GraphArray]:
            pi = estimated_prior(p, pi_s, n_classes)
            information = entropy(p.mean(0)) - entropy(p).mean()
            is_contradicted = information > entropy(pi) + class_prior.PRIOR_SURPLUS * log_C
            return [xp.where(is_contradicted, pi_s, pi), xp.where(is_contradicted, doubted, prior)]

        small = gain < class_prior.MIN_GAIN_DOUBTED
        return xp.choose(
            (gain < class_prior.MIN_GAIN_BELIEVED) | (xp.length(p) < enough),
            lambda: [pi_s + 0.0, xp.where(small, source, doubted)],
            estimated,
        )

    few = xp.length(p) < class_prior.MIN_SAMPLES_TO_DOUBT
    return xp.choose(few, lambda: [pi_s + 0.0, source + 0], tested)


# --- both ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LabelGraph:
    """`StreamLabels` on arrays of a graph."""

    chain: ChainGraph
    recent: GraphArray  # (PRIOR_WINDOW, C); the last `count` rows are valid
    count: GraphArray  # (), int64
    prior: GraphArray  # (C,), of a shuffled stream; the source's unless another is believed
    kind: GraphArray  # (), int64, an index into `KINDS`

    @classmethod
    def of(
        cls,
        source: GraphArray,  # (C,)
        parts: Iterable[GraphArray],  # in the order of `parts`
    ) -> Self:
        """Restore the labels of a stream from its state tensors."""
        held, names = list(parts), stream_labels.STORED
        chain = dict(zip(names, held[: len(names)], strict=True))
        return cls(ChainGraph(source, **chain), *held[len(names) :])

    def parts(self) -> list[GraphArray]:
        """The state tensors, in the order of `initial_labels`."""
        remembered = [getattr(self.chain, name) for name in stream_labels.STORED]
        return [*remembered, self.recent, self.count, self.prior, self.kind]

    def is_kind(self, kind: Kind) -> GraphArray:  # ()
        """Whether the stream is of this kind."""
        return self.kind.equals(KINDS.index(kind))

    def observe(self, p: GraphArray) -> tuple[Self, GraphArray]:  # (n, C) -> and (C,)
        """Observe the probabilities of the next samples; also return their class mixture."""
        count = xp.minimum(self.count + xp.length(p), stream_labels.PRIOR_WINDOW)
        recent = xp.concat([self.recent, p])[-stream_labels.PRIOR_WINDOW :]
        chain, in_runs = self.chain.observe(p)
        is_evident = chain.is_evident

        def shuffled() -> list[GraphArray]:
            prior, kind = select_prior(recent[-count:], chain.prior)
            is_doubted = is_evident & kind.equals(KINDS.index("source"))
            return [prior, xp.where(is_doubted, number_of("doubted"), kind)]

        prior, kind = xp.choose(
            is_evident & ~chain.is_contradicted,
            lambda: [chain.prior + 0.0, number_of("runs") + 0],
            shuffled,
        )
        seen = type(self)(chain, recent, count, prior, kind)
        return seen, xp.where(seen.is_kind("runs"), in_runs, prior)

    def answers(self, p: GraphArray) -> GraphArray:  # (n, C) -> (n, C)
        """Label probabilities of the samples, for a stream in runs or with another prior."""
        return xp.choose_one(
            self.is_kind("runs"),
            lambda: self.chain.posterior(p),
            lambda: apply_prior(p, self.prior, self.chain.prior),
        )

    def advance(self, p: GraphArray) -> Self:  # (n, C)
        """Make the last of these samples the predecessor of the next ones."""
        return replace(self, chain=self.chain.advance(p))

    @property
    def correction(self) -> GraphArray:  # (C,)
        """Offset of the logits under the prior of a shuffled stream."""
        return xp.log(self.prior / self.chain.prior)


def initial_labels(prior: Floats) -> dict[str, NDArray[np.generic]]:
    """The state of the labels before the first sample."""
    chain = LabelChain.start(prior)
    return {
        **{name: np.array(getattr(chain, name)) for name in stream_labels.STORED},
        "recent": np.zeros((stream_labels.PRIOR_WINDOW, len(prior))),
        "recent.count": np.array(0),
        "prior": prior,
        "kind": np.array(KINDS.index("source")),
    }


def merged_mixture(
    past: GraphArray, kept: GraphArray, batch: GraphArray, samples: GraphArray
) -> GraphArray:  # (C,)
    """Class mixture of the samples behind merged moments, weighted like the moments."""
    return past + samples / (kept + samples) * (batch - past)


def is_reference(mixture: GraphArray, source: GraphArray) -> GraphArray:  # (C,), (C,) -> ()
    """Whether a class mixture equals the source's, up to estimation noise."""
    return 0.5 * xp.absolute(mixture - source).sum() < stream_labels.SAME


def number_of(kind: Kind) -> GraphArray:  # (), int64
    """Index of a kind in `KINDS`."""
    return xp.constant(KINDS.index(kind))
