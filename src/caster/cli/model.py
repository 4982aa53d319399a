"""The options that name a model, shared by every command that takes one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from caster.errors import CasterError
from caster.frozen.protocol import FrozenModel

PANEL = "The model"


def _option(kind: Any, *names: str, help: str, **extra: Any) -> Any:
    return Annotated[kind, typer.Option(*names, help=help, rich_help_panel=PANEL, **extra)]


OPTIONS: dict[str, Any] = {
    "model": _option(str | None, metavar="M", help="MODEL.onnx or timm:NAME, for pictures."),
    "preprocessing": _option(
        str | None,
        metavar="TOML",
        help="File that says how pictures become batches, or `in-graph`; timm models know.",
    ),
    "checkpoint": _option(Path | None, help="Weights of a timm model (.safetensors)."),
    "head": _option(str | None, help="The classifier, where it cannot be found by itself."),
    "provider": _option(list[str] | None, help="Of ONNX Runtime; repeat in order of preference."),
    "device": _option(str | None, help="Of a timm model: cpu, cuda, cuda:1 ..."),
    "bf16": _option(bool, "--bf16", help="Run a timm model in bfloat16 where it is safe."),
    "channels_last": _option(bool, "--channels-last", help="Memory layout of a timm model."),
}
DEFAULTS = {"bf16": False, "channels_last": False}


def with_model(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the model's options; it gets the model itself, or None, as `model`."""
    own = inspect.signature(command, eval_str=True)
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
        for name, kind in OPTIONS.items()
        for default in [DEFAULTS.get(name)]
    ]

    @wraps(command)
    def run(**given: Any) -> None:
        options = {name: given.pop(name) for name in OPTIONS}
        command(model=_wrapped(**options), **given)

    kept = [p.replace(kind=p.KEYWORD_ONLY) for p in own.parameters.values() if p.name != "model"]
    run.__signature__ = own.replace(parameters=[*kept, *shared])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in [*kept, *shared]}
    return run


def _wrapped(model: str | None, provider: list[str] | None, **options: Any) -> FrozenModel | None:
    if model is None:
        stray = [name for name, value in options.items() if value]
        if stray or provider:
            option = (stray or ["provider"])[0].replace("_", "-")
            raise CasterError(f"--{option} needs --model: name the model it is about")
        return None
    if not model.endswith(".onnx") and not model.startswith("timm:"):
        raise CasterError(f"{model} is no model: give the path of an .onnx file, or timm:NAME")
    from caster.frozen.wrap import wrap

    return wrap(model, providers=provider or None, **options)
