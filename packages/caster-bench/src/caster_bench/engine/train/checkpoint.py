"""A trained network in one safetensors file, with its provenance and a digest."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from caster.errors import CasterError
from caster.io import labels, signed_tensors
from caster.io.files import AnyPath
from caster.io.signed_tensors import Arrays
from caster.models.preprocessing import Preprocessing
from caster_bench.engine.networks import build
from caster_bench.engine.train.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

    from caster.models.torch import TorchModel

FORMAT, VERSION = "caster-checkpoint", "1"
DATA_KEYS = ("name", "sha256", "n")
PUBLISHED = "published weights"  # instead of a recipe


@dataclass(frozen=True, eq=False, kw_only=True)
class Metadata:
    """Provenance of a checkpoint."""

    architecture: str
    classes: labels.Labels  # (C,), in the order of the logits
    size: int  # of images, pixels per side
    mean: tuple[float, ...]  # subtracted from pixels between 0 and 1
    std: tuple[float, ...]  # divided by
    recipe: Recipe | None  # None: published weights
    data: dict[str, Any]  # name, sha256 and n of the training images
    test: dict[str, Any]  # the same of the test images
    seed: int
    accuracy: float  # on the test images, in float32
    software: dict[str, str]
    sha256: str = ""  # digest of weights and all of the above, once written

    @property
    def preprocessing(self) -> Preprocessing:
        """How images become batches; images of other sizes are resized and cropped."""
        m, s = self.mean, self.std
        return Preprocessing(
            1.0,
            (m[0], m[1], m[2]),
            (s[0], s[1], s[2]),
            "NCHW",
            resize=self.size,
            interpolation="bicubic",
            crop=(self.size, self.size),
        )

    @property
    def origin(self) -> dict[str, str]:
        """Everything that determines the weights: runs of one origin make the same checkpoint."""
        return {
            "architecture": self.architecture,
            "classes": labels.to_json(self.classes),
            "recipe": PUBLISHED if self.recipe is None else self.recipe.to_json(),
            "data": self.data["sha256"],
            "seed": str(self.seed),
        }


def save(net: nn.Module, metadata: Metadata, path: AnyPath) -> None:
    """Write a checkpoint atomically."""
    arrays = {k: v.detach().cpu().contiguous().numpy() for k, v in net.state_dict().items()}
    signed_tensors.write(arrays, _to_text(metadata), path)


def load(path: AnyPath) -> tuple[nn.Module, Metadata]:
    """Load a network, in eval mode, and its metadata."""
    import torch

    from caster.models.torch import load_weights

    arrays, metadata = _read(path)
    net = build(metadata.architecture, len(metadata.classes), metadata.size)
    try:
        load_weights(net, {name: torch.from_numpy(array) for name, array in arrays.items()})
    except (RuntimeError, TypeError, ValueError):  # another timm, with other names or shapes
        raise CasterError(
            f"the weights in {path} do not fit {metadata.architecture} as timm builds it here: "
            f"it was made with {metadata.software}"
        ) from None
    return net, metadata


def model_of(path: AnyPath, device: str | None = None, **options: Any) -> TorchModel:
    """Load a checkpoint as a frozen model with its preprocessing; options are `wrap`'s."""
    from caster.models.torch import TorchModel

    net, metadata = load(path)
    name, how = metadata.architecture, metadata.preprocessing
    return TorchModel(net, name=name, preprocessing=how, device=device, **options)


def inspect(path: AnyPath) -> Metadata:
    """Read the metadata of a checkpoint, after checking its digest."""
    return _read(path)[1]


def _read(path: AnyPath) -> tuple[Arrays, Metadata]:
    def check(text: dict[str, str]) -> None:
        if (text.get("format"), text.get("version")) != (FORMAT, VERSION):
            raise CasterError(f"{path} is not a checkpoint of `caster bench train`")

    arrays, text = signed_tensors.read(path, "a checkpoint", "caster bench train", check)
    try:
        return arrays, _from_text(text)
    except (LookupError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise CasterError(f"{path} is not a usable checkpoint ({error}): train again") from None


def _to_text(metadata: Metadata) -> dict[str, str]:
    return metadata.origin | {
        "format": FORMAT,
        "version": VERSION,
        "data": json.dumps(metadata.data, sort_keys=True),
        "size": str(metadata.size),
        "mean": json.dumps(metadata.mean),
        "std": json.dumps(metadata.std),
        "test": json.dumps(metadata.test, sort_keys=True),
        "accuracy": repr(metadata.accuracy),
        "software": json.dumps(metadata.software, sort_keys=True),
    }


def _from_text(text: dict[str, str]) -> Metadata:
    return Metadata(
        architecture=text["architecture"],
        classes=labels.from_json(text["classes"]),
        size=int(text["size"]),
        mean=_three(text["mean"]),
        std=_three(text["std"]),
        recipe=None if text["recipe"] == PUBLISHED else Recipe.from_json(text["recipe"]),
        data=_described(text["data"], *DATA_KEYS),
        test=_described(text["test"], *DATA_KEYS),
        seed=int(text["seed"]),
        accuracy=float(text["accuracy"]),
        software=_described(text["software"]),
        sha256=text["content_sha256"],
    )


def _three(text: str) -> tuple[float, ...]:
    red, green, blue = json.loads(text)
    return red, green, blue  # unconverted: they enter the preprocessing's digest


def _described(text: str, *keys: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict) or not found.keys() >= {*keys}:
        raise ValueError(f"it describes its data or software as {text[:40]}")
    return found
