"""The options that name a model, shared by the commands that take one."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from caster.errors import CasterError
from caster.io.files import check_writable

if TYPE_CHECKING:
    from caster.models.protocol import FrozenModel

PANEL = "The model"
MODELS = "MODEL.onnx, timm:NAME, hf:FOLDER or FILE.py:FACTORY"
RESUME_HINT = "no output was written; run the same command to continue"


def _option(kind: Any, *names: str, help: str, **extra: Any) -> Any:
    return Annotated[kind, typer.Option(*names, help=help, rich_help_panel=PANEL, **extra)]


OPTIONS: dict[str, Any] = {
    "model": _option(str | None, metavar="M", help=f"{MODELS}, for images."),
    "preprocessing": _option(
        str | None,
        metavar="TOML",
        help="TOML file with the preprocessing, or `in-graph`; timm and hf models bring their own.",
    ),
    "checkpoint": _option(
        Path | None, metavar="FILE", help="Weights of timm:NAME or FILE.py:FACTORY (.safetensors)."
    ),
    "head": _option(
        str | None,
        metavar="NAME",
        help="Name of the classifier layer, if it is not found automatically.",
    ),
    "provider": _option(
        list[str] | None,
        metavar="NAME",
        help="ONNX Runtime execution provider; repeat in order of preference.",
    ),
    "device": _option(str | None, metavar="NAME", help="torch device: cpu, cuda, cuda:1 ..."),
    "bf16": _option(bool, "--bf16", help="Run a torch model in bfloat16 autocast."),
    "channels_last": _option(
        bool, "--channels-last", help="Run a torch model in channels-last memory format."
    ),
}
DEFAULTS = {"bf16": False, "channels_last": False}
FOR_IMAGES = {  # arguments that need a model, and their options
    "skip_unreadable": "--skip-unreadable",
    "data_root": "--data-root",
    "store": "--cache",
    "shuffle": "--shuffle",
    "classes": "--classes",
    "no_head": "--no-head",
    "layers": "--layers",
    "full_maps": "--full-maps",
    "images_at_once": "--batch-size",
    "allow_other_model": "--allow-other-model",
    "allow_other_preprocessing": "--allow-other-preprocessing",
}

Command = Callable[..., None]


def with_model(output: str, beside: str | None = None) -> Callable[[Command], Command]:
    """Give a command the model's options; it gets the model itself, or None, as `model`.

    `output` is its parameter for the file it writes, and `beside` the suffix of a second one:
    neither may be a file that it reads.
    """

    def decorate(command: Command) -> Command:
        # The model's type is for mypy: importing it would slow down every --help.
        own = inspect.signature(command, eval_str=True, locals={"FrozenModel": object})
        shared = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=DEFAULTS.get(name)
            )
            for name, kind in OPTIONS.items()
        ]

        @wraps(command)
        def run(**given: Any) -> None:
            inputs = list(_files(value for name, value in given.items() if name != output))
            for path in [given[output], *([given[output].with_suffix(beside)] if beside else [])]:
                check_writable(path, *inputs)
            model = _wrapped({name: given.pop(name) for name in OPTIONS}, given)
            try:
                command(model=model, **given)
            except KeyboardInterrupt as stopped:
                kept = [] if model is None else [RESUME_HINT]
                raise KeyboardInterrupt(*(stopped.args or kept)) from None

        kept = [p.replace(kind=p.KEYWORD_ONLY) for p in own.parameters.values()]
        parameters = [*(p for p in kept if p.name != "model"), *shared]
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _files(values: Any) -> Iterator[str | Path]:
    """Which of these are names of files."""
    for value in values:
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str | Path):
                path = str(one).rpartition(".py:")[0] + ".py" if ".py:" in str(one) else one
                yield from [path] if os.path.isfile(path) else []


def _wrapped(options: dict[str, Any], others: dict[str, Any]) -> FrozenModel | None:
    model, providers = options.pop("model"), options.pop("provider")
    if model is None:
        unsupported = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
        unsupported += ["--provider"] if providers else []
        given = [name for name, value in others.items() if value is not None and value is not False]
        unsupported += [typed for name, typed in FOR_IMAGES.items() if name in given]
        if unsupported:
            raise CasterError(f"{unsupported[0]} requires --model")
        return None
    named = model.endswith(".onnx") or model.startswith(("timm:", "hf:")) or ".py:" in model
    if not named:
        raise CasterError(f"{model} is not a model: give {MODELS}")
    from caster.models.wrap import wrap

    return wrap(model, providers=providers or None, **options)
