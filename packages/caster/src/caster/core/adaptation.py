"""The answer to one batch: the same type for every mechanism, in Python and on the command line."""

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
    """One adapted batch: labels, probabilities, and the verdict on them.

    Arrays are of the kind and on the device of the model's outputs; labels that are not numbers are
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
    scores: Array  # (B, C), whose argmax are the labels
    proposed: Array  # (B,), the adapted labels, whatever the verdict
    adapted: Array | None  # (B, C), their scores; None if the batch could not be adapted
    frozen: Array | None  # (B, C), the frozen head's logits, or Source-GDA's; None: not computed
    verdict: Verdict
    map: AffineMap | None = None  # of transported features
    mixture: NDArray[np.float64] | None = (
        None  # (C,), of a batch whose classes are not the source's
    )
    implausible: int = 0  # samples that no image could have produced, answered as frozen
    ids: NDArray[np.int64] | None = None  # (B,), in their `Stream`, for its feedback
    features: Array | None = None  # (B, d), the frozen model's; None: not computed
    # (2, B), classes of the adapted and the frozen answers, if the host knows them already
    indices: NDArray[np.int64] | None = None

    @property
    def probabilities(self) -> Array:  # (B, C)
        """Softmax of the scores."""
        return probabilities(self.scores)

    @property
    def disputed(self) -> NDArray[np.bool_]:  # (B,)
        """Samples whose adapted and frozen answers differ: those that a label can decide.

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
        """Classes of the adapted and the frozen answers, of a batch that has both, on the host.

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
    """The index of the largest score of every sample, on the host."""
    return to_numpy(array_namespace(scores).argmax(scores, axis=1))
