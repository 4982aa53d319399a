"""k-NN: weighted vote of the most similar source features."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from caster.core.arrays import like
from caster.errors import CasterError
from caster.io.labels import as_labels, encode
from caster.models.protocol import FrozenModel, Outputs
from caster_bench.methods.features import finite_features, full_precision
from caster_bench.methods.protocol import FeatureMethod, Prediction, Retained, count, nbytes, number
from caster_bench.methods.source import Source

REVISION = 3  # 2: cosine similarity and weights; 3: by one product, ties among the nearest alone
CHUNK = 2**25  # numbers in a temporary
SPARE = 16  # candidates beyond k, to break ties


@dataclass(eq=False, repr=False, kw_only=True)
class KNN(FeatureMethod):
    """Vote of the k source samples of highest cosine similarity s, weights exp(s / temperature).

    As DINO evaluates frozen features (Caron et al., "Emerging Properties in Self-Supervised Vision
    Transformers", ICCV 2021), with its k of 20 and temperature of 0.07. Ties in similarity go to
    the earlier source sample (among the k + 16 most similar), ties in votes to the earlier class.
    Scores are shares of the weights.
    All source features are stored, scaled to length 1: 100 MB for 50,000 of width 512.

    >>> import numpy as np
    >>> from caster import wrap
    >>> model = wrap(lambda batch: (batch, batch), version="example-1")
    >>> source = Source(batches=[(np.array([[0.0, 1.0], [0.0, 2.0], [5.0, 5.0]]), [0, 0, 1])])
    >>> KNN(model, source, k=2, temperature=1.0).predict(np.array([[1.0, 1.0]])).logits.round(2)
    array([[0.43, 0.57]])
    """

    name: str = "knn"
    k: int = count(20)
    temperature: float = number(0.07, above=True)

    def __post_init__(self, source: Source) -> None:
        super().__post_init__(source)
        parts = list(labelled_features(self.model, source, self.name))
        self.n_classes = parts[0][2]
        with full_precision(parts[0][0]):
            self._bank = torch.cat([normalize(features, dim=1) for features, *_ in parts])  # (N, d)
            columns = torch.cat([torch.from_numpy(labels) for _, labels, _ in parts])
            self._labels = columns.to(self._bank.device)  # (N,)
        if (found := len(self._labels)) < self.k:
            raise CasterError(f"{self.name} needs {self.k} neighbours, the source has {found}")

    def answer(self, outputs: Outputs) -> Prediction:
        """Return shares of the weights."""
        features = finite_features(outputs, self.name)
        with full_precision(features):
            queries = normalize(features, dim=1).to(self._bank)
            similarity, nearest = most_similar(self._bank, queries, self.k)
            weights = (similarity / self.temperature).softmax(dim=1)
            votes = one_hot(self._labels[nearest], self.n_classes)  # (B, k, C)
            shares = (weights[:, None] @ votes.double())[:, 0]
            return Prediction(like(shares.to(features), outputs.features))

    def retained(self) -> Retained:
        """Bytes of the stored features and their labels."""
        return Retained(features=nbytes(self._bank, self._labels))


def labelled_features(
    model: FrozenModel, source: Source, name: str
) -> Iterator[tuple[Tensor, NDArray[np.int64], int]]:  # (B, d), (B,), C
    """Features of the source, their classes as column numbers, and the number of columns.

    Columns are the state's classes or, without a state, the model's logits.
    """
    for images, labels in source.labelled(name):
        outputs = model(images)
        if source.state is not None:
            classes = source.state.classes
        elif outputs.logits is not None:
            classes = np.arange(outputs.logits.shape[1])
        else:
            raise CasterError(f"{name} needs a state: {model.name} has no classes of its own")
        features, columns = finite_features(outputs, name), encode(as_labels(labels), classes)
        if len(features) != len(columns):
            raise CasterError(f"{len(features)} source images have {len(columns)} labels")
        yield features, columns, len(classes)


def most_similar(
    bank: Tensor,  # (N, d)
    queries: Tensor,  # (B, d)
    k: int,
) -> tuple[Tensor, Tensor]:  # (B, k) both
    """Products of every query with its k most similar rows, highest first, and their numbers.

    In float64, because coarser products would misorder rows that are alike. Ties go to the first
    row, unless more than `SPARE` rows tie for the last places.

    >>> bank = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.6, 0.8], [1.0, 0.0]])
    >>> most_similar(bank, torch.tensor([[1.0, 0.0]]), 2)[1]
    tensor([[1, 3]])
    """
    wide = queries.double()
    products = wide.new_empty((len(wide), 0))
    rows = torch.empty((len(wide), 0), dtype=torch.int64, device=wide.device)
    step = max(1, CHUNK // max(queries.shape))
    for start in range(0, len(bank), step):
        part = wide @ bank[start : start + step].double().T
        numbers = torch.arange(start, start + part.shape[1], device=wide.device)
        products = torch.cat([products, part], 1)
        rows = torch.cat([rows, numbers.expand_as(part)], 1)
        products, index = products.topk(min(k + SPARE, products.shape[1]))
        rows = rows.gather(1, index)
    rows, order = rows.sort(dim=1)
    products, order = products.gather(1, order).sort(dim=1, descending=True, stable=True)
    return products[:, :k], rows.gather(1, order[:, :k])
