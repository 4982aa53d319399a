"""A bounded bank of test features: those of lowest entropy in every predicted class."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from caster.adapt.protocol import nbytes


@dataclass(frozen=True, eq=False)
class Change:
    """What a batch changed in a bank."""

    came: Tensor  # indices of the batch's rows that are now in the bank
    gone: Tensor  # (n, d), rows that had to leave it
    gone_classes: Tensor  # (n,)


class Supports:
    """The `per_class` rows of lowest entropy of every class seen so far; of equal ones the first.

    Rows of features stay where they were written, and new ones take the places of those that had
    to leave: a batch costs what it brings, not what there is.

    >>> held = Supports(per_class=1)
    >>> zero = torch.zeros(1, dtype=torch.int64)
    >>> held.enter(torch.tensor([[1.0]]), zero, torch.tensor([0.3])).came
    tensor([0])
    >>> held.enter(torch.tensor([[2.0]]), zero, torch.tensor([0.2])).gone
    tensor([[1.]])
    """

    def __init__(self, per_class: int) -> None:
        self.per_class = per_class
        self._rows: Tensor | None = None  # (places, d)
        # In the order they came: entropy, class, and place among the rows.
        self._entropies, self._classes = torch.empty(0), torch.empty(0, dtype=torch.int64)
        self._places = torch.empty(0, dtype=torch.int64)

    def enter(
        self,
        rows: Tensor,  # (B, d)
        classes: Tensor,  # (B,)
        entropies: Tensor,  # (B,)
    ) -> Change:
        """Take in a batch, and let go of what is no longer among the lowest."""
        held = len(self._places)
        device = rows.device
        every = torch.cat([self._entropies.to(entropies), entropies])
        labels = torch.cat([self._classes.to(device), classes])
        kept = lowest(every, labels, self.per_class)
        stay, came = kept[:held], kept[held:].nonzero()[:, 0]
        places = self._places.to(device)
        free = places[~stay]
        store = self._room(rows, held + len(came) - len(free))
        change = Change(came, store[free], labels[:held][~stay])
        # No class loses more than it gains, so there is a place for every row that leaves.
        fresh = torch.arange(held, held + len(came) - len(free), device=device)
        taken = torch.cat([free, fresh])
        store[taken] = rows[came]
        self._entropies, self._classes = every[kept], labels[kept]
        self._places = torch.cat([places[stay], taken])
        return change

    def _room(self, rows: Tensor, count: int) -> Tensor:
        """The store, with room for so many rows."""
        store = rows.new_empty((0, rows.shape[1])) if self._rows is None else self._rows.to(rows)
        if len(store) < count:
            more = rows.new_empty((max(count, 2 * len(store)) - len(store), rows.shape[1]))
            store = torch.cat([store, more])
        self._rows = store
        return store

    def nbytes(self) -> int:
        """Bytes it holds, free places included."""
        return nbytes(self._rows, self._entropies, self._classes, self._places)


def lowest(values: Tensor, classes: Tensor, count: int) -> Tensor:  # (n,), (n,) -> (n,)
    """Which values are among the lowest `count` of their class; of equal ones the first.

    >>> lowest(torch.tensor([0.2, 0.1, 0.1, 0.9]), torch.tensor([0, 0, 0, 1]), 1)
    tensor([False,  True, False,  True])
    """
    order = values.argsort(stable=True)
    order = order[classes[order].argsort(stable=True)]  # by class, and by value within it
    ordered = classes[order]
    rank = torch.arange(len(order), device=order.device) - torch.searchsorted(ordered, ordered)
    among = torch.empty_like(rank, dtype=torch.bool)
    among[order] = rank < count
    return among
