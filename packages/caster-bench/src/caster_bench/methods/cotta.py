"""CoTTA: a student taught by its average over time and augmentations, restored at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from caster.errors import CasterError
from caster_bench.methods.augmented_views import Augmentation, AugmentingMethod, draw_seed
from caster_bench.methods.gradient_method import OptimizerName, cross_entropy
from caster_bench.methods.network import Network, gradients, use_batch_statistics
from caster_bench.methods.protocol import Prediction, Retained, count, number

REVISION = 1


@dataclass(eq=False, repr=False, kw_only=True)
class CoTTA(AugmentingMethod):
    """Train a student on its teacher's predictions; the teacher is the student's moving average.

    Wang et al., "Continual Test-Time Domain Adaptation", CVPR 2022. If the source network's mean
    confidence on a batch is below `threshold`, the teacher's logits are averaged over
    `augmentations` augmented copies. The student takes a step on the cross-entropy with the
    teacher; the teacher becomes `ema` teacher + (1 - `ema`) student; and every entry of the student
    is restored to its source value with probability `restore`. The answer is the teacher's, from
    before the step. All parameters are learnt; BatchNorm uses batch statistics in all three
    networks. Unlike in the reference, dropout stays off.

    Augmentation needs the values of black and white. They come from the model's preprocessing if
    it has one, else from `mean` and `std` if pixels in [0, 1] were normalised by those (0 and 1 if
    they were not), else from the smallest and largest value of the batch.

    Defaults are those of CIFAR-10; preset "cifar100" has another threshold; "imagenet" also has
    another optimizer and rate, and a `symmetric` loss that the reference uses for ImageNet only.

    >>> from caster import wrap
    >>> from caster_bench.methods import Source
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    >>> list(CoTTA(wrap(net), Source()).parameters)
    ['1.weight', '1.bias']
    """

    name: str = "cotta"
    optimizer: OptimizerName = "adam"
    threshold: float = number(0.92, high=1)
    augmentations: int = count(32)
    ema: float = number(0.999, high=1)
    restore: float = number(0.01, high=1)
    symmetric: bool = False

    def eligible(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Select every parameter."""
        return {k: value for k, value in module.named_parameters() if value.is_floating_point()}

    def reset(self) -> None:
        """Start over with new copies of the network and the same random numbers."""
        super().reset()
        self._generator = torch.Generator().manual_seed(self.seed)
        if not self.inert:
            self.teacher, self.anchor = self._copy(), self._copy()

    def predict(self, images: Any) -> Prediction:
        """Answer with the teacher, then take the student's step."""
        before = self._generator.get_state()
        try:
            return super().predict(images)
        except CasterError:
            self._generator.set_state(before)  # a rejected batch leaves no trace
            raise

    def forward(self, images: Any) -> Any:  # (B, C)
        """Logits that `predict` would give now, without its step."""
        before = self._generator.get_state()
        logits = super().forward(images)
        self._generator.set_state(before)
        return logits

    def place(self, images: Any) -> Tensor:
        """Move a batch of images to the model's device."""
        return self._range.image_batch(images)

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:  # (B, C)
        """The teacher's logits, averaged over augmented copies if the source is not confident."""
        confidence = self.anchor(batch).softmax(dim=1).amax(dim=1).mean()
        if not confidence < self.threshold:
            return self.teacher(batch)
        scale = self._range.of(batch)
        pixels = scale.pixels(batch)
        total = torch.zeros((), device=batch.device)
        for _ in range(self.augmentations):  # one at a time to save memory
            augment = Augmentation.draw(self._generator, *batch.shape[2:])
            total = total + self.teacher(scale.values(augment(pixels), batch))
        return total / self.augmentations

    def step(
        self,
        batch: Tensor,
        logits: Tensor,  # (B, C), the teacher's
    ) -> None:
        """Train the student, update the teacher, and restore part of the student."""
        student = self.network(batch)
        loss = cross_entropy(student, logits)
        if self.symmetric:
            loss = (loss + cross_entropy(logits, student)) / 2
        self.descend(loss.mean())
        self._update_teacher()
        self._restore()

    @torch.no_grad()
    def _update_teacher(self) -> None:
        teacher = self.eligible(self.teacher.module)
        for name, parameter in self.parameters.items():
            teacher[name].lerp_(parameter, 1 - self.ema)

    @torch.no_grad()
    def _restore(self) -> None:
        generator = torch.Generator(self.model.device).manual_seed(draw_seed(self._generator))
        for name, parameter in self.parameters.items():
            chance = torch.rand(parameter.shape, generator=generator, device=parameter.device)
            parameter.copy_(torch.where(chance < self.restore, self.origin[name], parameter))

    def retained(self) -> Retained:
        """Bytes of student, teacher, source network and optimizer state."""
        if self.inert:
            return Retained()
        return super().retained() + self.teacher.retained() + self.anchor.retained()

    def _copy(self) -> Network:
        with gradients():
            network = Network(self.model, self.columns)
        use_batch_statistics(network.module)
        return network
