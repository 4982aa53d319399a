"""A user's own network: a function in a Python file that makes it, which runs the user's code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from caster.errors import CasterError

MARK = ".py:"  # between the file and the function


def made_by(
    spec: str,  # FILE.py:FACTORY
) -> Any:
    """What a factory returns when it is called without arguments: an nn.Module, or a function."""
    stem, _, name = spec.rpartition(MARK)
    path = Path(f"{stem}.py")
    if not path.is_file():
        raise CasterError(f"{spec}: there is no file {path}")
    with _importing_from(path.parent):
        try:
            module = _imported(path)
        except (Exception, SystemExit) as error:
            raise CasterError(f"{path} cannot be imported: {_line(error)}") from error
        factory = getattr(module, name, None)
        if not callable(factory):
            raise CasterError(f"{path} has no function {name!r} that makes a model")
        try:
            made = factory()
        except (Exception, SystemExit) as error:
            raise CasterError(f"{name}() of {path} failed: {_line(error)}") from error
    if not callable(made) or isinstance(made, type):
        kind = type(made).__name__
        raise CasterError(f"{name}() of {path} must return an nn.Module, not {kind}")
    return made


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Let the file import its neighbours, while it is imported and makes the model."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


def _imported(path: Path) -> ModuleType:
    name = f"_caster_model_{path.stem}"  # no other module's
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("it is no Python file")
    module = module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
