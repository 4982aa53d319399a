"""Fisher information of what is learnt: how much the source's answers hang on each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from caster.adapt.network import Network, placed
from caster.models.torch import TorchModel


def fisher_information(
    network: Network,
    parameters: Mapping[str, nn.Parameter],
    batches: Iterable[Tensor],  # of source images, placed
) -> dict[str, Tensor]:  # a value an entry of each parameter
    """Squared gradients of the loss on the network's own answers, averaged over batches.

    The gradient is that of a batch's mean loss, and squared as such: EATA's authors compute it so,
    though the Fisher information proper squares the gradient of every sample.
    """
    values = list(parameters.values())
    squares = [torch.zeros_like(value) for value in values]
    count = 0
    for batch in batches:
        logits = network(batch)
        loss = cross_entropy(logits, logits.argmax(dim=1))
        found = torch.autograd.grad(loss, values, allow_unused=True, materialize_grads=True)
        squares = [sum_ + slope.square() for sum_, slope in zip(squares, found, strict=True)]
        count += 1
    return {name: sum_ / count for name, sum_ in zip(parameters, squares, strict=True)}


def first_images(
    model: TorchModel, batches: Iterable[tuple[Any, Any]], n: int, size: int
) -> Iterator[Tensor]:
    """The first n images of labelled batches, beside the model, `size` at a time.

    >>> import numpy as np
    >>> model = TorchModel(nn.Linear(1, 2))
    >>> [len(cut) for cut in first_images(model, [(np.zeros((5, 1)), None)] * 3, n=11, size=4)]
    [4, 4, 3]
    """
    held: Tensor | None = None
    for images, _ in batches:
        taken = images[:n]
        n -= len(taken)
        for start in range(0, len(taken) or 1, size):  # an empty batch once, to be refused
            piece = placed(model, taken[start : start + size])
            held = piece if held is None else torch.cat([held, piece])
            if len(held) >= size:
                yield held[:size]
                held = held[size:]
        if n == 0:
            break
    if held is not None and len(held):
        yield held
