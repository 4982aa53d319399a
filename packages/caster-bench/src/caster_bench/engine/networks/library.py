"""timm, or one line that says what is missing."""

from __future__ import annotations

from typing import Any

from caster.models.timm import imported


def timm_models(module: str) -> Any:
    """One of timm's modules of models."""
    return imported(f"timm.models.{module}", "this network")
