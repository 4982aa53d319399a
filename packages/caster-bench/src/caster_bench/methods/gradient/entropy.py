"""Entropy of predictions, which these methods lower."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import log_softmax


def entropy(logits: Tensor) -> Tensor:  # (B, C) -> (B,)
    """Entropy of softmax(logits), a value a sample, in nats.

    >>> import torch
    >>> entropy(torch.tensor([[0.0, 0.0], [0.0, 0.0]]))
    tensor([0.6931, 0.6931])
    """
    return cross_entropy(logits, logits)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:  # (B, C), (B, C) -> (B,)
    """Cross-entropy of softmax(logits) under softmax(target), a value a sample."""
    return -(target.softmax(dim=1) * log_softmax(logits, dim=1)).sum(dim=1)
