"""Models by their timm name, with weights from a local checkpoint or, by network, pretrained."""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from caster.errors import CasterError
from caster.models.preprocessing import Preprocessing


def imported(
    module: str,
    user: str,  # what needs it, for the message
) -> Any:
    """A module of timm, or one line that says what to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise CasterError(f"{user} needs timm: pip install 'caster-tta[timm]'") from None
    # timm imports torchvision, whose compiled operators belong to one build of torch
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        line = " ".join(str(error).split())
        raise CasterError(
            f"{user} needs timm, which cannot be imported ({line[:200]}): this torchvision does "
            f"not match torch {version('torch')}; install one from the index that torch came from "
            "(pip install --force-reinstall --no-deps torchvision --index-url INDEX)"
        ) from None


def create(name: str, checkpoint: Path | None) -> Any:
    """A timm module with its weights, and as many classes as the checkpoint has."""
    timm = imported("timm", f"timm:{name}")
    # Its retries would fill the screen; what came of them is said below.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    from caster.models.modules import load_weights, read_weights

    weights = None if checkpoint is None else read_weights(checkpoint)
    try:
        if weights is None:
            return timm.create_model(name, pretrained=True)
        classifier = getattr(timm.get_pretrained_cfg(name), "classifier", None)
        module = timm.create_model(name, **_n_classes(weights, classifier))
        load_weights(module, weights)
        return module
    except OSError:
        raise CasterError(
            f"cannot fetch the pretrained weights of timm:{name}: without a network, give a local "
            "checkpoint (.safetensors) with {argument}",
            argument="checkpoint",
        ) from None
    except (RuntimeError, ValueError) as error:
        line = " ".join(str(error).split())
        raise CasterError(f"timm:{name} cannot be made: {line[:300]}") from None


def preprocessing(module: Any) -> Preprocessing:
    """What timm states for a module."""
    from timm.data import resolve_model_data_config

    return Preprocessing.from_timm(resolve_model_data_config(module))


def _n_classes(
    weights: dict[str, Any],
    classifier: str | tuple[str, ...] | None,  # several where a teacher had a head of its own
) -> dict[str, int]:
    names = (classifier,) if isinstance(classifier, str) else classifier or ()
    heads = [weights[f"{name}.weight"] for name in names if f"{name}.weight" in weights]
    if heads and (heads[0].ndim < 2 or heads[0].numel() == 0):
        raise ValueError(f"the weight of its classifier has the shape {tuple(heads[0].shape)}")
    return {"num_classes": heads[0].shape[0]} if heads else {}
