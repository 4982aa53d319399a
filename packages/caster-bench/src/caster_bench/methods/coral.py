"""CORAL: align a batch's mean and covariance with the source's, then classify."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from caster.core.arrays import like
from caster.core.linalg import symmetric_roots
from caster.errors import CasterError
from caster.models.protocol import Outputs
from caster_bench.methods.features import LinearHead, finite_features, full_precision
from caster_bench.methods.protocol import FeatureMethod, Prediction, Retained, nbytes, number
from caster_bench.methods.source import Source

REVISION = 1


@dataclass(eq=False, repr=False, kw_only=True)
class Coral(FeatureMethod):
    """Whiten a batch's features, colour them with the source's covariance, and classify.

    Sun, Feng and Saenko, "Return of Frustratingly Easy Domain Adaptation", AAAI 2016, in the other
    direction: they map the source to the target and train a classifier on it; here the classifier
    is frozen, so the target is mapped to the source. h becomes
    m_s + (h - m_t) (C_t + r I)^(-1/2) (C_s + r I)^(1/2), with full d x d covariances.

    r is `ridge` times the source's mean variance. 1.0 corresponds to the paper's identity matrix,
    added to covariances of standardised features, at any scale of the features. It also keeps a
    batch of fewer samples than features from being whitened to a simplex. A single sample has no
    covariance, and is answered by the frozen model.
    """

    name: str = "coral"
    ridge: float = number(1.0, above=True)

    def __post_init__(self, source: Source) -> None:
        super().__post_init__(source)
        head = LinearHead(self.model, source, self.name)
        moments = RunningMoments()
        for images, _ in source.labelled(self.name):
            outputs = self.model(images)
            features = finite_features(outputs, self.name)
            with full_precision(features):
                moments.add(features)
        with full_precision(features):
            weight, bias = (part.double() for part in head(outputs))
            covariance = moments.covariance
            self._lam = float(scaled_ridge(covariance, self.ridge))
            if self._lam <= 0:
                raise CasterError(f"{self.name}: the source's features do not vary")
            root, _ = symmetric_roots(covariance / self._lam, 1.0)
            # Colouring and classifier are both fixed: one (d, C) matrix does both.
            self._weight = (root @ weight.T).to(features)
            self._bias = (moments.mean @ weight.T + bias).to(features)
            if not bool(self._weight.isfinite().all()):  # how the roots fail on a GPU
                raise CasterError(
                    f"{self.name}: a ridge of {self.ridge} is too small for these features"
                )

    def answer(self, outputs: Outputs) -> Prediction:
        """Return logits of the aligned features."""
        features = finite_features(outputs, self.name)
        if len(features) == 1:
            return replace(self.frozen.answer(outputs), reason="batch_too_small")
        with full_precision(features):
            white = whitened(features - features.mean(0), self._lam)
            logits = white @ self._weight.to(features) + self._bias.to(features)
            if not bool(logits.isfinite().all()):
                return replace(self.frozen.answer(outputs), reason="numerical")
            return Prediction(like(logits, outputs.features))

    def retained(self) -> Retained:
        """Bytes of the source's moments, folded into the classifier."""
        return Retained(statistics=nbytes(self._weight, self._bias))


class RunningMoments:
    """Mean and covariance of added rows, divided by n, from sums in float64.

    >>> import torch
    >>> moments = RunningMoments()
    >>> moments.add(torch.tensor([[1.0], [3.0]]))
    >>> moments.mean, moments.covariance
    (tensor([2.], dtype=torch.float64), tensor([[1.]], dtype=torch.float64))
    """

    def __init__(self) -> None:
        self.count = 0
        self._sum: Tensor | None = None  # (d,)
        self._products: Tensor | None = None  # (d, d)

    def add(self, rows: Tensor, sign: int = 1) -> None:  # (n, d)
        """Add rows, or remove them with sign -1."""
        wide = rows.double()
        total, products = sign * wide.sum(0), sign * (wide.T @ wide)
        self.count += sign * len(rows)
        self._sum = total if self._sum is None else self._sum.to(wide) + total
        self._products = products if self._products is None else self._products.to(wide) + products

    @property
    def mean(self) -> Tensor:  # (d,)
        """Mean of the rows."""
        assert self._sum is not None
        return self._sum / self.count

    @property
    def covariance(self) -> Tensor:  # (d, d)
        """Covariance of the rows."""
        assert self._products is not None
        mean = self.mean
        return self._products / self.count - mean[:, None] * mean

    def nbytes(self) -> int:
        """Bytes of the sums."""
        return nbytes(self._sum, self._products)


def scaled_ridge(covariance: Tensor, ridge: float) -> Tensor:  # (d, d) -> ()
    """A ridge in units of the mean variance."""
    return ridge * covariance.diagonal().mean()


def whitened(
    centred: Tensor,  # (B, d), of mean zero
    lam: Tensor | float,
) -> Tensor:  # (B, d)
    """X (C / lam + I)^(-1/2) for rows X with covariance C = X'X / B.

    With fewer rows than columns it is computed as (XX' / B / lam + I)^(-1/2) X, without a d x d
    matrix.

    >>> import torch
    >>> whitened(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), lam=1.0)[0]
    tensor([0.7071, 0.0000])
    """
    n, width = centred.shape
    if n < width:
        _, inverse = symmetric_roots(centred @ centred.T / (n * lam), 1.0)
        whitened: Tensor = inverse @ centred
    else:
        _, inverse = symmetric_roots(centred.T @ centred / (n * lam), 1.0)
        whitened = centred @ inverse
    return whitened
