"""NumPy references for gradient methods: softmax, central differences, learnt parameters."""

from __future__ import annotations

import numpy as np
import torch


def softmax(x):
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def slope(loss, at, step=1e-6):
    """Gradient of a loss by central differences."""
    moves = step * np.eye(len(at))
    return np.array([(loss(at + move) - loss(at - move)) / (2 * step) for move in moves])


def learnt(method):
    """Learnt parameters of a method, flattened."""
    return torch.cat([p.detach().flatten() for p in method.parameters.values()]).double().numpy()
