"""What a study contributes to the report: sentences, tables and figures.

Tables are written as Markdown, LaTeX and CSV.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from caster.report.intervals import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Value = str | bool | int | float | Interval | None  # None: missing or undefined
NONE = "-"
_MARKDOWN = re.compile(  # underscores within words and most signs within lines are literal
    r"[\\|*`\[\]$~]|(?<![^\W_])_|_(?![^\W_])|^#|#$|^>|^-(?=[^\w.])|^[+=](?![\w.])"
)
_NUMBERED = re.compile(r"^(\d+)([.)])(?=\s)")  # would start a list
_ENTITY = re.compile(r"&(?=#?\w+;)")
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "`": r"\textasciigrave{}",
        "|": r"\textbar{}",
        "[": "{[}",  # \\\\ before it would take it as an argument
        "]": "{]}",
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        **{"<": "$<$", ">": "$>$", "≤": r"$\le$", "τ": r"$\tau$", "Δ": r"$\Delta$"},
    }
)


@dataclass(frozen=True)
class Column:
    """A heading and its number format; text columns have none."""

    title: str
    format: str | None = None  # as `format` takes it

    def text(self, value: Value) -> str:
        """Format a value.

        >>> Column("gain", "+.1f").text(1.25), Column("95 %", ".1f").text(Interval(0.5, 2.0))
        ('+1.2', '0.5 to 2.0')
        """
        if value is None:
            return NONE
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, Interval):
            return f"{self.text(value.low)} to {self.text(value.high)}"
        return value if isinstance(value, str) else format(value, self.format or "")


@dataclass(frozen=True)
class Table:
    """Rows of values with columns and a caption."""

    name: str  # of its files
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]

    @classmethod
    def of(cls, name: str, caption: str, columns: str, rows: Iterable[tuple[Value, ...]]) -> Table:
        """Build a table from headings separated by "|", with number formats after a colon.

        >>> Table.of("gains", "Gains.", "data | gain, points:+.2f", [("a", 1.5)]).texts()
        [['a', '+1.50']]
        """
        parts = (part.strip().partition(":") for part in columns.split("|"))
        found = tuple(Column(title, form or None) for title, _, form in parts)
        return cls(name, caption, found, tuple(rows))

    def texts(self) -> list[list[str]]:
        """Format all rows."""
        return [
            [column.text(value) for column, value in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]


def cells(count: int) -> str:
    """Format a number of cells.

    >>> cells(1), cells(2_000)
    ('1 cell', '2,000 cells')
    """
    return f"{count:,} cell{'' if count == 1 else 's'}"


def points(share: float | None) -> float | None:
    """Convert a share to percent, or a difference of shares to points.

    >>> points(0.5), points(None)
    (50.0, None)
    """
    return None if share is None else 100 * share


def percent(interval: Interval | None) -> Interval | None:
    """Convert an interval of shares to percent."""
    return interval and Interval(100 * interval.low, 100 * interval.high)


def as_filename(words: str) -> str:
    """Make words part of a file name; a star stays distinguishable.

    >>> as_filename("digits, batches of 6"), as_filename("CIFAR-10-C*")
    ('digits-batches-of-6', 'CIFAR-10-C-star')
    """
    return "-".join(re.findall(r"[\w.]+", words.replace("*", "-star")))


def in_markdown(text: str) -> str:
    """Escape text for GitHub's Markdown, on its own line or in a table.

    >>> in_markdown("CIFAR-10-C* | 5 < 6"), in_markdown("gaussian_noise, _this_")
    ('CIFAR-10-C\\\\* \\\\| 5 &lt; 6', 'gaussian_noise, \\\\_this\\\\_')
    """
    text = _MARKDOWN.sub(r"\\\g<0>", " ".join(text.splitlines()))
    text = _NUMBERED.sub(r"\1\\\2", text)
    return _ENTITY.sub("&amp;", text).replace("<", "&lt;")


def as_markdown(table: Table) -> str:
    """Format a table and its caption as GitHub's Markdown."""
    rule = ["---" if column.format is None else "--:" for column in table.columns]
    titles = [in_markdown(column.title) for column in table.columns]
    body = [[in_markdown(text) for text in row] for row in table.texts()]
    lines = [f"| {' | '.join(cells)} |" for cells in [titles, rule, *body]]
    return "\n".join([*lines, "", in_markdown(table.caption), ""])


def as_latex(table: Table) -> str:
    """Format a table as a LaTeX float; needs the package booktabs.

    >>> print(as_latex(Table("t", "50 %", (Column("a"), Column("b", ".1f")), (("x_1", -2.0),))))
    \\begin{table}
    \\centering\\footnotesize
    \\setlength{\\tabcolsep}{3pt}
    \\begin{tabular}{@{}lr@{}}
    \\toprule
    a & b \\\\
    \\midrule
    x\\_1 & $-$2.0 \\\\
    \\bottomrule
    \\end{tabular}
    \\caption{50 \\%}
    \\label{tab:t}
    \\end{table}
    """
    kinds = "".join("l" if column.format is None else "r" for column in table.columns)
    rows = [
        _latex_row(
            _signed(text) if column.format else escape(text)
            for column, text in zip(table.columns, row, strict=True)
        )
        for row in table.texts()
    ]
    lines = [r"\begin{table}", r"\centering\footnotesize", r"\setlength{\tabcolsep}{3pt}"]
    lines += [rf"\begin{{tabular}}{{@{{}}{kinds}@{{}}}}"]
    lines += [r"\toprule", _latex_row(escape(column.title) for column in table.columns)]
    lines += [r"\midrule", *rows, r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\caption{{{escape(table.caption)}}}", rf"\label{{tab:{table.name}}}"]
    return "\n".join([*lines, r"\end{table}", ""])


def escape(text: str) -> str:
    """Escape text for LaTeX.

    >>> escape("r_t ≤ τ")
    'r\\\\_t $\\\\le$ $\\\\tau$'
    """
    text = " ".join(text.splitlines()).translate(_LATEX).replace("--", "-{}-")
    return f"{{*}}{text[1:]}" if text.startswith("*") else text


def _signed(text: str) -> str:
    """Format a number with a minus sign rather than a hyphen."""
    return escape(text).replace("-", "$-$") if text != NONE else "--"


def _latex_row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def as_csv(table: Table) -> str:
    """Format a table as CSV with unrounded values; an interval has a column for each end."""
    wide = [
        any(isinstance(row[index], Interval) for row in table.rows)
        for index in range(len(table.columns))
    ]
    header: list[str] = []
    for column, both in zip(table.columns, wide, strict=True):
        header += [f"{column.title} low", f"{column.title} high"] if both else [column.title]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    for row in table.rows:
        writer.writerow(_plain(row, wide))
    return out.getvalue()


def _plain(row: Sequence[Value], wide: Sequence[bool]) -> list[str]:
    cells: list[str] = []
    for value, both in zip(row, wide, strict=True):
        ends = (value.low, value.high) if isinstance(value, Interval) else (value,) * (1 + both)
        cells += [_raw(end) for end in ends]
    return cells


def _raw(value: str | bool | int | float | None) -> str:
    """Format a value with all significant digits."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class StudyFigure:
    """A figure that is drawn when the report is written."""

    name: str  # of its files
    caption: str
    alt: str  # alternative text
    height: float  # inches; all figures have the same width
    draw: Callable[[Figure, str], None]  # arguments: figure, ink colour


@dataclass(frozen=True)
class Section:
    """A study in the report."""

    name: str
    title: str
    found: tuple[str, ...]  # results, one sentence each
    how: str  # how the results are computed
    tables: tuple[Table, ...]
    figures: tuple[StudyFigure, ...]
