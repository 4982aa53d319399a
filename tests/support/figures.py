"""Reports whose figures are lists of what they show, for tests of the rest of a report."""

from __future__ import annotations

import io
from contextlib import contextmanager
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from caster.report import html

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def shown(figure: Figure) -> str:
    """The words and the coordinates in the axes of a figure."""
    parts: list[object] = []
    for axes in figure.axes:
        parts += [axes.get_title(), axes.get_xlabel(), axes.get_ylabel()]
        parts += [text.get_text() for text in axes.texts]
        parts += [line.get_xydata().tolist() for line in axes.lines]
        parts += [points.get_offsets().tolist() for points in axes.collections]
        for patch in axes.patches:
            path = patch.get_patch_transform().transform_path(patch.get_path())
            parts.append(path.vertices.tolist())
    return repr(parts)


def save_listed(figure: Figure, file: Path | io.StringIO, kind: str, metadata: object) -> None:
    """Take the place of `html.save`."""
    text = f"<svg><defs>{escape(shown(figure))}</defs></svg>"
    file.write_text(text) if isinstance(file, Path) else file.write(text)


@cache
def originals():
    from matplotlib.figure import Figure  # few tests draw, and all would wait for it

    return Figure.draw_without_rendering, html.save


@contextmanager
def made_by(lay_out, save):
    originals()
    from matplotlib.figure import Figure

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "draw_without_rendering", lay_out)
        patch.setattr(html, "save", save)
        yield


@pytest.fixture(scope="module")
def listed_figures():
    """Compose figures without layout and rendering, which take most of the time of a report."""
    with made_by(lambda figure: None, save_listed):
        yield


@pytest.fixture
def rendered_figures():
    """Render figures in one test of a module with `listed_figures`."""
    with made_by(*originals()):
        yield
