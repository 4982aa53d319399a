"""How each network is trained: all of it in one value, which the checkpoint keeps."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Self

from caster.errors import CasterError
from caster_bench.engine.networks import find

WHOLE = 0.25  # share of the epochs, at the end, that leave no patch out
NEW = {"drop_patches": 0.0}  # fields that checkpoints made before do not name


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe for training from nothing.

    >>> Recipe.of("resnet18").optimizer
    'sgd'
    """

    optimizer: str  # "sgd", with Nesterov momentum, "adamw", or "muon": AdamW but for blocks
    lr: float  # at its peak; it rises in a line, and falls as a cosine to nothing
    weight_decay: float  # of matrices and kernels; none of norms, biases, tokens and positions
    epochs: int
    warmup: int  # epochs
    batch_size: int
    label_smoothing: float = 0.1
    flip: bool = True  # half of the images, left to right
    operations: int = 2  # of RandAugment, one after the other
    magnitude: float = 9.0  # of them, out of 10
    mixup: float = 0.0  # parameter of the Beta distribution; 0: none
    cutmix: float = 0.0
    mixed: float = 1.0  # share of batches that are mixed at all
    erase: float = 0.0  # share of images that lose a box
    drop_path: float = 0.0  # rate of stochastic depth in the last block
    clip: float | None = None  # norm of the gradient at most
    ema: float = 0.999  # of the average of weights that is kept, a step
    mimetic: bool = False  # how a ViT's attention begins: see networks.transformers
    drop_patches: float = 0.0  # share of a ViT's patches left out, until the last quarter

    def __post_init__(self) -> None:
        if self.optimizer not in ("sgd", "adamw", "muon"):
            raise CasterError(f"an optimizer is sgd, adamw or muon, not {self.optimizer!r}")
        if not 0 <= self.drop_patches < 1:
            raise CasterError(f"a share of patches is from 0 to 1, not {self.drop_patches}")
        if self.epochs < 1 or self.batch_size < 2:
            raise CasterError("a recipe needs 1 epoch and batches of 2 images at least")

    @classmethod
    def of(cls, architecture: str, epochs: int | None = None) -> Self:
        """The recipe of a network, for this many epochs instead of its own."""
        if find(architecture).name not in RECIPES:
            raise CasterError(
                f"{architecture} is not trained here: its checkpoint is made of published weights"
            )
        recipe = RECIPES[architecture]
        assert isinstance(recipe, cls)
        return recipe if epochs is None else replace(recipe, epochs=epochs)

    def drops(self, epoch: int) -> bool:
        """Whether an epoch leaves patches out: the last ones see what tests see.

        >>> recipe = Recipe.of("vit_base", epochs=8)
        >>> [recipe.drops(epoch) for epoch in range(5, 9)]
        [True, True, False, False]
        """
        return self.drop_patches > 0 and epoch <= self.epochs - math.ceil(WHOLE * self.epochs)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The recipe that `to_json` wrote; nothing unknown, and nothing missing but what is new.

        A field that recipes did not have at first may be absent, and has then its default.
        """
        values = json.loads(text)
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or not names - NEW.keys() <= set(values) <= names:
            raise CasterError("its recipe is not one of this version")
        return cls(**values)

    def to_json(self) -> str:
        """All of it, in one line; new fields at their defaults are left out.

        So a recipe from before they were there is written as it was then, and is still the same.
        """
        values = asdict(self)
        left_out = [name for name, default in NEW.items() if values[name] == default]
        for name in left_out:
            del values[name]
        return json.dumps(values, sort_keys=True)


_RESNET = Recipe(
    optimizer="sgd",
    lr=0.4,
    weight_decay=5e-4,
    epochs=80,
    warmup=5,
    batch_size=512,
    operations=1,
    magnitude=5.0,
    mixup=0.2,
    cutmix=1.0,
    mixed=0.5,
)
# What a short run lacks is steps, so batches are small and Muon makes the most of each. With AdamW
# a ConvNeXt-T had 85.7 % of CIFAR-10 right after 36 epochs, and a Swin-T, with all batches mixed
# and a quarter of the images erased, 68 % after 70: see docs/performance.md.
_SWIN = Recipe(
    optimizer="muon",
    lr=1e-3,
    weight_decay=0.1,
    epochs=24,
    warmup=3,
    batch_size=256,
    operations=1,
    magnitude=5.0,
    mixup=0.2,
    cutmix=1.0,
    mixed=0.5,
    drop_path=0.1,
    clip=1.0,
)
_CONVNEXT = replace(_SWIN, epochs=40)
# Half of the patches make three quarters of the steps cheap.
_VIT = replace(_SWIN, epochs=28, ema=0.998, mimetic=True, drop_patches=0.5)
# After Touvron et al. 2021, without the teacher: the same network, changed, mixed and erased
# harder, though half of the batches stay unmixed: so few epochs learn little from more.
_DEIT = replace(_VIT, operations=2, magnitude=9.0, mixup=0.8, erase=0.25)


def _mini(recipe: Recipe, lr: float) -> Recipe:
    """For a few hundred digits, in seconds: small networks learn little from hard images.

    A digit that is turned left to right is none.
    """
    return replace(
        recipe,
        lr=lr,
        epochs=10,
        warmup=1,
        batch_size=32,
        flip=False,
        operations=1,
        magnitude=1.0,
        mixed=0.2 * recipe.mixed,
        erase=0.2 * recipe.erase,
        drop_path=0.0,
        ema=0.95,
        drop_patches=0.25 * recipe.drop_patches,
    )


RECIPES = {
    "resnet18": _RESNET,
    "resnet50": _RESNET,
    "convnext_tiny": _CONVNEXT,
    "vit_base": _VIT,
    "deit_base": _DEIT,
    "swin_tiny": _SWIN,
    "mini-resnet": _mini(_RESNET, 0.2),
    "mini-convnext": _mini(_CONVNEXT, 3e-3),
    "mini-vit": _mini(_VIT, 2e-3),
    "mini-deit": _mini(_DEIT, 2e-3),
    "mini-swin": _mini(_SWIN, 2e-3),
}
