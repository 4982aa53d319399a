"""What gradient-based methods share: a network copy, the parameters to learn, and a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax
from torch.optim import SGD, Adam, Optimizer

from caster.errors import CasterError
from caster_bench.methods.network import (
    Network,
    TorchMethod,
    affine_parameters,
    check_finite,
    gradients,
    norm_layers,
    to_device,
    use_batch_statistics,
    validate_norms,
)
from caster_bench.methods.protocol import (
    Prediction,
    Retained,
    inert_prediction,
    nbytes,
    number,
    warn_inert,
)
from caster_bench.methods.source import Source

OptimizerName = Literal["adam", "sgd"]
NORM_NAMES = {"batch": "BatchNorm", "layer": "LayerNorm", "group": "GroupNorm"}


def entropy(logits: Tensor) -> Tensor:  # (B, C) -> (B,)
    """Entropy of softmax(logits) per sample, in nats.

    >>> entropy(torch.tensor([[0.0, 0.0], [0.0, 0.0]]))
    tensor([0.6931, 0.6931])
    """
    return cross_entropy(logits, logits)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:  # (B, C), (B, C) -> (B,)
    """Cross-entropy of softmax(logits) with respect to softmax(target), per sample."""
    return -(target.softmax(dim=1) * log_softmax(logits, dim=1)).sum(dim=1)


@dataclass(eq=False, repr=False, kw_only=True)
class GradientMethod(TorchMethod):
    """Answer with a copy of the network, then take an optimizer step on it.

    A subclass defines the step, and declares as fields the settings that users may change. By
    default it learns the scales and shifts of the normalisation layers of the kinds in `norms`, and
    BatchNorm, if it is among them, uses batch statistics.

    Attributes
    ----------
    parameters : learnt parameters by name.
    inert : whether there are none, so that the method answers as the frozen model.
    """

    norms: Sequence[str] = field(default=("batch",), init=False)
    optimizer: OptimizerName = field(default="adam", init=False)
    lr: float = number(1e-3)

    def __post_init__(self, source: Source) -> None:
        if self.optimizer not in ("adam", "sgd"):
            raise CasterError(
                f"optimizer of {self.name} must be adam or sgd, not {self.optimizer!r}"
            )
        self.norms = validate_norms(self.norms, self.name)
        super().__post_init__(source)
        self.reset()
        if self.inert:
            kinds = " or ".join(NORM_NAMES[norm] for norm in self.norms)
            warn_inert(self.name, self.model, f"{kinds} to learn")

    @property
    def inert(self) -> bool:
        """Whether the model has nothing to learn."""
        return not self.parameters

    @cached_property
    def origin(self) -> dict[str, Tensor]:
        """Source values of the learnt parameters: the frozen model's own, not copies."""
        return {k: value.detach() for k, value in self.eligible(self.model.module).items()}

    def reset(self) -> None:
        """Start over with a new copy of the network and a new optimizer."""
        self.parameters: dict[str, nn.Parameter] = {}
        if not self.origin:  # nothing to learn, so no copy
            return
        self.model.verify()  # otherwise the copy could be of a changed model
        with gradients():  # a copy made in inference mode could never learn
            self.network = Network(self.model, self.columns)
            self.parameters = self.eligible(self.network.module)
            for name, parameter in self.parameters.items():
                if parameter.dtype not in (torch.float32, torch.float64):
                    raise CasterError(
                        f"{self.name} cannot learn {name} in {parameter.dtype}, too coarse for its "
                        "steps: pass a float32 module, with bf16=True for speed"
                    )
                parameter.requires_grad_(True)
            self.configure(self.network.module)
        learnt = list(self.parameters.values())
        adam, lr = self.optimizer == "adam", self.lr
        self._optimizer: Optimizer = Adam(learnt, lr) if adam else SGD(learnt, lr, momentum=0.9)

    def eligible(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Select the parameters of a module to learn, by name."""
        return affine_parameters(norm_layers(module, self.norms))

    def configure(self, module: nn.Module) -> None:
        """Prepare the normalisation layers of the network's copy."""
        if "batch" in self.norms:
            use_batch_statistics(module)

    def predict(self, images: Any) -> Prediction:
        """Answer with the current weights, then take a step."""
        if self.inert:
            return inert_prediction(self.frozen, images)
        with gradients():
            batch = self.place(images)
            logits = self.answer(batch)
            check_finite(logits, self.name)
            self.step(batch, logits)
        return Prediction(logits.detach())

    def forward(self, images: Any) -> Any:  # (B, C)
        """Logits that `predict` would give now, without its step."""
        if self.inert:
            return inert_prediction(self.frozen, images).logits
        # Record gradients and drop them: other kernels may round differently.
        with gradients():
            return self.answer(self.place(images)).detach()

    def place(self, images: Any) -> Tensor:
        """Move a batch to the model's device."""
        return to_device(self.model, images)

    def answer(self, batch: Tensor) -> Tensor:  # (B, C)
        """Logits of a batch, with the graph that `step` needs."""
        logits = self.network(batch)
        if not logits.requires_grad:
            raise CasterError(
                f"no gradient reaches the parameters that {self.name} learns: "
                f"{self.model.name} computes without gradients"
            )
        return logits

    def step(
        self,
        batch: Tensor,
        logits: Tensor,  # (B, C), of this batch, with their graph
    ) -> None:
        """Learn from a batch."""
        raise NotImplementedError

    def descend(self, loss: Tensor) -> None:
        """Take one optimizer step on a loss."""
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()  # do not keep gradients between batches

    def retained(self) -> Retained:
        """Bytes of the network copy and the optimizer state."""
        if self.inert:
            return Retained()
        state = (value for own in self._optimizer.state.values() for value in own.values())
        held = nbytes(*(value for value in state if isinstance(value, Tensor)))
        return self.network.retained() + Retained(optimizer=held)
