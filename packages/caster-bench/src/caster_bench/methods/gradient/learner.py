"""What the methods that learn by gradients share: a copy, its eligible parameters, a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from caster.adapt.frozen import Frozen
from caster.adapt.inert import answered_inert, warn_inert
from caster.adapt.network import (
    Network,
    affine_parameters,
    check_finite,
    checked_norms,
    gradients,
    norm_layers,
    placed,
    torch_model,
    use_batch_statistics,
)
from caster.adapt.protocol import Prediction, Retained, nbytes
from caster.adapt.source import Source, columns_of
from caster.errors import CasterError
from caster.models.protocol import FrozenModel

Optimisers = Literal["adam", "sgd"]
IN_WORDS = {"batch": "BatchNorm", "layer": "LayerNorm", "group": "GroupNorm"}


class Learner:
    """A method that answers by its own copy of the network, and then takes a step on it.

    Subclasses say what is eligible and what a step is. Scales and shifts of normalisation layers
    of the kinds in `norms` are learnt; where BatchNorm is among them, it normalises by the batch.

    Attributes
    ----------
    parameters : what is learnt, by name.
    inert : whether that is nothing, and the method answers as the frozen model.
    """

    def __init__(
        self,
        model: FrozenModel,
        source: Source,
        *,
        name: str,
        norms: Sequence[str],
        optimizer: Optimisers,
        lr: float,
    ) -> None:
        check_from_zero(name, lr=lr)
        if optimizer not in ("adam", "sgd"):
            raise CasterError(f"optimizer of {name} is adam or sgd, not {optimizer!r}")
        self.name = name
        self.model = torch_model(model, name)
        self.frozen = Frozen(model, source)
        self.norms = checked_norms(norms, name)
        self.lr = lr
        self._optimizer_kind = optimizer
        self._columns = columns_of(source, name)
        self.reset()
        if self.inert:
            kinds = " or ".join(IN_WORDS[norm] for norm in self.norms)
            warn_inert(name, model, f"{kinds} to learn")

    @property
    def inert(self) -> bool:
        """Whether the model has nothing to learn."""
        return not self.parameters

    @cached_property
    def origin(self) -> dict[str, Tensor]:
        """What is learnt as it is in the frozen model, by name: that model's own, no copies."""
        return {k: value.detach() for k, value in self.eligible(self.model.module).items()}

    def reset(self) -> None:
        """A new copy of the network, and an optimizer that remembers nothing."""
        self.parameters: dict[str, nn.Parameter] = {}
        if not self.origin:  # nothing to learn needs no copy
            return
        self.model.verify()  # or the copy would be of another model than at first
        with gradients():  # what is copied in inference mode could never learn
            self.network = Network(self.model, self._columns)
            self.parameters = self.eligible(self.network.module)
            for name, parameter in self.parameters.items():
                if parameter.dtype not in (torch.float32, torch.float64):
                    raise CasterError(
                        f"{self.name} cannot learn {name} in {parameter.dtype}, too coarse for its "
                        "steps: give a float32 module, with bf16=True for speed"
                    )
                parameter.requires_grad_(True)
            if "batch" in self.norms:
                use_batch_statistics(self.network.module)
        self.optimizer = make_optimizer(
            self._optimizer_kind, list(self.parameters.values()), self.lr
        )

    def eligible(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """What of a module is learnt, by name."""
        return affine_parameters(norm_layers(module, self.norms))

    def predict(self, images: Any) -> Prediction:
        """The answer before the step, and the step."""
        if self.inert:
            return answered_inert(self.frozen, images)
        with gradients():
            batch = placed(self.model, images)
            logits = self.network(batch)
            check_finite(logits, self.name)
            if not logits.requires_grad:
                raise CasterError(
                    f"no gradient reaches what {self.name} would learn: {self.model.name} computes "
                    "without gradients"
                )
            self.step(batch, logits)
        return Prediction(logits.detach())

    def forward(self, images: Any) -> Any:  # (B, C)
        """The scores `predict` would give now, without its step."""
        if self.inert:
            return answered_inert(self.frozen, images).logits
        # With gradients recorded and dropped: other kernels may round otherwise.
        with gradients():
            return self.network(placed(self.model, images)).detach()

    def step(
        self,
        batch: Tensor,
        logits: Tensor,  # (B, C), of this batch, with their graph
    ) -> None:
        """Learn from a batch."""
        raise NotImplementedError

    def descend(self, loss: Tensor) -> None:
        """One step of the optimizer down a loss."""
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()  # or a gradient would outlive the batch

    def retained(self) -> Retained:
        """Its copy of the network, and the optimizer's moments."""
        if self.inert:
            return Retained()
        return self.network.retained() + Retained(optimizer=optimizer_bytes(self.optimizer))


def check_from_zero(name: str, **settings: float) -> None:
    """Refuse settings of a method that are not finite numbers from 0 up."""
    for setting, value in settings.items():
        if not 0 <= value < float("inf"):
            raise CasterError(f"{setting} of {name} is a number from 0 up, not {value!r}")


def make_optimizer(kind: Optimisers, parameters: list[nn.Parameter], lr: float) -> Optimizer:
    """Adam, or SGD with momentum 0.9, as the methods' authors set them."""
    if kind == "adam":
        return Adam(parameters, lr, betas=(0.9, 0.999), weight_decay=0.0)
    return SGD(parameters, lr, momentum=0.9)


def optimizer_bytes(optimizer: Optimizer) -> int:
    """Bytes of the tensors an optimizer remembers."""
    remembered = (value for held in optimizer.state.values() for value in held.values())
    return nbytes(*(value for value in remembered if isinstance(value, torch.Tensor)))
