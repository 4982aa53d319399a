"""timm, or one line that says what is missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from caster.errors import CasterError


def timm_models(module: str) -> Any:
    """One of timm's modules of models."""
    try:
        return import_module(f"timm.models.{module}")
    except ModuleNotFoundError:
        raise CasterError("these networks need timm: pip install 'caster-tta[timm]'") from None
    except (ImportError, RuntimeError) as error:  # a torchvision built for another torch
        line = " ".join(str(error).split())
        raise CasterError(
            f"these networks need a timm and a torchvision that go with this torch: {line[:200]}"
        ) from None
