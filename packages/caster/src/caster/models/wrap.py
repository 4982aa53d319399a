"""Wrap whatever the user has as a frozen model: a module, a model name, a file or a function."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from caster.errors import CasterError
from caster.models.preprocessing import Preprocessing
from caster.models.protocol import FrozenModel, error_line

IN_GRAPH: Literal["in-graph"] = "in-graph"
Options = dict[str, Any]  # the options of `wrap` that were set
AnyPreprocessing = Preprocessing | str | os.PathLike[str] | None  # a TOML file, or "in-graph"
FACTORY_MARK = ".py:"  # between the file and the function
TORCH = ("head", "preprocessing", "device", "bf16", "channels_last", "cuda_graph")
KINDS = (
    "an nn.Module, 'timm:NAME', 'hf:FOLDER', 'FILE.py:FACTORY', the path of an .onnx file, or a "
    "function"
)


def wrap(
    model: Any,
    *,
    head: str | None = None,
    preprocessing: AnyPreprocessing = None,
    checkpoint: str | os.PathLike[str] | None = None,
    device: str | None = None,
    bf16: bool = False,
    channels_last: bool = False,
    cuda_graph: bool = False,
    providers: Sequence[str] | None = None,
    version: str | None = None,
) -> FrozenModel:
    """Wrap an nn.Module, "timm:NAME", the path of an .onnx file, or a function.

    Two more strings are accepted: "hf:FOLDER", a transformers image classifier in a local folder,
    and "FILE.py:FACTORY", a function in your own file that takes no arguments and returns any of
    the above. **The latter runs the code in that file.**

    A file written by `caster compile` adapts itself and becomes a
    `caster.models.onnx.compiled.CompiledModel`.

    Parameters
    ----------
    head : name of the classifier if it cannot be found: a layer, or an ONNX node or output.
    preprocessing : how images become batches: a `Preprocessing`, the path of a TOML file, or
        "in-graph" if the model resizes and normalises images itself. Only needed if caster reads
        the images. timm models, and transformers folders with a preprocessor_config.json, bring
        their own.
    checkpoint : local .safetensors weights for a timm model or for the module of a factory.
    device : "cpu" or "cuda" for a torch model; by default the module stays where it is.
    bf16 : run a torch model under bfloat16 autocast.
    channels_last : run a torch model in the channels-last memory format.
    cuda_graph : capture a torch model on a GPU as a CUDA graph and replay it. Faster for modules
        that do the same work on every batch, but keeps the memory of one batch allocated.
    providers : ONNX Runtime execution providers in order of preference.
    version : the provider's name for the model behind a function; binds states to it.

    >>> import numpy as np
    >>> model = wrap(lambda batch: batch.reshape(len(batch), -1), version="pixels-1")
    >>> model(np.zeros((2, 4, 4))).features.shape
    (2, 16)
    """
    options: Options = {
        "head": head,
        "preprocessing": None if preprocessing is None else _as_preprocessing(preprocessing),
        "checkpoint": checkpoint,
        "device": device,
        "bf16": bf16,
        "channels_last": channels_last,
        "cuda_graph": cuda_graph,
        "providers": providers,
        "version": version,
    }
    options = {k: v for k, v in options.items() if v is not None and v is not False}
    if isinstance(model, str) and FACTORY_MARK in model:
        return _from_factory(model, options)
    if isinstance(model, str) and model.startswith(("timm:", "hf:")):
        return _from_library(model, options)
    if isinstance(model, str | os.PathLike) and str(model).endswith(".onnx"):
        opened: FrozenModel = _from_onnx(model, options)
        return opened
    return _from_object(model, None, options)


def _from_factory(spec: str, options: Options) -> FrozenModel:
    """Wrap the model that FILE.py:FACTORY returns, after loading the checkpoint, if any."""
    made = _call_factory(spec)
    if _is_wrapped(made):
        _check_options(spec, options, ())
        wrapped: FrozenModel = made
        return wrapped
    if _is_module(made) and "checkpoint" in options:
        _load_checkpoint(made, spec, Path(options.pop("checkpoint")))
    return _from_object(made, spec, options)


def _from_library(spec: str, options: Options) -> FrozenModel:
    """Build timm:NAME or hf:FOLDER, with the library's own preprocessing by default."""
    library, _, name = spec.partition(":")
    _check_options(spec, options, (*TORCH, "checkpoint") if library == "timm" else TORCH)
    _import_torch_model(spec)
    from caster.models import pretrained

    checkpoint = options.pop("checkpoint", None)
    if library == "hf":
        module = pretrained.load_transformers(Path(name))
        if "preprocessing" not in options:
            options["preprocessing"] = pretrained.transformers_preprocessing(Path(name))
    else:
        module = pretrained.load_timm(name, None if checkpoint is None else Path(checkpoint))
        if "preprocessing" not in options:
            options["preprocessing"] = pretrained.timm_preprocessing(module)
    return _from_object(module, spec, options)


def _from_onnx(path: str | os.PathLike[str], options: Options) -> Any:
    """Open an ONNX file: an `OnnxModel`, or a `CompiledModel` if it adapts itself."""
    from caster.models.onnx import OnnxModel
    from caster.models.onnx.compiled import CompiledModel, is_compiled
    from caster.models.onnx.model import check_installed
    from caster.models.onnx.model_file import read_model

    if "device" in options:
        kind = str(options["device"]).partition(":")[0]  # of "cuda:1" or torch.device("cpu")
        provider = f" {kind.upper()}ExecutionProvider" if kind in ("cpu", "cuda") else ""
        raise CasterError(
            f"{{argument}} does not apply to {_label(path)}: use `--provider{provider}` "
            "(providers= in Python)",
            argument="device",
        )
    _check_options(path, options, ("head", "preprocessing", "providers"))
    check_installed(str(path))
    content = read_model(Path(path))
    if is_compiled(content[0]):
        if options.keys() & {"head", "preprocessing"}:
            raise CasterError(
                f"{path} is compiled and adapts itself: it takes no state and no model options; "
                "name the original model, or run it in Python: caster.wrap(FILE).stream(batches)"
            )
        return CompiledModel(path, content=content, **options)
    return OnnxModel(Path(path), content=content, **options)


def _from_object(model: Any, name: str | None, options: Options) -> FrozenModel:
    """Wrap an nn.Module or a function."""
    if _is_module(model):
        _check_options(model, options, TORCH)
        if options.get("preprocessing") == IN_GRAPH:
            options["preprocessing"] = Preprocessing.in_graph("NCHW", "float32")
        wrapped: FrozenModel = _import_torch_model(_label(model))(model, name=name, **options)
        return wrapped
    if _is_wrapped(model):
        raise CasterError(f"{model.name} is wrapped already")
    if callable(model) and not isinstance(model, type):
        _check_options(model, options, ("preprocessing", "version"))
        if options.get("preprocessing") == IN_GRAPH:
            raise CasterError(
                "a function needs a complete preprocessing, because its input shape is unknown"
            )
        from caster.models.function import FunctionModel

        return FunctionModel(model, **options)
    raise CasterError(f"a model is {KINDS}, not {_label(model)}")


def _import_torch_model(user: str) -> Any:
    try:
        from caster.models.torch import TorchModel
    except ModuleNotFoundError:
        raise CasterError(f"{user} needs torch: pip install 'caster-tta[torch]'") from None
    return TorchModel


def _load_checkpoint(module: Any, spec: str, checkpoint: Path) -> None:
    from caster.models.torch import load_weights, read_weights

    weights = read_weights(checkpoint)
    try:
        load_weights(module, weights)
    except (RuntimeError, ValueError) as error:
        raise CasterError(f"{checkpoint} does not fit {spec}: {error_line(error)}") from None


def _as_preprocessing(preprocessing: Preprocessing | str | os.PathLike[str]) -> Any:
    if isinstance(preprocessing, Preprocessing) or preprocessing == IN_GRAPH:
        return preprocessing
    return Preprocessing.from_toml(Path(preprocessing))


def _is_module(model: Any) -> bool:
    torch = sys.modules.get("torch")  # whoever built a module has imported torch already
    return torch is not None and isinstance(model, torch.nn.Module)


def _is_wrapped(model: Any) -> bool:
    return hasattr(model, "verify") and hasattr(model, "preprocessing")


def _check_options(model: Any, options: Options, known: Sequence[str]) -> None:
    """Reject options that do not apply to this kind of model."""
    for name in options:
        if name not in known:
            raise CasterError(f"{{argument}} does not apply to {_label(model)}", argument=name)


def _label(model: Any) -> str:
    """Describe a model in a message: a path or name as typed, or its class."""
    return repr(str(model)) if isinstance(model, str | os.PathLike) else type(model).__name__


# --- FILE.py:FACTORY -----------------------------------------------------------------------------


def _call_factory(spec: str) -> Any:
    """Import a file, which runs its code, and call the function in it that builds a model."""
    stem, _, name = spec.rpartition(FACTORY_MARK)
    path = Path(f"{stem}.py")
    if not path.is_file():
        raise CasterError(f"{spec}: there is no file {path}")
    with _importable(path.parent):
        try:
            module = _imported(path)
        except (Exception, SystemExit) as error:
            raise CasterError(f"{path} cannot be imported: {_failure(error)}") from error
        factory = getattr(module, name, None)
        if not callable(factory):
            raise CasterError(f"{path} has no function {name!r} that builds a model")
        try:
            made = factory()
        except (Exception, SystemExit) as error:
            raise CasterError(f"{name}() of {path} failed: {_failure(error)}") from error
    if not callable(made) or isinstance(made, type):
        kind = type(made).__name__
        raise CasterError(f"{name}() of {path} must return an nn.Module, not {kind}")
    return made


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let a file import modules from its own folder while it builds the model."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


def _imported(path: Path) -> ModuleType:
    name = f"_caster_model_{path.stem}"  # unlikely to shadow another module
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("it is not a Python file")
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up here
    spec.loader.exec_module(module)
    return module


def _failure(error: BaseException) -> str:
    return f"{type(error).__name__}: {error_line(error)}"[:300]
