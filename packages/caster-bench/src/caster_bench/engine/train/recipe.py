"""How each network is trained, in one value that its checkpoint stores."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from caster.errors import CasterError
from caster_bench.engine.networks import find

FULL_PATCH_SHARE = 0.25  # share of the epochs, at the end, that drop no patches
OPTIONAL_FIELDS = {"drop_patches": 0.0}  # fields that older checkpoints lack
PLAIN_EPOCHS = 30
PLAIN: dict[str, Any] = {  # crops and flips only, and the last weights
    "label_smoothing": 0.0,
    "operations": 0,
    "magnitude": 0.0,
    "mixup": 0.0,
    "cutmix": 0.0,
    "mixed": 0.0,
    "ema": 0.0,
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe for training from scratch.

    >>> Recipe.of("resnet18").optimizer
    'sgd'
    """

    optimizer: str  # "sgd", with Nesterov momentum; "adamw"; "muon" for blocks, AdamW for the rest
    lr: float  # at its peak, after a linear warm-up and before a cosine to 0
    weight_decay: float  # of matrices and kernels; not of norms, biases, tokens and positions
    epochs: int
    warmup: int  # epochs
    batch_size: int
    label_smoothing: float = 0.1
    flip: bool = True  # half of the images, horizontally
    operations: int = 2  # of RandAugment
    magnitude: float = 9.0  # of RandAugment, out of 10
    mixup: float = 0.0  # alpha of the Beta distribution; 0: none
    cutmix: float = 0.0
    mixed: float = 1.0  # share of batches with mixup or CutMix
    erase: float = 0.0  # share of images with an erased box
    drop_path: float = 0.0  # rate of stochastic depth in the last block
    clip: float | None = None  # maximum norm of the gradient
    ema: float = 0.999  # decay of the averaged weights per step
    mimetic: bool = False  # initialise a ViT's attention as in `networks.mimetic`
    drop_patches: float = 0.0  # share of a ViT's patches dropped until the last quarter

    def __post_init__(self) -> None:
        if self.optimizer not in ("sgd", "adamw", "muon"):
            raise CasterError(f"an optimizer is sgd, adamw or muon, not {self.optimizer!r}")
        if not 0 <= self.drop_patches < 1:
            raise CasterError(f"a share of patches is from 0 to 1, not {self.drop_patches}")
        if self.epochs < 1 or self.batch_size < 2:
            raise CasterError("a recipe needs 1 epoch and batches of 2 images at least")

    @classmethod
    def of(cls, architecture: str, epochs: int | None = None, *, plain: bool = False) -> Self:
        """Return the recipe of a network, or its plain one, optionally with other epochs.

        >>> Recipe.of("resnet18", plain=True).cutmix
        0.0
        """
        if find(architecture).name not in RECIPES:
            raise CasterError(
                f"{architecture} is not trained here: its checkpoint has published weights"
            )
        recipe = RECIPES[architecture]
        assert isinstance(recipe, cls)
        if plain:
            if recipe.optimizer != "sgd":
                raise CasterError(f"only ResNets have a plain recipe, not {architecture}")
            recipe = replace(recipe, **PLAIN, epochs=min(recipe.epochs, PLAIN_EPOCHS))
        return recipe if epochs is None else replace(recipe, epochs=epochs)

    def drops(self, epoch: int) -> bool:
        """Whether an epoch drops patches; the last ones see whole images, as tests do.

        >>> recipe = Recipe.of("vit_base", epochs=8)
        >>> [recipe.drops(epoch) for epoch in range(5, 9)]
        [True, True, False, False]
        """
        last = self.epochs - math.ceil(FULL_PATCH_SHARE * self.epochs)
        return self.drop_patches > 0 and epoch <= last

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote; only fields in `OPTIONAL_FIELDS` may be absent."""
        values = json.loads(text)
        names = {field.name for field in fields(cls)}
        if (
            not isinstance(values, dict)
            or not names - OPTIONAL_FIELDS.keys() <= set(values) <= names
        ):
            raise CasterError("its recipe is not one of this version")
        return cls(**values)

    def to_json(self) -> str:
        """Return one line of JSON, without new fields at their defaults.

        So recipes of older checkpoints still compare equal.
        """
        values = asdict(self)
        default = {name for name, value in OPTIONAL_FIELDS.items() if values[name] == value}
        return json.dumps({k: v for k, v in values.items() if k not in default}, sort_keys=True)


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
# A short run has few steps, so batches are small and Muon makes the most of each. With AdamW a
# ConvNeXt-T reached 85.7 % on CIFAR-10 after 36 epochs, and a Swin-T, with all batches mixed and a
# quarter of the images erased, 68 % after 70: see docs/performance.md.
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
# Dropping half of the patches makes three quarters of the epochs cheaper.
_VIT = replace(_SWIN, epochs=28, ema=0.998, mimetic=True, drop_patches=0.5)
# After Touvron et al. 2021, without the teacher: ViT-B with stronger augmentation. Half of the
# batches stay unmixed, because a short run gains little from more.
_DEIT = replace(_VIT, operations=2, magnitude=9.0, mixup=0.8, erase=0.25)


def _mini(recipe: Recipe, lr: float) -> Recipe:
    """Adapt a recipe to a few hundred digits and seconds: weak augmentation, and no flips."""
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
