"""k-NN: weighted vote of the nearest source features, by an exact search."""

from __future__ import annotations

from collections.abc import Iterator

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
from caster_bench.methods.protocol import (
    Frozen,
    OnFeatures,
    Prediction,
    Retained,
    check_count,
    check_number,
    nbytes,
)
from caster_bench.methods.source import Source

REVISION = 2  # cosine similarity and weights, before: Euclidean distance and equal votes
CHUNK = 2**25  # numbers in a temporary
SMALL_CHUNK = 2**22  # numbers in a temporary that is read and written several times
SPARE = 16  # candidates beyond the k asked for
ERROR_MARGIN = 8  # observed errors must be this many times below the bound for it to be trusted


class KNN(OnFeatures):
    """Vote of the k source samples of highest cosine similarity s, weights exp(s / temperature).

    As DINO evaluates frozen features (Caron et al. 2021), with its k of 20 and temperature of 0.07.
    Ties in similarity go to the earlier source sample, ties in votes to the earlier class. Scores
    are shares of the weights. All source features are stored, scaled to length 1: 100 MB for 50,000
    of width 512.

    >>> import numpy as np
    >>> from caster import wrap
    >>> model = wrap(lambda batch: (batch, batch), version="example-1")
    >>> source = Source(batches=[(np.array([[0.0, 1.0], [0.0, 2.0], [5.0, 5.0]]), [0, 0, 1])])
    >>> KNN(model, source, k=2, temperature=1.0).predict(np.array([[1.0, 1.0]])).logits.round(2)
    array([[0.43, 0.57]])
    """

    def __init__(
        self,
        model: FrozenModel,
        source: Source,
        *,
        name: str = "knn",
        k: int = 20,
        temperature: float = 0.07,
    ) -> None:
        super().__init__(model)
        check_count(name, k=k)
        check_number(name, above=True, temperature=temperature)
        self.name = name
        self.k = k
        self.temperature = temperature
        self.frozen = Frozen(model, source)
        parts = list(labelled_features(model, source, name))
        self.n_classes = parts[0][2]
        with full_precision(parts[0][0]):
            bank = torch.cat([normalize(features, dim=1) for features, *_ in parts])
            self._neighbours = Neighbours(bank)
            columns = torch.cat([torch.from_numpy(labels) for _, labels, _ in parts])
            self._labels = columns.to(self._neighbours.bank.device)  # (N,)
        if len(self._labels) < k:
            raise CasterError(f"{name} needs {k} neighbours, the source has {len(self._labels)}")

    def answer(self, outputs: Outputs) -> Prediction:
        """Return shares of the weights."""
        features = finite_features(outputs, self.name)
        with full_precision(features):
            bank = self._neighbours.bank
            queries = normalize(features, dim=1).to(bank)
            nearest = self._neighbours(queries, self.k)  # (B, k)
            similarity = (bank[nearest].double() @ queries.double()[:, :, None])[..., 0]
            weights = (similarity / self.temperature).softmax(dim=1)
            votes = one_hot(self._labels[nearest], self.n_classes)  # (B, k, C)
            shares = (weights[:, None] @ votes.double())[:, 0]
            return Prediction(like(shares.to(features), outputs.features))

    def retained(self) -> Retained:
        """Bytes of the stored features, their squared lengths and labels."""
        search = self._neighbours
        return Retained(features=nbytes(search.bank, search.half_squares, self._labels))


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


class Neighbours:
    """Exact nearest rows in Euclidean distance as computed in float64; ties go to the first row.

    A matrix product finds candidates, but |a - b|² = |a|² - 2 ab + |b|² cancels if a and b are
    close, so rounding may misorder or miss some. Therefore the distances of a few more candidates
    than asked for are recomputed from differences in float64, and a rounding bound proves that all
    other rows are farther. If it cannot, the search is repeated in float64, and finally without
    the product.

    >>> bank = torch.tensor([[0.0], [3.0], [1.0], [1.0]])
    >>> Neighbours(bank)(torch.tensor([[2.0]]), 2)
    tensor([[1, 2]])
    """

    def __init__(self, bank: Tensor) -> None:  # (N, d)
        self.bank = bank
        pieces = _pieces(bank, bank.shape[1], SMALL_CHUNK)
        self.half_squares = torch.cat([part.double().square().sum(1) for part in pieces]) / 2
        self._longest = (2 * self.half_squares.max()).sqrt()

    def __call__(self, queries: Tensor, k: int) -> Tensor:  # (B, d) -> (B, k)
        """Indices of the k nearest rows of every query, nearest first."""
        found, proven = self._by_product(queries, k, self.bank.dtype)
        if not bool(proven.all()):
            left = (~proven).nonzero()[:, 0]
            found[left], proven = self._by_product(queries[left], k, torch.float64)
            for query in left[~proven].tolist():
                found[query] = self._by_difference(queries[query], k)
        return found

    def _by_product(self, queries: Tensor, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The k nearest, (B, k), and whether they are proven to be, (B,)."""
        count = min(k + SPARE, len(self.bank))
        scores, candidates = self._candidates(queries.to(dtype), count)
        wide = queries.double()
        exact = self._distances(wide, candidates)
        distances, order = exact.sort(dim=1, stable=True)
        lengths = wide.square().sum(1, keepdim=True)
        # The error of a sum of d + 1 products in any order is at most (d + 1) eps/2 their sizes.
        sizes = self._longest * (lengths.sqrt() + self._longest / 2)  # (B, 1)
        bound = (queries.shape[1] + 2) * torch.finfo(dtype).eps * sizes
        errors = (scores.double() - (exact - lengths) / 2).abs().amax(1, keepdim=True)
        others = scores.double().amax(1, keepdim=True) - bound  # lower bound of all other scores
        nearer = (distances[:, k - 1 : k] - lengths) / 2 < others
        proven = nearer & (errors * ERROR_MARGIN <= bound)  # else products round by other rules
        complete = count == len(self.bank)
        return candidates.gather(1, order[:, :k]), proven[:, 0] | complete

    def _candidates(self, queries: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The lowest (|b|² - 2 ab) / 2 and their rows, in the order of rows: (B, count) both."""
        scores = queries.new_empty((len(queries), 0))
        rows = torch.empty((len(queries), 0), dtype=torch.int64, device=queries.device)
        start = 0
        for bank in _pieces(self.bank, max(queries.shape), CHUNK):
            half_squares = self.half_squares[start : start + len(bank)].to(queries.dtype)
            part = torch.addmm(half_squares, queries, bank.to(queries.dtype).T, alpha=-1)
            best, index = part.topk(min(count, len(bank)), largest=False, sorted=False)
            scores, rows = torch.cat([scores, best], 1), torch.cat([rows, index + start], 1)
            start += len(bank)
            if scores.shape[1] > count:
                scores, index = scores.topk(count, largest=False, sorted=False)
                rows = rows.gather(1, index)
        rows, order = rows.sort(dim=1)
        return scores.gather(1, order), rows

    def _distances(self, wide: Tensor, rows: Tensor) -> Tensor:  # (B, d), (B, n) -> (B, n)
        """Squared distances of each query to its own rows, from differences in float64."""
        numbers = wide.shape[1] * rows.shape[1]
        pieces = (_pieces(part, numbers, SMALL_CHUNK) for part in (wide, rows))
        return torch.cat(
            [
                self.bank[index].double().sub_(part[:, None]).square_().sum(2)
                for part, index in zip(*pieces, strict=True)
            ]
        )

    def _by_difference(self, query: Tensor, k: int) -> Tensor:  # (d,) -> (k,)
        """The k nearest by all distances in float64."""
        wide = query.double()
        parts = _pieces(self.bank, len(query), SMALL_CHUNK)
        distances = torch.cat([(part.double() - wide).square().sum(1) for part in parts])
        return distances.sort(stable=True).indices[:k]


def _pieces(rows: Tensor, numbers: int, most: int) -> list[Tensor]:
    """Split rows so that a piece makes at most `most` numbers, at `numbers` per row."""
    step = max(1, most // numbers)
    return [rows[start : start + step] for start in range(0, len(rows), step)]
