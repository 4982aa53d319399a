"""A method on a stream: what it answers, how right that is, how long it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from subjects import BATCH, Array, as_batch, shuffled, synchronise

from caster.adapt.frozen import Frozen
from caster.adapt.protocol import Method, OnFeatures, Prediction
from training import DEVICE


@dataclass(frozen=True)
class Answers:
    """What a method said of a stream, in the stream's order."""

    classes: Array  # (N,)
    accepted: float  # share of batches
    reasons: dict[str, int]
    seconds: float

    @classmethod
    def of(cls, predictions: Iterable[Prediction]) -> Answers:
        """Answers and the time they take, read from the device at the very end."""
        synchronise()
        began = perf_counter()
        classes, accepted, reasons = [], [], []
        for given in predictions:
            classes.append(torch.as_tensor(given.logits).argmax(dim=1))
            accepted.append(given.accepted)
            reasons.append(given.reason)
        synchronise()
        seconds = perf_counter() - began
        found = torch.cat(classes).cpu().numpy()
        return cls(found, sum(accepted) / len(accepted), dict(Counter(reasons)), seconds)


class Stream:
    """One condition's images in shuffled batches, and what the frozen model makes of them."""

    def __init__(self, frozen: Frozen, images: Array, labels: Array) -> None:
        rows = shuffled(len(labels))
        self.labels = labels[np.concatenate(rows)]
        self.images = [torch.from_numpy(images[at]).to(DEVICE) for at in rows]
        synchronise()
        began = perf_counter()
        self.outputs = [frozen.model(as_batch(part)) for part in self.images]
        synchronise()
        self.forward = perf_counter() - began
        self.frozen = Answers.of(map(frozen.answer, self.outputs)).classes

    def score(self, method: Method) -> dict[str, Any]:
        """A method from its reset on; those on features share the frozen model's pass.

        Harm is the share where the frozen model is right and the method is not.
        """
        method.reset()
        shared = isinstance(method, OnFeatures)
        if isinstance(method, OnFeatures):
            answers = Answers.of(map(method.answer, self.outputs))
        else:
            answers = Answers.of(method.predict(as_batch(part)) for part in self.images)
        right = answers.classes == self.labels
        seconds = answers.seconds + (self.forward if shared else 0)
        return {
            "accuracy": float(right.mean()),
            "accepted": answers.accepted,
            "harm": float(((self.frozen == self.labels) & ~right).mean()),
            "seconds": seconds * 10_000 / len(right),
            "reasons": answers.reasons,
            "n": len(right),
        } | ({"agreement": self.agreement(answers)} if method.name == "source-gda" else {})

    def agreement(self, answers: Answers) -> list[float]:
        """Share of every batch on which answers are the frozen model's: what a referee sees."""
        same = answers.classes == self.frozen
        batches = np.split(same, range(BATCH, len(same), BATCH))
        return [round(float(batch.mean()), 4) for batch in batches]
