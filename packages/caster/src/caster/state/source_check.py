"""Whether last-layer transport holds up on its own source, as `fit` measured it."""

from __future__ import annotations

from dataclasses import dataclass

ENOUGH = 4.0  # source samples a feature, where transport cannot be held against a head
ALLOWED_LOSS = 0.01  # of accuracy, on the source itself, for transport to be on by default
MEMORIZED = 0.995  # accuracy of a head from which on the source looks like its training images


@dataclass(frozen=True)
class SourceCheck:
    """Cross-validated accuracies on the source, in shuffled batches of 64.

    >>> check = SourceCheck(2000, head=0.99, source_gda=0.95, identity=0.95, gated=0.96,
    ...                     accepted=0.8, loss=0.046, per_feature=2.0)
    >>> check.supported
    False
    """

    samples: int  # that were classified
    head: float | None  # accuracy of the frozen head; None: no logits came with the features
    source_gda: float  # of the source's Gaussians, in all directions
    identity: float  # of the same in the directions that a batch activates: no map
    gated: float  # of transport behind its certificate
    accepted: float  # share of the batches
    loss: float | None  # what the head has over Source-GDA or gated transport, plus one s.e.
    per_feature: float  # samples of the source for every feature, N / d

    @property
    def supported(self) -> bool:
        """Whether transport may answer by default.

        It must lose at most a point to the head on the source or, where no head was given to
        compare with, rest on enough samples.
        """
        return self.per_feature >= ENOUGH if self.loss is None else self.loss <= ALLOWED_LOSS

    def sentences(self) -> list[str]:
        """What follows for a user."""
        state = "on" if self.supported else "off by default for this state"
        if self.head is None:
            return [
                f"Last-layer transport is {state}: {self.per_feature:.3g} source samples a feature "
                f"(at least {ENOUGH:g} are needed), and no logits to hold it against the head."
            ]
        found = (
            f"cross-validated on {self.samples:,} source samples, the frozen head reaches "
            f"{self.head:.1%}, Source-GDA {self.source_gda:.1%}, without a map {self.identity:.1%} "
            f"and gated transport {self.gated:.1%}"
        )
        said = [f"Last-layer transport is {state}: {found}."]
        if self.head >= MEMORIZED:
            said.append(
                "The head is almost always right on these images, as on images it was trained on: "
                "held-out images give honest statistics."
            )
        return said
