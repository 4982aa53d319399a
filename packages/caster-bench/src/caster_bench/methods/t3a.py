"""T3A: class prototypes from confident test features, in place of the classifier's weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from caster.core.arrays import like
from caster.errors import CasterError
from caster.models.protocol import Outputs
from caster_bench.methods.features import LinearHead, finite_features, full_precision
from caster_bench.methods.gradient_method import entropy
from caster_bench.methods.protocol import FeatureMethod, Prediction, Retained, count, nbytes
from caster_bench.methods.source import Source

REVISION = 1


@dataclass(eq=False, repr=False, kw_only=True)
class T3A(FeatureMethod):
    """Score by the direction of each class's supports: its confident samples so far.

    Iwasawa and Matsuo, "Test-Time Classifier Adjustment Module for Model-Agnostic Domain
    Generalization", NeurIPS 2021. Supports start with the rows of the classifier's weight. Every
    sample of a batch becomes a support of the class the frozen model predicts before the batch is
    answered; each class keeps the `filter_k` of lowest entropy. Supports are scaled to length 1,
    summed per class, and the sums scaled to length 1: their products with features are the scores.

    The paper selects `filter_k` from 1, 5, 20, 50, 100 and -1 (no limit) on a validation set. 20
    is FOA's choice for ImageNet; 100 (presets "cifar10" and "cifar100") is that of public
    benchmarks for CIFAR-10, and the best of these on our spare corruptions. With -1 only sums are
    stored.

    >>> from caster import wrap
    >>> net = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(2, 2, bias=False))
    >>> net[1].weight.data = torch.tensor([[3.0, 0.0], [0.0, 3.0]])
    >>> T3A(wrap(net), Source()).predict(torch.tensor([[1.0, 0.0]])).logits
    tensor([[1., 0.]])
    """

    name: str = "t3a"
    filter_k: int = count(20, least=-1)  # -1: no limit

    def __post_init__(self, source: Source) -> None:
        if self.filter_k == 0:
            raise CasterError(f"filter_k of {self.name} must be 1 or more, not 0")
        super().__post_init__(source)
        self._head = LinearHead(self.model, source, self.name)
        self.reset()

    def reset(self) -> None:
        """Drop all supports; the classifier's rows are added again with the next batch."""
        self._supports = None if self.filter_k == -1 else Supports(self.filter_k)
        self._sums: Tensor | None = None  # (C, d), in float64: rows are added and subtracted

    def answer(self, outputs: Outputs) -> Prediction:
        """Add the batch to the supports, and score it by all of them."""
        features = finite_features(outputs, self.name)
        with full_precision(features):
            weight, bias = self._head(outputs)
            if self._sums is None:
                self._sums = torch.zeros_like(weight, dtype=torch.float64)
                self._add(weight, weight @ weight.T + bias)
            self._add(features, self._head.logits(outputs))
            prototypes = normalize(self._sums, dim=1).to(features)
            return Prediction(like(features @ prototypes.T, outputs.features))

    def _add(
        self,
        rows: Tensor,  # (B, d)
        logits: Tensor,  # (B, C), of those rows
    ) -> None:
        assert self._sums is not None
        rows, classes = normalize(rows, dim=1), logits.argmax(dim=1)
        if self._supports is not None:
            change = self._supports.add(rows, classes, entropy(logits))
            added = change.added
            rows, classes = (
                torch.cat([rows[added], -change.removed]),
                torch.cat([classes[added], change.removed_classes]),
            )
        sums = self._sums.to(rows.device)
        # A product, because index_add sums in no fixed order on a GPU.
        self._sums = sums + one_hot(classes, len(sums)).T.double() @ rows.double()

    def retained(self) -> Retained:
        """Bytes of the supports and their sums."""
        bank = 0 if self._supports is None else self._supports.nbytes()
        return Retained(self._head.nbytes(), nbytes(self._sums), bank)


@dataclass(frozen=True, eq=False)
class Change:
    """What a batch changed in the supports."""

    added: Tensor  # indices of the batch's rows that are now supports
    removed: Tensor  # (n, d), rows that no longer are
    removed_classes: Tensor  # (n,)


class Supports:
    """The `per_class` rows of lowest entropy of every class; ties go to the first.

    Rows stay where they were written, and new ones overwrite removed ones: the cost of a batch
    depends on its size, not on how much is stored.

    >>> supports = Supports(per_class=1)
    >>> zero = torch.zeros(1, dtype=torch.int64)
    >>> supports.add(torch.tensor([[1.0]]), zero, torch.tensor([0.3])).added
    tensor([0])
    >>> supports.add(torch.tensor([[2.0]]), zero, torch.tensor([0.2])).removed
    tensor([[1.]])
    """

    def __init__(self, per_class: int) -> None:
        self.per_class = per_class
        self._rows: Tensor | None = None  # (slots, d)
        # In order of arrival: entropy, class, and slot among the rows.
        self._entropies, self._classes = torch.empty(0), torch.empty(0, dtype=torch.int64)
        self._slots = torch.empty(0, dtype=torch.int64)

    def add(
        self,
        rows: Tensor,  # (B, d)
        classes: Tensor,  # (B,)
        entropies: Tensor,  # (B,)
    ) -> Change:
        """Add a batch, and remove rows that are no longer among the lowest."""
        n = len(self._slots)
        device = rows.device
        all_entropies = torch.cat([self._entropies.to(entropies), entropies])
        all_classes = torch.cat([self._classes.to(device), classes])
        kept = lowest(all_entropies, all_classes, self.per_class)
        stay, added = kept[:n], kept[n:].nonzero()[:, 0]
        slots = self._slots.to(device)
        free = slots[~stay]
        store = self._resized(rows, n + len(added) - len(free))
        change = Change(added, store[free], all_classes[:n][~stay])
        # No class loses more rows than it gains, so every free slot is used again.
        new = torch.arange(n, n + len(added) - len(free), device=device)
        used = torch.cat([free, new])
        store[used] = rows[added]
        self._entropies, self._classes = all_entropies[kept], all_classes[kept]
        self._slots = torch.cat([slots[stay], used])
        return change

    def _resized(self, rows: Tensor, count: int) -> Tensor:
        """The stored rows, with at least `count` slots."""
        store = rows.new_empty((0, rows.shape[1])) if self._rows is None else self._rows.to(rows)
        if len(store) < count:
            more = rows.new_empty((max(count, 2 * len(store)) - len(store), rows.shape[1]))
            store = torch.cat([store, more])
        self._rows = store
        return store

    def nbytes(self) -> int:
        """Bytes stored, free slots included."""
        return nbytes(self._rows, self._entropies, self._classes, self._slots)


def lowest(values: Tensor, classes: Tensor, count: int) -> Tensor:  # (n,), (n,) -> (n,)
    """Whether each value is among the `count` lowest of its class; ties go to the first.

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
