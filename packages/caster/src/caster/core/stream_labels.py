"""Which classes the samples of a stream have: in runs, or shuffled under some prior."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from caster.core.class_prior import believed_prior, corrected
from caster.core.label_chain import LabelChain

Floats = NDArray[np.float64]

PRIOR_WINDOW = 512  # samples behind the prior of a shuffled stream
# Total variation below which two mixtures count as equal: the noise of an estimate.
SAME = 0.02


@dataclass(frozen=True, eq=False)
class StreamLabels:
    """What a stream's past says about its classes, and the mixture of its moments.

    A correlated stream's answers go through the chain. A shuffled stream's are the network's own,
    corrected if its class prior clearly differs from the source's.

    >>> labels = StreamLabels.start(np.full(4, 0.25))
    >>> shuffled = np.eye(4)[np.arange(64) * 7 % 4] * 0.6 + 0.1
    >>> labels.observe(shuffled).answers(shuffled) is None
    True
    >>> in_runs = shuffled[np.argsort(shuffled.argmax(axis=1))]
    >>> labels.observe(in_runs).answers(in_runs) is None
    False
    """

    chain: LabelChain
    recent: Floats  # (m, C), probabilities of the last samples

    @classmethod
    def start(cls, prior: NDArray[Any]) -> Self:  # (C,)
        """A stream without samples."""
        return cls(LabelChain.start(prior), np.empty((0, len(prior))))

    def observe(self, p: NDArray[Any]) -> Self:  # (n, C)
        """Update the evidence by the probabilities of the next samples."""
        recent = np.concatenate([self.recent, p])[-PRIOR_WINDOW:]
        return replace(self, chain=self.chain.observe(p), recent=recent)

    @cached_property
    def prior(self) -> Floats:  # (C,)
        """The class prior of a shuffled stream; the source's unless another one is evident."""
        return believed_prior(self.recent, self.chain.prior)

    @property
    def is_source(self) -> bool:
        """Whether the samples come shuffled and in the mixture of the source."""
        return not self.chain.is_correlated and self.prior is self.chain.prior

    def mixture(self, p: NDArray[Any]) -> Floats:  # (n, C) -> (C,)
        """The class mixture of a batch with these probabilities."""
        return self.chain.mixture(p) if self.chain.is_correlated else self.prior

    def answers(self, p: NDArray[Any]) -> Floats | None:  # (n, C)
        """Probabilities of the samples' labels; None if they are p, unchanged."""
        if self.chain.is_correlated:
            return self.chain.posterior(p)
        return None if self.is_source else corrected(p, self.prior, self.chain.prior)

    @property
    def correction(self) -> Floats:  # (C,)
        """What the prior of a shuffled stream adds to logits."""
        return np.asarray(np.log(self.prior / self.chain.prior))

    def advance(self, p: NDArray[Any]) -> Self:  # (n, C)
        """Move past the samples."""
        moved = replace(self, chain=self.chain.advance(p))
        if "prior" in vars(self):
            vars(moved)["prior"] = self.prior  # of the same samples: EM is not run again
        return moved

    def state(self, name: str) -> dict[str, NDArray[Any]]:
        """Everything it remembers, as named arrays; the source's prior is not part of it."""
        chain = self.chain
        return {
            f"{name}.last": chain.last,
            f"{name}.evidence": chain.evidence,
            f"{name}.totals": chain.totals,
            f"{name}.count": np.array(chain.count),
            f"{name}.recent": self.recent,
        }

    def resumed(self, state: Any, name: str) -> Self:
        """Continue from a `state`; ValueError if it is invalid."""
        chain = self.chain
        names = ("last", "evidence", "totals")
        parts = {part: np.asarray(state[f"{name}.{part}"], np.float64) for part in names}
        recent, count = (np.asarray(state[f"{name}.{n}"], np.float64) for n in ("recent", "count"))
        fits = all(parts[part].shape == getattr(chain, part).shape for part in names)
        fits = fits and recent.ndim == 2 and recent.shape[1] == len(chain.prior)
        known = (*parts.values(), recent, count)
        if not fits or not all(np.isfinite(part).all() for part in known):
            raise ValueError("impossible labels")
        return replace(self, chain=replace(chain, **parts, count=float(count)), recent=recent)


def merged_mixture(past: Floats, kept: float, batch: Floats, samples: int) -> Floats:  # (C,)
    """Mixture of the samples behind merged moments: both are sums over samples."""
    share = samples / (kept + samples)
    return past + share * (batch - past)


def as_reference(mixture: Floats, source: Floats) -> Floats | None:  # (C,), (C,)
    """The mixture to align with; None if it is the source's, up to the noise of an estimate.

    >>> as_reference(np.array([0.51, 0.49]), np.array([0.5, 0.5])) is None
    True
    """
    return None if 0.5 * np.abs(mixture - source).sum() < SAME else mixture
