"""A model in float64 whose images are its features: what the methods on features do, to the bit."""

from __future__ import annotations

import numpy as np

from caster.models.protocol import Outputs


class Exact:
    """A linear classifier, alone."""

    name, preprocessing, sha256 = "exact", None, "0" * 64

    def __init__(self, weight, bias=None) -> None:
        self.weight = np.asarray(weight, float)
        self.bias = np.zeros(len(self.weight)) if bias is None else np.asarray(bias, float)

    def verify(self) -> None:
        pass

    def __call__(self, batch) -> Outputs:
        batch = np.asarray(batch, float)
        return Outputs(batch, batch @ self.weight.T + self.bias)

    def linear_head(self):
        return self.weight, self.bias


def entropies(logits):
    """Of softmax(logits), a row at a time."""
    found = []
    for row in logits:
        p = np.exp(row - row.max())
        p /= p.sum()
        found.append(-sum(q * np.log(q) for q in p if q > 0))
    return np.array(found)


def blobs(n, d=6, n_classes=3, seed=0, spread=1.0):
    """Features (n, d) around one centre a class, and the classes."""
    centres = np.random.default_rng(99).normal(size=(n_classes, d)) * 2
    rng = np.random.default_rng(seed)
    labels = rng.integers(n_classes, size=n)
    return centres[labels] + spread * rng.normal(size=(n, d)), labels


def head(d=6, n_classes=3):
    """A classifier of those blobs: its rows point to their centres."""
    centres = np.random.default_rng(99).normal(size=(n_classes, d)) * 2
    return Exact(centres, -0.5 * (centres**2).sum(axis=1))
