"""How each network is trained: all of it in one value, which the checkpoint keeps."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Self

from caster.bench.networks import find
from caster.errors import CasterError


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe for training from nothing.

    >>> Recipe.of("resnet18").optimizer
    'sgd'
    """

    optimizer: str  # "sgd", with Nesterov momentum, or "adamw"
    lr: float  # at its peak; it rises in a line, and falls as a cosine to nothing
    weight_decay: float  # of matrices and kernels; none of norms, biases, tokens and positions
    epochs: int
    warmup: int  # epochs
    batch_size: int
    label_smoothing: float = 0.1
    flip: bool = True  # half of the pictures, left to right
    operations: int = 2  # of RandAugment, one after the other
    magnitude: float = 9.0  # of them, out of 10
    mixup: float = 0.0  # parameter of the Beta distribution; 0: none
    cutmix: float = 0.0
    mixed: float = 1.0  # share of batches that are mixed at all
    erase: float = 0.0  # share of pictures that lose a box
    drop_path: float = 0.0  # rate of stochastic depth in the last block
    clip: float | None = None  # norm of the gradient at most
    ema: float = 0.999  # of the average of weights that is kept, a step
    mimetic: bool = False  # how a ViT's attention begins: see networks.transformers

    def __post_init__(self) -> None:
        if self.optimizer not in ("sgd", "adamw"):
            raise CasterError(f"an optimizer is sgd or adamw, not {self.optimizer!r}")
        if self.epochs < 1 or self.batch_size < 2:
            raise CasterError("a recipe needs 1 epoch and batches of 2 pictures at least")

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

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The recipe that `to_json` wrote; nothing may be missing, and nothing unknown."""
        values = json.loads(text)
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or set(values) != names:
            raise CasterError("its recipe is not one of this version")
        return cls(**values)

    def to_json(self) -> str:
        """All of it, in one line."""
        return json.dumps(asdict(self), sort_keys=True)


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
# Sixty epochs with RandAugment of strength 7 learn less than forty with crops and mixing alone.
_CONVNEXT = Recipe(
    optimizer="adamw",
    lr=1.5e-3,
    weight_decay=0.05,
    epochs=40,
    warmup=4,
    batch_size=256,
    operations=0,
    mixup=0.2,
    cutmix=1.0,
    mixed=0.5,
    drop_path=0.1,
    clip=5.0,
)
# After Steiner et al. 2022: RandAugment and some mixup. Batches are small, since what a short run
# lacks is steps.
_VIT = Recipe(
    optimizer="adamw",
    lr=5e-4,
    weight_decay=0.05,
    epochs=80,
    warmup=5,
    batch_size=256,
    mixup=0.5,
    drop_path=0.1,
    clip=1.0,
    mimetic=True,
)
# After Touvron et al. 2021, without the teacher: the same network, mixed and erased harder.
_DEIT = replace(_VIT, mixup=0.8, cutmix=1.0, erase=0.25)
_SWIN = replace(_DEIT, lr=1e-3, epochs=100, batch_size=512, clip=5.0, mimetic=False)


def _mini(recipe: Recipe, lr: float) -> Recipe:
    """For a few hundred digits, in seconds: small networks learn little from hard pictures.

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
    "mini-vit": _mini(_VIT, 1e-3),
    "mini-deit": _mini(_DEIT, 1e-3),
    "mini-swin": _mini(_SWIN, 2e-3),
}
