"""CoTTA: a student taught by its own average over time and augmentations, restored at random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from caster.adapt.inert import answered_inert
from caster.adapt.network import Network, check_finite, gradients, placed, use_batch_statistics
from caster.adapt.protocol import Prediction, Retained
from caster.adapt.source import Source
from caster.errors import CasterError
from caster.models.protocol import FrozenModel
from caster_bench.methods.gradient.augment import Augmentation, draw_seed
from caster_bench.methods.gradient.entropy import cross_entropy
from caster_bench.methods.gradient.learner import Learner, Optimisers
from caster_bench.methods.gradient.pixels import Numbers, Scale


class CoTTA(Learner):
    """A student learns what its teacher says, and the teacher is the student's average over time.

    Wang et al. 2022. Where the source network is less sure of a batch than `threshold`, in the
    mean, the teacher's logits are averaged over `augmentations` copies. After the student's step
    the teacher moves to it by 1 - `ema`, and every entry of the student goes back to the source's
    with probability `restore`. The answer is the teacher's, from before the step. All parameters
    learn; BatchNorm normalises by the batch in all three networks. Dropout stays off, unlike in
    the reference.

    Augmentation needs to know black and white: of the model's preprocessing if it states one, of
    `mean` and `std` if pixels in [0, 1] were normalised by those (0 and 1 if by none), else the
    least and largest value of a batch are taken for them.

    The defaults are those of CIFAR-10; preset "cifar100" has another threshold; "imagenet" also
    another optimizer and rate, and a `symmetric` loss that the reference has for ImageNet alone.

    >>> from caster import wrap
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    >>> list(CoTTA(wrap(net), Source()).parameters)
    ['1.weight', '1.bias']
    """

    def __init__(
        self,
        model: FrozenModel,
        source: Source,
        *,
        name: str = "cotta",
        optimizer: Optimisers = "adam",
        lr: float = 1e-3,
        threshold: float = 0.92,
        augmentations: int = 32,
        ema: float = 0.999,
        restore: float = 0.01,
        symmetric: bool = False,
        mean: Numbers | None = None,
        std: Numbers | None = None,
        seed: int = 0,
    ) -> None:
        for setting, share in (("threshold", threshold), ("ema", ema), ("restore", restore)):
            if not 0 <= share <= 1:
                raise CasterError(f"{setting} of {name} is a number from 0 to 1, not {share!r}")
        if not isinstance(augmentations, int) or augmentations < 1:
            raise CasterError(f"augmentations of {name} must be 1 or more, not {augmentations!r}")
        self.threshold = threshold
        self.augmentations = augmentations
        self.ema = ema
        self.restore = restore
        self.symmetric = symmetric
        self.seed = seed
        super().__init__(model, source, name=name, norms=("batch",), optimizer=optimizer, lr=lr)
        self._scale = self._stated_scale(mean, std)

    def eligible(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Every parameter."""
        return {k: value for k, value in module.named_parameters() if value.is_floating_point()}

    def reset(self) -> None:
        """New copies of the network, and the same random numbers again."""
        super().reset()
        self._generator = torch.Generator().manual_seed(self.seed)
        if not self.inert:
            self.teacher, self.anchor = self._copy(), self._copy()

    def predict(self, images: Any) -> Prediction:
        """The teacher's answer, and the student's step."""
        if self.inert:
            return answered_inert(self.frozen, images)
        before = self._generator.get_state()
        with gradients():
            batch = self._images(images)
            taught = self.taught(batch)
            try:
                check_finite(taught, self.name)
            except CasterError:
                self._generator.set_state(before)  # a refused batch leaves no trace
                raise
            self.step(batch, taught)
        return Prediction(taught)

    def forward(self, images: Any) -> Any:  # (B, C)
        """The teacher's answer, as `predict` would give it now."""
        if self.inert:
            return answered_inert(self.frozen, images).logits
        before = self._generator.get_state()
        with gradients():
            taught = self.taught(self._images(images))
        self._generator.set_state(before)
        return taught

    @torch.no_grad()
    def taught(self, batch: Tensor) -> Tensor:  # (B, C)
        """What the teacher says of a batch, in the mean of augmented copies if it is a hard one."""
        sure = self.anchor(batch).softmax(dim=1).amax(dim=1).mean()
        if not sure < self.threshold:
            return self.teacher(batch)
        scale = Scale.of(batch) if self._scale is None else self._scale.beside(batch)
        pixels = scale.pixels(batch)
        total = torch.zeros((), device=batch.device)
        for _ in range(self.augmentations):  # one by one: together they would need the memory
            drawn = Augmentation.draw(self._generator, *batch.shape[2:])
            total = total + self.teacher(scale.values(drawn(pixels), batch))
        return total / self.augmentations

    def step(
        self,
        batch: Tensor,
        logits: Tensor,  # (B, C), the teacher's
    ) -> None:
        """The student learns them, the teacher follows, and some of the student is restored."""
        student = self.network(batch)
        loss = cross_entropy(student, logits)
        if self.symmetric:
            loss = (loss + cross_entropy(logits, student)) / 2
        self.descend(loss.mean())
        self._follow()
        self._restore()

    @torch.no_grad()
    def _follow(self) -> None:
        teacher = self.eligible(self.teacher.module)
        for name, parameter in self.parameters.items():
            teacher[name].lerp_(parameter, 1 - self.ema)

    @torch.no_grad()
    def _restore(self) -> None:
        drawn = torch.Generator(self.model.device).manual_seed(draw_seed(self._generator))
        for name, parameter in self.parameters.items():
            chance = torch.rand(parameter.shape, generator=drawn, device=parameter.device)
            parameter.copy_(torch.where(chance < self.restore, self.origin[name], parameter))

    def retained(self) -> Retained:
        """Student, teacher, anchor, and the optimizer's moments."""
        if self.inert:
            return Retained()
        return super().retained() + self.teacher.retained() + self.anchor.retained()

    def _copy(self) -> Network:
        with gradients():
            network = Network(self.model, self._columns)
        use_batch_statistics(network.module)
        return network

    def _images(self, images: Any) -> Tensor:
        batch = placed(self.model, images)
        if batch.ndim != 4 or not batch.is_floating_point():
            kind = f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
            raise CasterError(
                f"{self.name} augments images, floats (samples, channels, height, width), "
                f"and was given {kind}"
            )
        channels = batch.shape[1]
        if self._scale is not None and self._scale.black.numel() not in (1, channels):
            raise CasterError(f"mean and std of {self.name} are not for {channels} channels")
        return batch

    def _stated_scale(self, mean: Numbers | None, std: Numbers | None) -> Scale | None:
        """Black and white as far as they are known before there is a batch."""
        stated = self.model.preprocessing
        if (mean is None) != (std is None):
            raise CasterError(f"{self.name} needs both mean and std, or neither")
        if mean is None or std is None:
            return None if stated is None else Scale.stated(stated)
        if stated is not None:
            raise CasterError(
                f"{self.model.name} states its preprocessing: give {self.name} no mean and std"
            )
        if len({len(v) for v in (mean, std) if isinstance(v, Sequence)}) > 1:
            raise CasterError(f"mean and std of {self.name} are of one length, a number a channel")
        scale = Scale.normalised(mean, std)
        span = scale.white - scale.black
        if not bool(((span > 0) & span.isfinite()).all()):
            raise CasterError(f"std of {self.name} must be above 0, not {std!r}")
        return scale
