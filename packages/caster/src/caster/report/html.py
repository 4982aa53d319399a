"""HTML every page is made of: a shell that loads nothing else, figures, and tables."""

from __future__ import annotations

import io
import math
from base64 import b64encode
from collections.abc import Callable
from html import escape
from importlib.resources import files
from string import Template

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.text import Text

from caster import config
from caster.config import Settings
from caster.core.types import REASONS
from caster.io.files import AnyPath, replacing

INK = "#1b1f25"  # a colour nothing else has: replaced by the one that suits the reader's page
STYLE = (
    "<style>:root{color:#1b1f24}@media (prefers-color-scheme:dark){:root{color:#e8eaed}}</style>"
)


def fill(package: str, name: str, /, **values: object) -> str:
    """A template that lies in a package, with every placeholder filled."""
    text = files(package).joinpath(name).read_text(encoding="utf-8")
    return Template(text.rstrip("\n")).substitute(values)


def page(title: str, body: str) -> str:
    """A whole page around a body."""
    return fill("caster.report", "shell.html", title=escape(title), body=body) + "\n"


def write(text: str, path: AnyPath) -> None:
    """Write a page, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def figure(draw: Callable[[Figure, str], None], alt: str, height: float) -> str:
    """A drawing, in SVG that follows the reader's light or dark page, and words for it."""
    return embedded(drawn(draw, height), alt)


def drawn(draw: Callable[[Figure, str], None], height: float) -> Figure:
    """A drawing as wide as the page, on nothing."""
    figure = Figure(figsize=(8.6, height), layout="constrained")
    figure.patch.set_alpha(0)
    draw(figure, INK)
    for text in figure.findobj(Text):  # numbers on logarithmic axes are typeset later
        if "$" in text.get_text():  # of a label, which is no formula
            text.set_parse_math(False)
    return figure


def embedded(figure: Figure, alt: str) -> str:
    """A figure of `drawn` as an element of a page."""
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": "caster"}):  # the same results give the same bytes
        figure.savefig(buffer, format="svg", metadata={"Date": None}, dpi=200)
    svg = buffer.getvalue().replace(INK, "currentColor").replace("<defs>", f"{STYLE}<defs>", 1)
    source = "data:image/svg+xml;base64," + b64encode(svg.encode()).decode()
    return f'<div class="wide" tabindex="0"><img alt="{escape(alt)}" src="{source}"></div>'


def words(text: str) -> str:
    """A cell of text.

    >>> words("a < b")
    '<td class="words">a &lt; b</td>'
    """
    return f'<td class="words">{escape(text)}</td>'


def number(text: object) -> str:
    """A cell of a number, as it is to be read.

    >>> number(64)
    '<td>64</td>'
    """
    return f"<td>{escape(str(text))}</td>"


def row(heading: str, *cells: str) -> str:
    """A row of a table.

    >>> row("frozen head", number("97.3"))
    '<tr><th scope="row">frozen head</th><td>97.3</td></tr>'
    """
    return f'<tr><th scope="row">{escape(heading)}</th>{"".join(cells)}</tr>'


def certificate(ratio: float) -> str:
    """A certificate as it is to be read; none is infinite.

    >>> certificate(0.491), certificate(math.inf)
    ('0.49', 'none')
    """
    return f"{ratio:.2f}" if math.isfinite(ratio) else "none"


def terms(settings: Settings) -> str:
    """What the words of every page mean, as entries of a `dl`."""
    reasons = (f"<li><code>{reason}</code>: {escape(why)}</li>" for reason, why in REASONS.items())
    return fill("caster.report", "terms.html", tau=f"{settings.tau:g}", reasons="\n".join(reasons))


def constants(settings: Settings, caption: str) -> str:
    """Every constant of the method, and who chose it, as a table."""
    rows = (
        row(name, number(f"{getattr(settings, name):g}"), words(origin), words(why))
        for name, _, origin, why in config.describe()
    )
    return fill("caster.report", "constants.html", caption=escape(caption), rows="\n".join(rows))
