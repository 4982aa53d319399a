"""FOA: prompts found by an evolution strategy, with forward passes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from caster.adapt.frozen import Frozen
from caster.adapt.network import Network, gradients, placed, torch_model
from caster.adapt.protocol import Prediction, Retained, nbytes
from caster.adapt.source import Source, columns_of
from caster.errors import CasterError
from caster.models.protocol import FrozenModel
from caster_bench.methods.evolution import Point, Search
from caster_bench.methods.tokens import PromptedTransformer


@dataclass(frozen=True, eq=False)
class Trial:
    """Candidates tried on a batch."""

    values: list[float]  # fitness of every candidate
    best: int  # the one of least fitness
    logits: Tensor  # (B, C), the best one's, with its features shifted
    mean: Tensor  # (d,), of the classifier's input, over the batch and all candidates


class FOA:
    """Prompts beside the patches of a vision transformer that make a batch look like the source.

    Niu et al. 2024. Every batch is answered with `population` candidates, of which CMA-ES draws all
    but one, and the last is the best for the batch before; it then learns their fitness: entropy,
    and `strength` B/64 times the squared distance of class tokens to the source's in mean and
    standard deviation, over all layers. (A single image has no deviation, and is compared by
    its means.) The answer is the best candidate's, the classifier's input moved by the source's
    mean less the running mean, which keeps `momentum` of itself from batch to batch.

    The source's statistics come from the first `samples` source images. Weights are the frozen
    model's own. The search keeps two matrices with a row and a column for every number in the
    prompts, and decomposes one of them every now and then: 42 MB each for 3 prompts of width 768.
    """

    def __init__(
        self,
        model: FrozenModel,
        source: Source,
        *,
        name: str = "foa",
        prompts: int = 3,
        population: int = 28,
        strength: float = 0.4,
        momentum: float = 0.9,
        samples: int = 64,
        seed: int = 0,
    ) -> None:
        counts = {"prompts": (prompts, 1), "population": (population, 4), "samples": (samples, 2)}
        for setting, (count, least) in counts.items():
            if not isinstance(count, int) or count < least:
                raise CasterError(f"{setting} of {name} must be {least} or more, not {count!r}")
        if not 0 <= strength < float("inf"):
            raise CasterError(f"strength of {name} is a number from 0 up, not {strength!r}")
        if not 0 <= momentum <= 1:
            raise CasterError(f"momentum of {name} is a number from 0 to 1, not {momentum!r}")
        self.name = name
        self.model = torch_model(model, name)
        self.frozen = Frozen(model, source)
        self.prompts = prompts
        self.population = population
        self.strength = strength
        self.momentum = momentum
        self.seed = seed
        with gradients(False):
            batches = self._source_images(source, samples)
            self.network = _sharing_weights(Network(self.model, columns_of(source, name)))
            self._tokens = PromptedTransformer(self.network, batches[0], name)
            layers = torch.cat([self._tokens(batch)[1] for batch in batches])
            self.source_std, self.source_mean = torch.std_mean(layers, dim=0)
        self.reset()

    def reset(self) -> None:
        """A new search from the same seed, and no batch seen."""
        size = self.prompts * self._tokens.width
        # Xavier's, as if a prompt were made of a patch.
        bound = math.sqrt(6 / (self._tokens.fan_in + self._tokens.width))
        self.best: Point = np.random.default_rng(self.seed).uniform(-bound, bound, size)
        self.running_mean: Tensor | None = None
        self._search = Search(size, self.population - 1, self.seed)
        self._candidates = [*self._search.ask(), self.best]

    def predict(self, images: Any) -> Prediction:
        """The best candidate's answer; then the search goes on from what all of them gave."""
        with gradients(False):
            trial = self._try(placed(self.model, images))
            if self.running_mean is None:
                self.running_mean = trial.mean
            else:
                self.running_mean = trial.mean.lerp(self.running_mean, self.momentum)
        # In float32, as the network was given it: to cma, which knows its own, it is a new point.
        self.best = self._candidates[trial.best].astype(np.float32).astype(np.float64)
        self._search.tell(self._candidates, trial.values)
        self._candidates = [*self._search.ask(), self.best]
        return Prediction(trial.logits)

    def forward(self, images: Any) -> Any:  # (B, C)
        """The scores `predict` would give now; the next candidates are drawn already."""
        with gradients(False):
            return self._try(placed(self.model, images)).logits

    def fitness(
        self,
        logits: Tensor,  # (B, C)
        layers: Tensor,  # (B, layers * D), class tokens
    ) -> Tensor:  # ()
        """How unsure the answers are, and how far their class tokens are from the source's."""
        unsure = torch.special.entr(logits.softmax(dim=1)).sum()
        distance = (layers.mean(dim=0) - self.source_mean).square().sum()
        if len(layers) > 1:
            distance = distance + (layers.std(dim=0) - self.source_std).square().sum()
        fitness: Tensor = unsure + self.strength * len(layers) / 64 * distance
        return fitness

    def _try(self, batch: Tensor) -> Trial:
        shape = (-1, self.prompts, self._tokens.width)
        candidates = torch.from_numpy(np.stack(self._candidates).astype(np.float32).reshape(shape))
        logits, features, fitness = [], [], []
        for prompts in candidates.to(batch.device):
            answer, layers = self._tokens(batch, prompts)
            logits.append(answer)
            features.append(layers[:, -self._tokens.n_features :].clone())  # the rest may go
            fitness.append(self.fitness(answer, layers))
        values = torch.stack(fitness).tolist()
        if not np.isfinite(values).all():
            raise CasterError(f"{self.name} got logits or features that are not finite")
        best = int(np.argmin(values))
        answer = logits[best]
        if self.running_mean is not None:
            shift = self.source_mean[-self._tokens.n_features :] - self.running_mean
            answer = self._tokens.classify(features[best] + shift)
        return Trial(values, best, answer, torch.cat(features).mean(dim=0))

    def retained(self) -> Retained:
        """Prompts, the running mean, the source's statistics, and the search; no weights."""
        return Retained(
            parameters=nbytes(self.best),
            buffers=nbytes(self.running_mean, *self.network.module.buffers()),
            statistics=nbytes(self.source_mean, self.source_std),
            optimizer=self._search.nbytes() + nbytes(*self._candidates[:-1]),
        )

    def _source_images(self, source: Source, samples: int) -> list[Tensor]:
        """The first of the source's images, as they come in batches."""
        batches: list[Tensor] = []
        missing = samples
        for images, _ in source.labelled(self.name):
            batches.append(placed(self.model, images)[:missing])
            missing -= len(batches[-1])
            if missing == 0:
                break
        if samples - missing < 2:
            raise CasterError(f"{self.name} needs at least 2 source images to know their spread")
        return batches


def _sharing_weights(network: Network) -> Network:
    """A network of its own, for hooks, that holds the model's weights and no copy of them."""
    pairs = zip(network.module.parameters(), network.model.module.parameters(), strict=True)
    for own, shared in pairs:
        own.data = shared.data
    return network
