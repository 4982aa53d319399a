"""The demo command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    page: Annotated[
        Path, typer.Option("--output", "-o", metavar="PAGE", help="HTML page to write.")
    ] = Path("caster-demo.html"),
) -> None:
    """Train a small digit classifier, freeze it, shift its data, and watch the gate."""
    raise NotImplementedError
