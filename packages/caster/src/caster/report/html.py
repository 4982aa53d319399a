"""Self-contained HTML pages: Jinja templates, embedded figures and tables."""

from __future__ import annotations

import io
import math
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.backend_bases import get_registered_canvas_class
from matplotlib.figure import Figure
from matplotlib.text import Text

from caster import config
from caster.config import Settings
from caster.io.files import AnyPath, replacing
from caster.report.mechanism import LAYER_CONSTANTS

HERE = "caster.report"
INK = "#1b1f25"  # a colour used for nothing else: replaced by the reader's text colour
STYLE = (
    "<style>:root{color:#1b1f24}@media (prefers-color-scheme:dark){:root{color:#e8eaed}}</style>"
)
CONSTANT_COLUMNS = (("name", False), ("value", False), ("chosen by", True), ("meaning", True))


@cache
def _environment(package: str) -> Environment:
    """Templates of a package; those in this one, such as `shell.html`, serve all packages."""
    loaders = [PackageLoader(each) for each in dict.fromkeys((package, HERE))]
    return Environment(
        loader=ChoiceLoader(loaders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def fill(package: str, name: str, /, **values: object) -> Markup:
    """Render a template in the `templates` folder of a package; text is escaped."""
    return Markup(_environment(package).get_template(name).render(values))


def write(text: str, path: AnyPath) -> None:
    """Write a page atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def figure(draw: Callable[[Figure, str], None], alt: str, height: float) -> Markup:
    """Draw a figure as SVG that follows the reader's colour scheme."""
    return embedded(drawn(draw, height), alt)


def drawn(draw: Callable[[Figure, str], None], height: float) -> Figure:
    """Draw a transparent figure as wide as the page."""
    figure = Figure(figsize=(8.6, height), layout="constrained")
    figure.patch.set_alpha(0)
    draw(figure, INK)
    for text in figure.findobj(Text):  # numbers on logarithmic axes are typeset later
        if "$" in text.get_text():  # in a label, not a formula
            text.set_parse_math(False)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # fix the layout for all formats
    for axes in figure.axes:  # processors differ in the last digits, which enter ids of an SVG
        axes.set_position([round(value, 6) for value in axes.get_position().bounds])  # type: ignore[arg-type]
    return figure


def embedded(figure: Figure, alt: str) -> Markup:
    """Embed a figure of `drawn` as an element of a page."""
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": "caster"}):  # the same results give the same bytes
        save(figure, buffer, "svg", {"Date": None})
    svg = buffer.getvalue().replace(INK, "currentColor").replace("<defs>", f"{STYLE}<defs>", 1)
    source = "data:image/svg+xml;base64," + b64encode(svg.encode()).decode()
    element = Markup('<div class="wide" tabindex="0"><img alt="{}" src="{}"></div>')
    return element.format(alt, source)


def save(figure: Figure, file: Path | io.StringIO, kind: str, metadata: dict[str, Any]) -> None:
    """Write a figure, drawing it once; `savefig` draws it twice, first for its layout."""
    figure.dpi = 200
    canvas = get_registered_canvas_class(kind)(figure)
    getattr(canvas, f"print_{kind}")(file, metadata=metadata)


def table(
    caption: str,
    columns: Sequence[tuple[str, bool]],  # title, and whether its cells are words, not numbers
    rows: Iterable[Sequence[object]],  # the first cell is the row's heading
) -> Markup:
    """Build a table that scrolls if it is wider than the page.

    >>> "<td>97.3</td>" in table("", [("classifier", False), ("accuracy", False)], [("a", 97.3)])
    True
    """
    macros: Any = _environment(HERE).get_template("table.html").module
    return Markup(macros.table(columns, rows, caption))


def certificate(ratio: float) -> str:
    """Format a certificate; an infinite one is missing.

    >>> certificate(0.491), certificate(math.inf)
    ('0.49', 'none')
    """
    return f"{ratio:.2f}" if math.isfinite(ratio) else "none"


def constants(settings: Settings, caption: str) -> Markup:
    """Tabulate all constants of the method, and who chose them."""
    rows = [(name, getattr(settings, name), by, why) for name, _, by, why in config.describe()]
    return constant_table(rows, caption)


def layer_constants(settings: Mapping[str, Any], caption: str) -> Markup:
    """Tabulate the constants of aligned layers."""
    rows = [(name, settings[name], "project", why) for name, why in LAYER_CONSTANTS.items()]
    return constant_table(rows, caption)


def constant_table(rows: Iterable[tuple[str, float | str, str, str]], caption: str) -> Markup:
    """Tabulate name, value, origin and meaning of constants, under a heading."""
    texts = [
        (name, value if isinstance(value, str) else f"{value:g}", by, why)
        for name, value, by, why in rows
    ]
    return Markup("<h2>Constants</h2>\n") + table(caption, CONSTANT_COLUMNS, texts)
