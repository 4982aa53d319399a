"""Small HTML tables for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

CELL = 'style="text-align:left;padding:0.1em 1em 0.1em 0"'


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """Render a table with a caption and one row per name and value.

    >>> html_table("Verdict", {"ratio": 0.5}).count("<tr>")
    1
    """
    body = "".join(
        f"<tr><th scope='row' {CELL}>{escape(name)}</th><td {CELL}>{escape(str(value))}</td></tr>"
        for name, value in rows.items()
    )
    caption = f"<caption style='text-align:left'><b>{escape(title)}</b></caption>"
    return f"<table>{caption}<tbody>{body}</tbody></table>"
