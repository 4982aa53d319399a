"""The result for one batch: one type for every mechanism, in Python and on the command line."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from caster.core.arrays import to_numpy
from caster.core.discriminant import probabilities
from caster.core.linalg import Array
from caster.core.notebook import html_table
from caster.core.types import AffineMap
from caster.core.verdict import Verdict


@dataclass(frozen=True, eq=False)
class Adaptation:
    """One adapted batch: labels, probabilities, and the verdict.

    Arrays have the namespace and device of the model's outputs; labels that are not numbers are
    NumPy arrays. Columns of scores are in the order of the classes.

    >>> from caster import Caster
    >>> clf = Caster().fit([[0.0], [1.0], [4.0], [5.0]], ["low", "low", "high", "high"])
    >>> out = clf.adapt([[0.5]])
    >>> out.labels.tolist(), out.verdict.reason
    (['low'], 'batch_too_small')
    >>> out
    Adaptation(1 sample, 2 classes, rejected: batch_too_small, ratio=inf)
    """

    labels: Array  # (B,), adapted if the verdict is accepted, else the frozen model's
    scores: Array  # (B, C); the labels are its argmax
    proposed: Array  # (B,), the adapted labels, whatever the verdict
    adapted: Array | None  # (B, C), their scores; None if the batch could not be adapted
    frozen: Array | None  # (B, C), the frozen head's logits, or Source-GDA's; None: not computed
    verdict: Verdict
    map: AffineMap | None = None  # of features, if they were transported
    mixture: NDArray[np.float64] | None = None  # (C,), estimated for the batch; None: the source's
    implausible: int = 0  # samples rejected as implausible inputs; they get frozen answers
    ids: NDArray[np.int64] | None = None  # (B,), positions in the `Stream`, for its feedback
    features: Array | None = None  # (B, d), the frozen model's; None: not computed
    # (2, B), class indices of the adapted and the frozen answers, if already on the host
    indices: NDArray[np.int64] | None = None

    @property
    def probabilities(self) -> Array:  # (B, C)
        """Softmax of the scores."""
        return probabilities(self.scores)

    @property
    def disputed(self) -> NDArray[np.bool_]:  # (B,)
        """Samples whose adapted and frozen answers differ: labels are informative there.

        >>> from caster import Caster
        >>> clf = Caster(tau=1e-9).fit([[0.0], [1.0], [4.0], [5.0]], [0, 0, 1, 1])
        >>> clf.adapt([[0.5], [4.5], [8.5]]).disputed
        array([False,  True, False])
        """
        if self.adapted is None or self.frozen is None:
            return np.zeros(len(self.labels), np.bool_)
        adapted, frozen = self.class_indices()
        return np.asarray(adapted != frozen)

    def class_indices(self) -> NDArray[np.int64]:  # (2, B)
        """Class indices of adapted and frozen answers on the host; the batch must have both.

        >>> from caster import Caster
        >>> clf = Caster().fit([[0.0], [1.0], [4.0], [5.0]], ["low", "low", "high", "high"])
        >>> clf.adapt([[0.5], [4.5]]).class_indices().tolist()
        [[1, 0], [1, 0]]
        """
        if self.indices is not None:
            return self.indices
        return np.stack([classes_of(self.adapted), classes_of(self.frozen)])

    def __repr__(self) -> str:
        B, C = self.scores.shape
        reason = self.verdict.reason
        decided = "accepted" if self.verdict.accepted else "rejected"
        verdict = reason if reason == decided else f"{decided}: {reason}"
        samples = f"{B} sample{'' if B == 1 else 's'}"
        return f"Adaptation({samples}, {C} classes, {verdict}, ratio={self.verdict.ratio:.3g})"

    def _repr_html_(self) -> str:
        B, C = self.scores.shape
        rows: dict[str, object] = {"samples": B, "classes": C, **self.verdict.summary()}
        if self.adapted is not None and self.frozen is not None:
            rows["adapted and frozen answers differ"] = f"on {int(self.disputed.sum())} samples"
        if self.implausible:
            rows["implausible samples"] = self.implausible
        return html_table("Adaptation", rows)


def classes_of(scores: Array) -> NDArray[np.int64]:  # (B, C) -> (B,)
    """Class index with the largest score of every sample, on the host."""
    return to_numpy(array_namespace(scores).argmax(scores, axis=1))
