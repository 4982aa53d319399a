"""Streams of labels, and the probabilities of a simulated classifier."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from caster.core.label_chain import LabelChain


def classifier(
    rng: np.random.Generator,
    labels: NDArray[np.int64],  # (n,)
    accuracy: float,
    n_classes: int = 10,
    preferred: float = 0.0,  # share of samples predicted as class 0 whatever they are
    lowest: float = 0.4,  # confidence
) -> NDArray[np.float64]:  # (n, C)
    """Probabilities with random errors; the confidence is uniform and does not know of them."""
    n = len(labels)
    wrong = (labels + rng.integers(1, n_classes, n)) % n_classes
    predicted = np.where(rng.random(n) < accuracy, labels, wrong)
    predicted[rng.random(n) < preferred] = 0
    top = rng.uniform(lowest, 1, (n, 1))
    return np.where(np.eye(n_classes)[predicted] > 0, top, (1 - top) / (n_classes - 1))


def follow(
    p: NDArray[np.float64],  # (n, C)
    batch_size: int,
) -> Iterator[tuple[LabelChain, NDArray[np.float64]]]:
    """The chain as each batch finds it, having observed it, and the batch."""
    chain = LabelChain.start(np.full(p.shape[1], 1 / p.shape[1]))
    for start in range(0, len(p), batch_size):
        batch = p[start : start + batch_size]
        chain = chain.observe(batch)
        yield chain, batch
        chain = chain.advance(batch)


def verdicts(p: NDArray[np.float64], batch_size: int) -> NDArray[np.bool_]:  # (batches,)
    """Whether the stream is taken for correlated, batch by batch."""
    return np.array([chain.is_correlated for chain, _ in follow(p, batch_size)])
