"""Pictures as files: PDF for print, SVG and PNG for pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import rc_context, rcdefaults, rcParams

from caster.report import html
from caster_bench.studies.section import Picture

_UNDATED: dict[str, dict[str, Any]] = {  # the same records give the same bytes
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
    "png": {"Software": None},
}


FORMATS = tuple(_UNDATED)


def save(picture: Picture, folder: Path, formats: tuple[str, ...] = FORMATS) -> str:
    """Draw a picture once; write it in these formats, on white, and return it for a page."""
    with rc_context():
        rcdefaults()  # whatever the user's own matplotlibrc says
        rcParams["svg.hashsalt"] = "caster"
        figure = html.drawn(picture.draw, picture.height)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # it is laid out now, once for all formats
        element = html.embedded(figure, picture.alt)
        figure.patch.set_alpha(1)
        for kind in formats:
            path = folder / f"{picture.name}.{kind}"
            figure.savefig(path, format=kind, metadata=_UNDATED[kind], dpi=200)
    return element
