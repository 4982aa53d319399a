"""Pictures as files: PDF for print, SVG and PNG for pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import rc_context

from caster.report import html
from caster.report.bench.section import Picture

_UNDATED: dict[str, dict[str, Any]] = {  # the same records give the same bytes
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
    "png": {"Software": None},
}


def save(picture: Picture, folder: Path) -> str:
    """Draw a picture once; write it in every format, on white, and return it for a page."""
    figure = html.drawn(picture.draw, picture.height)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # it is laid out now, once for all formats
    element = html.embedded(figure, picture.alt)
    figure.patch.set_alpha(1)
    with rc_context({"svg.hashsalt": "caster"}):
        for kind, metadata in _UNDATED.items():
            path = folder / f"{picture.name}.{kind}"
            figure.savefig(path, format=kind, metadata=metadata, dpi=200)
    return element
