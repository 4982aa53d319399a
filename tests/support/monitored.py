"""A small problem for the monitor: Gaussian classes, their true posterior, and a fitted adapter."""

from __future__ import annotations

from functools import cache

import numpy as np

import caster
from caster.config import Settings
from caster.core.types import SourceMoments
from caster.state import Sketch, State

N_CLASSES, WIDTH = 6, 5
PRIORS = np.full(N_CLASSES, 1 / N_CLASSES)
MEANS = 1.6 * np.random.default_rng(7).standard_normal((N_CLASSES, WIDTH))
FEW = np.where(np.arange(N_CLASSES) < 2, 0.5, 0.0)


def draw(rng, n, priors=PRIORS, shift=0.0):
    """Features, their probabilities under the source, labels."""
    y = rng.choice(N_CLASSES, n, p=priors)
    z = MEANS[y] + rng.standard_normal((n, WIDTH))
    z[:, 0] += shift
    logits = head(z)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    return z, p / p.sum(axis=1, keepdims=True), y


def head(z):
    return -0.5 * ((z[:, None] - MEANS) ** 2).sum(axis=2)


def state(rng, n=256) -> State:
    """A state with a fresh sketch; its directions are the features."""
    z, p, y = draw(rng, n)
    u = np.stack([1 - p.max(axis=1)] * 2, axis=1).astype(np.float32)
    wrong = np.stack([p.argmax(axis=1) != y] * 2, axis=1).astype(np.uint8)
    sketch = Sketch(z.astype(np.float32), p.astype(np.float16), y, u, wrong)
    eye = np.eye(WIDTH, dtype=np.float32)
    moments = SourceMoments(eye, MEANS, np.stack([eye] * N_CLASSES), np.full(N_CLASSES, n))
    return State(moments, np.arange(N_CLASSES), Settings(), sketch=sketch)


@cache
def adapter(sketch: bool = True):
    """Feature transport, fitted to 1,500 samples."""
    model = caster.wrap(lambda batch: (batch, head(batch)), version="monitored-1")
    z, _, y = draw(np.random.default_rng(0), 1_500)
    return caster.fit(model, [(z, y)], sketch=sketch)
