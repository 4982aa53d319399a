"""One call for every kind of frozen model."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from caster.errors import CasterError
from caster.frozen.preprocessing import Preprocessing
from caster.frozen.protocol import FrozenModel

IN_GRAPH: Literal["in-graph"] = "in-graph"
Stated = Preprocessing | str | os.PathLike[str] | None  # a TOML file's path, or "in-graph"

KINDS = "an nn.Module, 'timm:NAME', the path of an .onnx file, or a function"


def wrap(
    model: Any,
    *,
    head: str | None = None,
    preprocessing: Stated = None,
    checkpoint: str | os.PathLike[str] | None = None,
    device: str | None = None,
    bf16: bool = False,
    channels_last: bool = False,
    cuda_graph: bool = False,
    providers: Sequence[str] | None = None,
    version: str | None = None,
) -> FrozenModel:
    """A frozen model from an nn.Module, "timm:NAME", the path of an .onnx file, or a function.

    Parameters
    ----------
    head : the classifier, where it cannot be found: a layer's name, or in ONNX a node's or an
        output's.
    preprocessing : how pictures become batches: a `Preprocessing`, the path of a TOML file, or
        "in-graph" if the model resizes and normalises itself. timm models bring their own.
        Needed where caster reads pictures; batches you prepare yourself need none.
    checkpoint : local weights of a timm model, .safetensors.
    device : where a torch model runs, "cpu" or "cuda"; a module stays where it is by default.
    bf16, channels_last : of a torch model.
    cuda_graph : record a torch model on a GPU and replay it: for modules that do the same on every
        batch. Faster, and holds the memory of one batch.
    providers : of ONNX Runtime, in order of preference.
    version : what a function's provider calls the model; binds states to it.

    >>> import numpy as np
    >>> model = wrap(lambda batch: batch.reshape(len(batch), -1), version="pixels-1")
    >>> model(np.zeros((2, 4, 4))).features.shape
    (2, 16)
    """
    stated = None if preprocessing is None else _stated(preprocessing)
    torch_only = {
        "device": device,
        "bf16": bf16,
        "channels_last": channels_last,
        "cuda_graph": cuda_graph,
    }
    if _is_module(model) or (isinstance(model, str) and model.startswith("timm:")):
        _refuse_options(model, {"providers": providers, "version": version})
        if _is_module(model):
            _refuse_options(model, {"checkpoint": checkpoint})
        return _torch_model(model, head, stated, checkpoint, torch_only)
    if isinstance(model, str | os.PathLike) and str(model).endswith(".onnx"):
        _refuse_options(model, torch_only | {"checkpoint": checkpoint, "version": version})
        from caster.frozen.onnx import OnnxModel

        chosen = {} if providers is None else {"providers": providers}
        return OnnxModel(Path(model), head=head, preprocessing=stated, **chosen)
    if hasattr(model, "verify") and hasattr(model, "preprocessing"):
        raise CasterError(f"{model.name} is wrapped already")
    if callable(model) and not isinstance(model, type):
        others = {"head": head, "checkpoint": checkpoint, "providers": providers}
        _refuse_options(model, torch_only | others)
        from caster.frozen.function import FunctionModel

        if stated == IN_GRAPH:
            raise CasterError("state a function's preprocessing in full: it shows no input shape")
        return FunctionModel(model, version=version, preprocessing=stated)
    raise CasterError(f"a model is {KINDS}, not {_called(model)}")


def _stated(preprocessing: Preprocessing | str | os.PathLike[str]) -> Any:
    if isinstance(preprocessing, Preprocessing) or preprocessing == IN_GRAPH:
        return preprocessing
    return Preprocessing.from_toml(Path(preprocessing))


def _is_module(model: Any) -> bool:
    torch = sys.modules.get("torch")  # whoever has a module has loaded torch
    return torch is not None and isinstance(model, torch.nn.Module)


def _torch_model(
    model: Any,
    head: str | None,
    preprocessing: Any,
    checkpoint: str | os.PathLike[str] | None,
    options: dict[str, Any],
) -> FrozenModel:
    try:
        from caster.frozen.torch import TorchModel
    except ModuleNotFoundError:
        raise CasterError(f"{model} needs torch: pip install 'caster-tta[torch]'") from None

    name = None
    if isinstance(model, str):
        from caster.frozen import timm

        name = model
        module = timm.create(
            model.removeprefix("timm:"), None if checkpoint is None else Path(checkpoint)
        )
        preprocessing = timm.preprocessing(module) if preprocessing is None else preprocessing
    else:
        module = model
    if preprocessing == IN_GRAPH:
        preprocessing = Preprocessing.in_graph("NCHW", "float32")
    return TorchModel(module, name=name, head=head, preprocessing=preprocessing, **options)


def _refuse_options(model: Any, options: dict[str, Any]) -> None:
    """An option that means nothing to this kind of model is a mistake, not a default."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise CasterError(f"{name} is not an option of {_called(model)}")


def _called(model: Any) -> str:
    """A model in a message: as it was typed, or its class, which takes one line."""
    return repr(str(model)) if isinstance(model, str | os.PathLike) else type(model).__name__
