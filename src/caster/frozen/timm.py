"""Models by their timm name, with weights from a local checkpoint or, by network, pretrained."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from caster.errors import CasterError
from caster.frozen.preprocessing import Preprocessing


def create(name: str, checkpoint: Path | None) -> tuple[Any, Preprocessing]:
    """A timm module with its weights, and the preprocessing timm states for it."""
    try:
        import timm
        from timm.data import resolve_model_data_config
    except ModuleNotFoundError:
        raise CasterError(f"timm:{name} needs timm: pip install 'caster-tta[timm]'") from None
    # Its retries would fill the screen; what came of them is said below.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        module = timm.create_model(name, pretrained=checkpoint is None)
        if checkpoint is not None:
            module = _loaded(name, checkpoint, module.pretrained_cfg.get("classifier"))
    except OSError:
        raise CasterError(
            f"cannot fetch the pretrained weights of timm:{name}: without a network, give a local "
            "checkpoint (.safetensors)"
        ) from None
    except RuntimeError as error:
        line = " ".join(str(error).split())
        raise CasterError(f"timm:{name} cannot be made: {line[:300]}") from None
    return module, Preprocessing.from_timm(resolve_model_data_config(module))


def _loaded(name: str, checkpoint: Path, classifier: Any) -> Any:
    """The module with a checkpoint's weights, and as many classes as the checkpoint has."""
    import timm

    weights = _weights(checkpoint)
    rows = weights.get(f"{classifier}.weight")
    module = timm.create_model(name, **({} if rows is None else {"num_classes": rows.shape[0]}))
    module.load_state_dict(weights)
    return module


def _weights(checkpoint: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    if not checkpoint.is_file():
        raise CasterError(f"the checkpoint {checkpoint} does not exist")
    if checkpoint.suffix != ".safetensors":
        raise CasterError(
            f"the checkpoint {checkpoint} must be a .safetensors file: caster never unpickles; "
            "safetensors.torch.save_file converts a state dict"
        )
    try:
        return load_file(checkpoint)
    except (SafetensorError, OSError):
        raise CasterError(f"the checkpoint {checkpoint} is truncated or damaged") from None
