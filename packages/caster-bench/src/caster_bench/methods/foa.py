"""FOA: prompts found by an evolution strategy, with forward passes only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import cma
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from caster.errors import CasterError
from caster.models.torch import as_rows
from caster_bench.methods.network import (
    Network,
    TorchMethod,
    first_source_images,
    gradients,
    share_weights,
    to_device,
)
from caster_bench.methods.protocol import Prediction, Retained, count, nbytes, number
from caster_bench.methods.source import Source

REVISION = 1
Block = nn.Module
Point = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Trial:
    """Results of all candidates on one batch."""

    values: list[float]  # fitness of every candidate
    best: int  # index of the lowest fitness
    logits: Tensor  # (B, C), of the best candidate, with shifted features
    mean: Tensor  # (d,), of the classifier's input over the batch and all candidates


@dataclass(eq=False, repr=False, kw_only=True)
class FOA(TorchMethod):
    """Add prompts to a vision transformer's tokens that make a batch look like the source.

    Niu et al., "Test-Time Model Adaptation with Only Forward Passes", ICML 2024. Every batch is
    evaluated with `population` candidates: CMA-ES draws all but one, and the last is the best of
    the previous batch. Their fitness updates the search: entropy, plus `strength` B/64 times the
    squared distance of class tokens to the source's in mean and standard deviation, over all
    layers. (A single image has no deviation and is compared by its means.) The answer is the best
    candidate's, with the classifier's input shifted by the source's mean minus a running mean with
    `momentum`.

    Source statistics come from the first `samples` source images. Weights are shared with the
    frozen model. The search keeps two matrices with a row and a column for every number in the
    prompts, and decomposes one of them now and then: 42 MB each for 3 prompts of width 768.
    """

    name: str = "foa"
    prompts: int = count(3)
    population: int = count(28, least=4)
    strength: float = number(0.4)
    momentum: float = number(0.9, high=1)
    samples: int = count(64, least=2)
    seed: int = 0

    def __post_init__(self, source: Source) -> None:
        super().__post_init__(source)
        with gradients(False):
            batches = list(first_source_images(self.model, source, self.samples, self.name))
            if sum(map(len, batches)) < 2:
                raise CasterError(
                    f"{self.name} needs at least 2 source images to measure their spread"
                )
            self.network = share_weights(Network(self.model, self.columns))
            self._tokens = PromptedTransformer(self.network, batches[0], self.name)
            layers = torch.cat([self._tokens(batch)[1] for batch in batches])
            self.source_std, self.source_mean = torch.std_mean(layers, dim=0)
        self.reset()

    def reset(self) -> None:
        """Restart the search from the same seed, with no batch seen."""
        size = self.prompts * self._tokens.width
        # Xavier's bound, as if a prompt were made of a patch.
        bound = math.sqrt(6 / (self._tokens.fan_in + self._tokens.width))
        self.best: Point = np.random.default_rng(self.seed).uniform(-bound, bound, size)
        self.running_mean: Tensor | None = None
        self._search = Search(size, self.population - 1, self.seed)
        self._candidates = [*self._search.ask(), self.best]

    def predict(self, images: Any) -> Prediction:
        """Answer with the best candidate, then update the search with all of them."""
        with gradients(False):
            trial = self._evaluate(to_device(self.model, images))
            if self.running_mean is None:
                self.running_mean = trial.mean
            else:
                self.running_mean = trial.mean.lerp(self.running_mean, self.momentum)
        # Rounded to float32, as the network saw it; cma then treats it as a new point.
        self.best = self._candidates[trial.best].astype(np.float32).astype(np.float64)
        self._search.tell(self._candidates, trial.values)
        self._candidates = [*self._search.ask(), self.best]
        return Prediction(trial.logits)

    def forward(self, images: Any) -> Any:  # (B, C)
        """Logits that `predict` would give now; the next candidates are already drawn."""
        with gradients(False):
            return self._evaluate(to_device(self.model, images)).logits

    def fitness(
        self,
        logits: Tensor,  # (B, C)
        layers: Tensor,  # (B, layers * D), class tokens
    ) -> Tensor:  # ()
        """Entropy of the predictions plus the distance of class tokens to the source's."""
        entropy = torch.special.entr(logits.softmax(dim=1)).sum()
        distance = (layers.mean(dim=0) - self.source_mean).square().sum()
        if len(layers) > 1:
            distance = distance + (layers.std(dim=0) - self.source_std).square().sum()
        fitness: Tensor = entropy + self.strength * len(layers) / 64 * distance
        return fitness

    def _evaluate(self, batch: Tensor) -> Trial:
        shape = (-1, self.prompts, self._tokens.width)
        candidates = torch.from_numpy(np.stack(self._candidates).astype(np.float32).reshape(shape))
        logits, features, fitness = [], [], []
        for prompts in candidates.to(batch.device):
            answer, layers = self._tokens(batch, prompts)
            logits.append(answer)
            features.append(layers[:, -self._tokens.n_features :].clone())  # frees the rest
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
        """Bytes of prompts, running mean, source statistics and search; no weights."""
        return Retained(
            parameters=nbytes(self.best),
            buffers=nbytes(self.running_mean, *self.network.module.buffers()),
            statistics=nbytes(self.source_mean, self.source_std),
            optimizer=self._search.nbytes() + nbytes(*self._candidates[:-1]),
        )


class Search:
    """CMA-ES from the cma library, with a full covariance as in FOA's reference code.

    cma always draws from NumPy's global generator. So every call runs with the search's own
    generator state, and then restores the caller's.

    >>> search = Search(3, population=6, seed=1)
    >>> points = search.ask()
    >>> search.tell(points, [float(point @ point) for point in points])
    >>> len(points)
    6
    """

    def __init__(self, size: int, population: int, seed: int) -> None:
        self._random: Any = np.random.RandomState(seed).get_state()
        # seed nan: do not seed. verbose -9: print nothing and write no files.
        options = {"popsize": population, "seed": math.nan, "verbose": -9}
        with self._own_random_state():
            self._strategy = cma.CMAEvolutionStrategy(size * [0.0], 1.0, options)

    def ask(self) -> list[Point]:
        """Draw new points to try."""
        with self._own_random_state():
            return list(self._strategy.ask())

    def tell(self, points: list[Point], values: list[float]) -> None:
        """Update with the values of points, asked for or not; lower is better."""
        with self._own_random_state():
            self._strategy.tell(points, values, copy=True)

    @contextmanager
    def _own_random_state(self) -> Iterator[None]:
        callers = np.random.get_state()
        np.random.set_state(self._random)
        try:
            yield
        finally:
            self._random = np.random.get_state()
            np.random.set_state(callers)

    def nbytes(self) -> int:
        """Bytes of its arrays, most of them in two square matrices."""
        values = (*vars(self._strategy).values(), *vars(self._strategy.sm).values())
        arrays = {id(array): array for array in values if isinstance(array, np.ndarray)}
        return nbytes(*arrays.values())


class PromptedTransformer:
    """Insert prompts after the class token before the first block, and record class tokens.

    The prompts are removed after the last block. Recorded are the class token in every layer and
    the classifier's input. Works for modules like timm's, torchvision's and transformers' ViT: a
    list of blocks of one class on (B, T, D) that begin with a LayerNorm, and a classifier on the
    first token.

    Attributes
    ----------
    width : of a token, D.
    fan_in : of the layer that makes tokens of patches.
    """

    def __init__(
        self,
        network: Network,  # permanently changed: gets hooks
        batch: Tensor,
        name: str,
    ) -> None:
        self._network = network
        self._name = name
        self._prompts: Tensor | None = None
        self._recorded: list[Tensor] | None = None  # during a forward pass
        self._head_input = (0, torch.float32)  # width and dtype of the classifier's input
        network.model(batch)  # finds the classifier
        self._head_name = str(network.model.head)
        self._head = network.module.get_submodule(self._head_name)
        blocks, self.width = self._find_blocks(batch)
        layers = network.module.modules()
        embedding = next(m for m in layers if isinstance(m, nn.Conv2d | nn.Linear))
        self.fan_in = embedding.weight[0].numel()
        blocks[0].register_forward_pre_hook(self._insert_prompts)
        blocks[-1].register_forward_hook(self._remove_prompts)
        for block in blocks[1:]:
            self._first_norm(block).register_forward_hook(self._record_token)
        self._head.register_forward_pre_hook(self._record_head_input)
        self._check(blocks[-1], batch)

    def __call__(
        self,
        batch: Tensor,
        prompts: Tensor | None = None,  # (P, D)
    ) -> tuple[Tensor, Tensor]:  # (B, C), (B, layers * D), the classifier's input last
        """Logits and class tokens of a batch."""
        self._prompts, self._recorded = prompts, []
        try:
            logits = self._network(batch)
            self._head_input = self._recorded[-1].shape[1], self._recorded[-1].dtype
            return logits, torch.cat([tokens.float() for tokens in self._recorded], dim=1)
        finally:  # keep nothing of the batch
            self._prompts = self._recorded = None

    @property
    def n_features(self) -> int:
        """Width of the classifier's input."""
        return self._head_input[0]

    def classify(self, features: Tensor) -> Tensor:  # (B, n_features) -> (B, C)
        """Logits of the classifier's input."""
        model = self._network.model
        with torch.autocast(features.device.type, torch.bfloat16, model.bf16):
            logits: Tensor = self._head(features.to(self._head_input[1]))
        chosen: Tensor = self._network.columns(logits.float())
        return chosen

    def _find_blocks(self, batch: Tensor) -> tuple[list[Block], int]:
        """The longest list of modules of one class that work on (B, T, D), and D."""
        lists = [
            list(m.children()) for m in self._network.module.modules() if _is_list_of_one_class(m)
        ]
        shapes: dict[Block, tuple[int, ...]] = {}

        def record_shape(block: Block, inputs: tuple[Any, ...]) -> None:
            if inputs and isinstance(inputs[0], Tensor):
                shapes[block] = tuple(inputs[0].shape)

        with ExitStack() as hooks:
            for block in {block for blocks in lists for block in blocks}:
                hooks.callback(block.register_forward_pre_hook(record_shape).remove)
            self._network(batch)
        found: list[Block] = []
        for blocks in lists:
            inputs = {shapes.get(block, ()) for block in blocks}
            if len(inputs) == 1 and len(next(iter(inputs))) == 3 and len(blocks) > len(found):
                found = blocks
        if not found:
            raise self._unsupported("it has no list of blocks that work on tokens")
        return found, shapes[found[0]][2]

    def _first_norm(self, block: Block) -> nn.Module:
        for layer in block.children():
            if isinstance(layer, nn.LayerNorm):
                return layer
        raise self._unsupported(f"its {type(block).__name__} has no LayerNorm")

    def _check(self, last: Block, batch: Tensor) -> None:
        """Check that the head classifies the class token alone, and that prompts fit in."""
        try:
            logits, recorded = self(batch)
        except RuntimeError as error:  # tokens of several widths
            raise self._unsupported("its blocks do not all work on the same tokens") from error
        if not torch.allclose(self.classify(recorded[:, -self.n_features :]), logits, 1e-3, 1e-3):
            raise self._unsupported(f"its logits are not the output of {self._head_name!r}")
        poison = last.register_forward_hook(_set_others_to_nan)
        try:
            alone, _ = self(batch)
        finally:
            poison.remove()
        if not torch.equal(alone, logits):
            raise self._unsupported("its classifier does not read the first token alone")
        try:
            self(batch, torch.zeros(1, self.width, device=batch.device))
        except RuntimeError as error:
            line = " ".join(str(error).split())[:200]
            raise self._unsupported(f"it does not accept more tokens: {line}") from error

    def _unsupported(self, why: str) -> CasterError:
        return CasterError(
            f"{self._name} needs a vision transformer with a class token, and does not support "
            f"{self._network.model.name}: {why}"
        )

    def _insert_prompts(self, block: Block, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._prompts is None:
            return None
        tokens, *others = inputs
        prompts = self._prompts.to(tokens.dtype).expand(len(tokens), -1, -1)
        return torch.cat([tokens[:, :1], prompts, tokens[:, 1:]], dim=1), *others

    def _remove_prompts(self, block: Block, inputs: Any, output: Any) -> Any:
        if self._prompts is None:
            return None
        tokens, n = _tokens_of(output), len(self._prompts)
        return _with_tokens(output, torch.cat([tokens[:, :1], tokens[:, 1 + n :]], dim=1))

    def _record_token(self, norm: nn.Module, inputs: Any, output: Tensor) -> None:
        if self._recorded is not None:
            self._recorded.append(output[:, 0])

    def _record_head_input(self, head: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._recorded is not None:
            self._recorded.append(as_rows(inputs[0], self._head_name))


def _is_list_of_one_class(module: nn.Module) -> bool:
    plain = isinstance(module, nn.Sequential | nn.ModuleList) and len(module) > 1
    return plain and len({type(block) for block in module.children()}) == 1


def _tokens_of(output: Any) -> Tensor:
    """Tokens that a block returns: a tensor, or the first of a tuple."""
    tokens: Tensor = output[0] if isinstance(output, tuple) else output
    return tokens


def _with_tokens(output: Any, tokens: Tensor) -> Any:
    return (tokens, *output[1:]) if isinstance(output, tuple) else tokens


def _set_others_to_nan(block: Block, inputs: Any, output: Any) -> Any:
    tokens = _tokens_of(output).clone()
    tokens[:, 1:] = torch.nan  # an output that reads them is NaN
    return _with_tokens(output, tokens)
