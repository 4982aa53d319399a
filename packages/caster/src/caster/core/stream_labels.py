"""Class structure of a stream: classes in runs, or shuffled samples with some class prior."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from caster.core.class_prior import apply_prior, select_prior
from caster.core.label_chain import LabelChain

Floats = NDArray[np.float64]
Kind = Literal["runs", "doubted", "source", "prior"]

PRIOR_WINDOW = 512  # samples from which the prior of a shuffled stream is estimated
SAME = 0.02  # total variation below which two mixtures count as equal: estimation noise
# Smallest class prior, relative to a uniform one. The prior inside a network is rarely as uneven as
# the class counts of a small source, and dividing by a tiny prior would favour a rare class.
MIN_CLASS_PRIOR = 0.5
# Parts of the chain that are saved with a stream, the second group being no less than 0
NON_NEGATIVE = ("totals", "count", "sums", "entropies", "agreement")
STORED = ("last", "evidence", *NON_NEGATIVE)


@dataclass(frozen=True, eq=False)
class StreamLabels:
    """Class structure of a stream, estimated from its past.

    In a correlated stream, the label chain smooths the predictions. In a shuffled stream they are
    the network's own, corrected if the class prior clearly differs from the source's. While runs or
    another prior might be a class bias of the shifted network, nothing is corrected.

    >>> labels = StreamLabels.start(np.full(4, 0.25))
    >>> shuffled = np.eye(4)[np.arange(64) * 7 % 4] * 0.6 + 0.1
    >>> labels.observe(shuffled).answer(shuffled)[0] is None
    True
    >>> in_runs = shuffled[np.argsort(shuffled.argmax(axis=1))]
    >>> labels.observe(in_runs).answer(in_runs)[0] is None
    False
    """

    chain: LabelChain
    recent: Floats  # (m, C), probabilities of the last samples

    @classmethod
    def start(cls, prior: NDArray[Any]) -> Self:  # (C,)
        """Start a stream without samples."""
        return cls(LabelChain.start(prior), np.empty((0, len(prior))))

    @classmethod
    def of_counts(cls, counts: NDArray[Any]) -> Self:  # (C,)
        """Start a stream whose source had these class counts.

        >>> StreamLabels.of_counts(np.array([75, 25])).prior
        array([0.75, 0.25])
        """
        pi = (counts / counts.sum()).clip(min=MIN_CLASS_PRIOR / len(counts))
        return cls.start(pi / pi.sum())

    def observe(self, p: NDArray[Any]) -> Self:  # (n, C)
        """Update the evidence with the probabilities of the next batch."""
        recent = np.concatenate([self.recent, p])[-PRIOR_WINDOW:]
        return replace(self, chain=self.chain.observe(p), recent=recent)

    @cached_property
    def _believed(self) -> Floats | None:  # (C,)
        return select_prior(self.recent, self.chain.prior)

    @cached_property
    def kind(self) -> Kind:
        """Class structure: in runs, in doubt, or shuffled with the source's or another prior."""
        if self.chain.is_correlated:
            return "runs"
        if self._believed is None:
            return "doubted"
        if self._believed is not self.chain.prior:
            return "prior"
        return "doubted" if self.chain.is_doubted else "source"

    @property
    def prior(self) -> Floats:  # (C,)
        """Class prior of a shuffled stream: the source's unless another one is believed."""
        believed = self._believed if self.kind == "prior" else None
        return self.chain.prior if believed is None else believed

    @property
    def mixture(self) -> Floats:  # (C,)
        """Class mixture of the last batch; the source's if in doubt."""
        if self.kind != "runs":
            return self.prior
        assert self.chain.mixture is not None, "a resumed stream has no last batch"
        return self.chain.mixture

    def answer(self, p: NDArray[Any]) -> tuple[Floats | None, Self]:  # (n, C)
        """Corrected label probabilities, None if p needs no correction; and the advanced labels."""
        if self.kind == "runs":
            posterior, chain = self.chain.smooth(p)
            return posterior, self._advanced(chain)
        answers = apply_prior(p, self.prior, self.chain.prior) if self.kind == "prior" else None
        return answers, self.advance(p)

    @property
    def correction(self) -> Floats:  # (C,)
        """Log prior ratio that a shuffled stream adds to its logits."""
        return np.asarray(np.log(self.prior / self.chain.prior))

    def advance(self, p: NDArray[Any]) -> Self:  # (n, C)
        """Make the batch part of the past."""
        return self._advanced(self.chain.advance(p))

    def _advanced(self, chain: LabelChain) -> Self:
        moved = replace(self, chain=chain)
        found = {name: value for name, value in vars(self).items() if name in ("_believed", "kind")}
        vars(moved).update(found)  # the same samples: keep the results of EM
        return moved

    def state(self, name: str) -> dict[str, NDArray[Any]]:
        """The memory as named arrays, without the source's prior."""
        stored = {f"{name}.{part}": np.asarray(getattr(self.chain, part)) for part in STORED}
        return {**stored, f"{name}.recent": self.recent}

    def resumed(self, state: Any, name: str) -> Self:
        """Continue from a `state`; raise ValueError if it is invalid."""
        chain = self.chain
        recent = np.asarray(state[f"{name}.recent"], np.float64)
        found = {part: np.asarray(state[f"{name}.{part}"], np.float64) for part in STORED}
        fits = all(found[part].shape == np.shape(getattr(chain, part)) for part in STORED)
        fits = fits and recent.ndim == 2 and recent.shape[1] == len(chain.prior)
        fits = fits and all((found[p] >= 0).all() for p in NON_NEGATIVE)
        if not fits or not all(np.isfinite(part).all() for part in (*found.values(), recent)):
            raise ValueError("impossible labels")
        parts: dict[str, Any] = {p: x if x.ndim else float(x) for p, x in found.items()}
        return replace(self, chain=replace(chain, **parts), recent=recent)


def merged_mixture(past: Floats, kept: float, batch: Floats, samples: int) -> Floats:  # (C,)
    """Class mixture of merged moments, weighted by their numbers of samples."""
    share = samples / (kept + samples)
    return past + share * (batch - past)


def as_reference(mixture: Floats, source: Floats) -> Floats | None:  # (C,), (C,)
    """Mixture to align with; None if it is the source's up to estimation noise.

    >>> as_reference(np.array([0.51, 0.49]), np.array([0.5, 0.5])) is None
    True
    """
    return None if 0.5 * np.abs(mixture - source).sum() < SAME else mixture
