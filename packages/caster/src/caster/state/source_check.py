"""Accuracy of last-layer transport on the source itself, cross-validated by `fit`."""

from __future__ import annotations

from dataclasses import dataclass

MIN_SAMPLES_PER_FEATURE = 4.0  # of the source, if there is no head to compare with
ALLOWED_LOSS = 0.01  # largest loss of accuracy on the source with transport on by default
MIN_HEAD_ACCURACY = 0.5  # of the head; below it its classes are probably permuted
MEMORIZED = 0.995  # accuracy of a head from which the source is probably its training data


@dataclass(frozen=True)
class SourceCheck:
    """Cross-validated accuracies on the source, in shuffled batches of 64.

    >>> check = SourceCheck(2000, head=0.99, source_gda=0.95, identity=0.95, gated=0.96,
    ...                     accepted=0.8, loss=0.046, per_feature=2.0)
    >>> check.supported
    False
    """

    samples: int  # classified
    head: float | None  # accuracy of the frozen head; None: no logits were given
    source_gda: float  # accuracy of Source-GDA in all directions
    identity: float  # of Source-GDA in the active directions, without a map
    gated: float  # of gated transport
    accepted: float  # fraction of batches
    loss: float | None  # head minus Source-GDA or gated transport, plus one standard error
    per_feature: float  # source samples per feature, N / d

    @property
    def supported(self) -> bool:
        """Whether transport is on by default.

        It must lose at most one point against the head on the source or, without a head, be
        fitted to enough samples.
        """
        return (
            self.per_feature >= MIN_SAMPLES_PER_FEATURE
            if self.loss is None
            else self.loss <= ALLOWED_LOSS
        )

    @property
    def has_poor_head(self) -> bool:
        """Whether the head is rarely right: its classes are probably permuted."""
        return self.head is not None and self.head < MIN_HEAD_ACCURACY

    def sentences(self) -> list[str]:
        """Sentences for users: the result, and what follows from it."""
        state = "on" if self.supported else "off by default for this state"
        if self.head is None:
            return [
                f"Feature transport is {state}: {self.per_feature:.3g} source samples per "
                f"feature (at least {MIN_SAMPLES_PER_FEATURE:g} are needed), and no logits to "
                "compare with the head."
            ]
        accuracies = (
            f"cross-validated on {self.samples:,} source samples, the frozen head reaches "
            f"{self.head:.1%}, Source-GDA {self.source_gda:.1%}, the class Gaussians without "
            f"transport {self.identity:.1%} and gated transport {self.gated:.1%}"
        )
        sentences = [f"Feature transport is {state}: {accuracies}."]
        if self.head >= MEMORIZED:
            sentences.append(
                "The head is almost always right on these samples, so it was probably trained on "
                "them: use held-out images for unbiased statistics."
            )
        return sentences
