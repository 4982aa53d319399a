"""One call for every kind of frozen model."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

from caster.errors import CasterError
from caster.models.factory import MARK, made_by
from caster.models.preprocessing import Preprocessing
from caster.models.protocol import FrozenModel

IN_GRAPH: Literal["in-graph"] = "in-graph"
Stated = Preprocessing | str | os.PathLike[str] | None  # a TOML file's path, or "in-graph"

KINDS = (
    "an nn.Module, 'timm:NAME', 'hf:FOLDER', 'FILE.py:FACTORY', the path of an .onnx file, or a "
    "function"
)


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

    Also from "hf:FOLDER", an image classifier of transformers in a local folder, and from
    "FILE.py:FACTORY", a function in a file of yours that takes no arguments and returns one of
    the above. **That runs the code in the file.**

    Parameters
    ----------
    head : the classifier, where it cannot be found: a layer's name, or in ONNX a node's or an
        output's.
    preprocessing : how images become batches: a `Preprocessing`, the path of a TOML file, or
        "in-graph" if the model resizes and normalises itself. timm models bring their own, and
        so do folders of transformers with a preprocessor_config.json.
        Needed where caster reads images; batches you prepare yourself need none.
    checkpoint : local weights of a timm model or of a factory's module, .safetensors.
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
    name = None
    if isinstance(model, str) and MARK in model:
        model, name = made_by(model), model
        if _is_wrapped(model):
            others = {"head": head, "preprocessing": stated, "checkpoint": checkpoint}
            _refuse_options(
                name, torch_only | others | {"providers": providers, "version": version}
            )
            return cast(FrozenModel, model)
        if _is_module(model) and checkpoint is not None:
            _load(model, name, Path(checkpoint))
            checkpoint = None
    if _is_module(model) or (isinstance(model, str) and model.startswith(("timm:", "hf:"))):
        _refuse_options(model, {"providers": providers, "version": version})
        if _is_module(model) or model.startswith("hf:"):
            _refuse_options(model, {"checkpoint": checkpoint})
        return _torch_model(model, name, head, stated, checkpoint, torch_only)
    if isinstance(model, str | os.PathLike) and str(model).endswith(".onnx"):
        _refuse_options(model, torch_only | {"checkpoint": checkpoint, "version": version})
        from caster.models.onnx import OnnxModel

        chosen = {} if providers is None else {"providers": providers}
        return OnnxModel(Path(model), head=head, preprocessing=stated, **chosen)
    if _is_wrapped(model):
        raise CasterError(f"{model.name} is wrapped already")
    if callable(model) and not isinstance(model, type):
        others = {"head": head, "checkpoint": checkpoint, "providers": providers}
        _refuse_options(model, torch_only | others)
        from caster.models.function import FunctionModel

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


def _is_wrapped(model: Any) -> bool:
    return hasattr(model, "verify") and hasattr(model, "preprocessing")


def _load(module: Any, name: str, checkpoint: Path) -> None:
    from caster.models.modules import load_weights, read_weights

    weights = read_weights(checkpoint)
    try:
        load_weights(module, weights)
    except (RuntimeError, ValueError) as error:
        line = " ".join(str(error).split())
        raise CasterError(f"{checkpoint} does not fit {name}: {line[:300]}") from None


def _torch_model(
    model: Any,
    name: str | None,
    head: str | None,
    preprocessing: Any,
    checkpoint: str | os.PathLike[str] | None,
    options: dict[str, Any],
) -> FrozenModel:
    try:
        from caster.models.torch import TorchModel
    except ModuleNotFoundError:
        raise CasterError(f"{model} needs torch: pip install 'caster-tta[torch]'") from None

    module = model
    if isinstance(model, str):
        name = model
        kind, _, given = model.partition(":")
        if kind == "hf":
            from caster.models import hf

            module = hf.create(Path(given))
            preprocessing = (
                hf.preprocessing(Path(given)) if preprocessing is None else preprocessing
            )
        else:
            from caster.models import timm

            module = timm.create(given, None if checkpoint is None else Path(checkpoint))
            preprocessing = timm.preprocessing(module) if preprocessing is None else preprocessing
    if preprocessing == IN_GRAPH:
        preprocessing = Preprocessing.in_graph("NCHW", "float32")
    return TorchModel(module, name=name, head=head, preprocessing=preprocessing, **options)


def _refuse_options(model: Any, options: dict[str, Any]) -> None:
    """An option that means nothing to this kind of model is a mistake, not a default."""
    for name, value in options.items():
        if value is not None and value is not False:
            message = f"{{argument}} is not an option of {_called(model)}"
            raise CasterError(message, argument=name)


def _called(model: Any) -> str:
    """A model in a message: as it was typed, or its class, which takes one line."""
    return repr(str(model)) if isinstance(model, str | os.PathLike) else type(model).__name__
