"""k-NN: the majority among the nearest source features."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from caster.adapt.frozen import Frozen
from caster.adapt.protocol import OnFeatures, Prediction, Retained, nbytes
from caster.adapt.source import Source
from caster.core.arrays import like
from caster.errors import CasterError
from caster.models.protocol import FrozenModel, Outputs
from caster_bench.methods.neighbours import Neighbours
from caster_bench.methods.tensors import features_of, labelled_features, plain


class KNN(OnFeatures):
    """Votes of the k source samples nearest in Euclidean distance, each of the same weight.

    As scikit-learn's KNeighborsClassifier; of samples equally far the first in the source counts,
    of classes with equally many votes the first column wins. The scores are shares of the votes.
    k is 20 by default, the usual one for frozen features since DINO (Caron et al. 2021). The
    source's features are all kept: 100 MB for 50,000 of 512 numbers.

    >>> import numpy as np
    >>> from caster import wrap
    >>> model = wrap(lambda batch: (batch, batch), version="example-1")
    >>> source = Source(batches=[(np.array([[0.0, 0.0], [0.0, 1.0], [5.0, 5.0]]), [0, 0, 1])])
    >>> KNN(model, source, k=2).predict(np.array([[4.0, 4.0]])).logits
    array([[0.5, 0.5]])
    """

    def __init__(
        self, model: FrozenModel, source: Source, *, name: str = "knn", k: int = 20
    ) -> None:
        super().__init__(model)
        if not isinstance(k, int) or k < 1:
            raise CasterError(f"k of {name} is a number of neighbours from 1 up, not {k!r}")
        self.name = name
        self.k = k
        self.frozen = Frozen(model, source)
        parts = list(labelled_features(model, source, name))
        self.n_classes = parts[0][2]
        with plain(parts[0][0]):
            self._neighbours = Neighbours(torch.cat([features for features, *_ in parts]))
            columns = torch.cat([torch.from_numpy(labels) for _, labels, _ in parts])
            self._labels = columns.to(self._neighbours.bank.device)  # (N,)
        if len(self._labels) < k:
            raise CasterError(f"{name} asks {k} neighbours, the source has {len(self._labels)}")

    def answer(self, outputs: Outputs) -> Prediction:
        """Shares of the votes."""
        features = features_of(outputs, self.name)
        with plain(features):
            shares = self._shares(features.to(self._neighbours.bank))
            return Prediction(like(shares.to(features), outputs.features))

    def _shares(self, features: Tensor) -> Tensor:  # (B, d) -> (B, C)
        votes = self._labels[self._neighbours(features, self.k)]  # (B, k)
        return one_hot(votes, self.n_classes).sum(1) / self.k

    def retained(self) -> Retained:
        """The bank of features, their lengths and labels."""
        held = self._neighbours
        return Retained(features=nbytes(held.bank, held.halves, self._labels))
