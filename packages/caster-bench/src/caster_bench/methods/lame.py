"""LAME: class probabilities that near features of a batch share, by a fixed point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from caster.core.arrays import like
from caster.errors import CasterError
from caster.models.protocol import Outputs
from caster_bench.methods.features import as_tensor, finite_features, full_precision
from caster_bench.methods.protocol import FeatureMethod, Prediction, count
from caster_bench.methods.source import Source, class_columns

REVISION = 1
STEPS = 100  # at most
TOLERANCE = 1e-8  # relative change of the energy at which the iteration stops
FLOOR = 1e-10  # added to probabilities before their logarithm
Affinity = Literal["rbf", "knn"]


@dataclass(eq=False, repr=False, kw_only=True)
class LAME(FeatureMethod):
    """Answer with the assignments z_i proportional to p_i exp(sum_j w_ij z_j) of a batch.

    Boudiaf et al., "Parameter-free Online Test-time Adaptation", CVPR 2022. p are the frozen
    model's probabilities and w the affinities of its features, scaled to length 1: with "rbf", the
    default of the authors' code, a Gaussian kernel whose width is the batch's mean distance to the
    `k`-th nearest (each sample counts as its own nearest); with "knn", 1 for the `k` nearest
    others. Nothing is learnt or kept: no BatchNorm, no gradients, no augmentation, no memory.
    Logits are log z.

    >>> import numpy as np
    >>> from caster import wrap
    >>> model = wrap(lambda x: (x, np.array([[2.0, 0.0], [2.0, 0.0], [0.0, 0.2]])), version="1")
    >>> near = np.array([[1.0, 0.0], [1.0, 0.1], [1.0, 0.05]])
    >>> LAME(model, Source(), affinity="knn", k=2).predict(near).logits.argmax(axis=1)
    array([0, 0, 0])
    """

    name: str = "lame"
    affinity: Affinity = "rbf"
    k: int = count(5)

    def __post_init__(self, source: Source) -> None:
        if self.affinity not in ("rbf", "knn"):
            raise CasterError(f"affinity of {self.name} must be rbf or knn, not {self.affinity!r}")
        super().__post_init__(source)
        self._columns = class_columns(source, self.name)

    def answer(self, outputs: Outputs) -> Prediction:
        """Iterate the assignments of a batch to their fixed point."""
        if outputs.logits is None:
            raise CasterError(f"{self.name} needs the logits of {self.model.name}")
        features = finite_features(outputs, self.name)
        with full_precision(features):
            logits = as_tensor(self._columns(outputs.logits))
            if not bool(logits.isfinite().all()):
                raise CasterError(f"{self.name} got logits that are not finite")
            measure = rbf_affinity if self.affinity == "rbf" else knn_affinity
            affinities = measure(normalize(features.double(), dim=1), self.k)
            unary = (logits.double().softmax(dim=1) + FLOOR).log()
            return Prediction(like(assign(unary, affinities).to(logits), outputs.logits))


def rbf_affinity(features: Tensor, k: int) -> Tensor:  # (B, d) -> (B, B)
    """Gaussian kernel of distances; its width is their mean to the k-th nearest, itself first.

    >>> rbf_affinity(torch.tensor([[0.0], [1.0]]), k=2)[0, 1].item()
    0.6065...
    """
    distances = _distances(features)
    width = distances.sort(dim=1).values[:, min(k, len(features)) - 1].mean()
    ratio = torch.where(distances > 0, distances / width, 0)  # 0 even if the width is 0
    return (-(ratio**2) / 2).exp()


def knn_affinity(features: Tensor, k: int) -> Tensor:  # (B, d) -> (B, B)
    """1 for the k nearest others of each sample, else 0; ties go to the first.

    >>> knn_affinity(torch.tensor([[0.0], [1.0], [3.0]]), k=1).tolist()
    [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    distances = _distances(features).fill_diagonal_(torch.inf)
    nearest = distances.argsort(dim=1, stable=True)[:, : min(k, len(features) - 1)]
    return torch.zeros_like(distances).scatter_(1, nearest, 1.0)


def assign(
    unary: Tensor,  # (B, C), log-probabilities
    affinities: Tensor,  # (B, B)
) -> Tensor:  # (B, C), log z
    """Iterate z = softmax(unary + affinities z) until its energy converges.

    >>> assign(torch.log(torch.tensor([[0.3, 0.7]])), torch.zeros(1, 1)).exp()
    tensor([[0.3000, 0.7000]])
    """
    assignments = unary.log_softmax(dim=1)
    before = torch.inf
    for step in range(STEPS):
        pairwise = affinities @ assignments.exp()
        assignments = (unary + pairwise).log_softmax(dim=1)
        energy = (assignments.exp() * (assignments - unary - pairwise)).sum().item()
        if step > 1 and abs(energy - before) <= TOLERANCE * abs(before):
            break
        before = energy
    return assignments


def _distances(features: Tensor) -> Tensor:  # (B, d) -> (B, B)
    return torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist")
