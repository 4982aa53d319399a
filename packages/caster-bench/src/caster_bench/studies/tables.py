"""One table, and the three ways it is written: Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from caster.report.intervals import Interval

Value = str | bool | int | float | Interval | None  # None: there is none, or it means nothing
NONE = "-"
INTERVAL = "95 %"  # heading of every column of intervals
_MARKDOWN = re.compile(  # underscores inside of a word, and most signs inside of a line, are plain
    r"[\\|*`\[\]$~]|(?<![^\W_])_|_(?![^\W_])|^#|#$|^>|^-(?=[^\w.])|^[+=](?![\w.])"
)
_NUMBERED = re.compile(r"^(\d+)([.)])(?=\s)")  # the beginning of a list
_ENTITY = re.compile(r"&(?=#?\w+;)")
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "`": r"\textasciigrave{}",
        "|": r"\textbar{}",
        "[": "{[}",  # which a row's end before it would take for an argument
        "]": "{]}",
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        **{"<": "$<$", ">": "$>$", "≤": r"$\le$", "τ": r"$\tau$", "Δ": r"$\Delta$"},
    }
)


@dataclass(frozen=True)
class Column:
    """A heading, and how numbers under it are read; text where there is no format."""

    title: str
    format: str | None = None  # as `format` takes it

    def text(self, value: Value) -> str:
        """A value as it is to be read.

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
    """Rows of values, what their columns mean, and a caption that says how they came about."""

    name: str  # of its files
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]

    def texts(self) -> list[list[str]]:
        """All rows as they are to be read."""
        return [
            [column.text(value) for column, value in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]


def cells(count: int) -> str:
    """How many cells, in words.

    >>> cells(1), cells(2_000)
    ('1 cell', '2,000 cells')
    """
    return f"{count:,} cell{'' if count == 1 else 's'}"


def points(share: float | None) -> float | None:
    """A share in percent, a difference of shares in points.

    >>> points(0.5), points(None)
    (50.0, None)
    """
    return None if share is None else 100 * share


def around(interval: Interval | None) -> Interval | None:
    """An interval of shares in percent."""
    return interval and Interval(100 * interval.low, 100 * interval.high)


def as_file(words: str) -> str:
    """Words as part of the name of a file; no two that differ in a star have one name.

    >>> as_file("digits, batches of 6"), as_file("CIFAR-10-C*")
    ('digits-batches-of-6', 'CIFAR-10-C-star')
    """
    return "-".join(re.findall(r"[\w.]+", words.replace("*", "-star")))


def in_markdown(text: str) -> str:
    """Text that GitHub's Markdown shows literally, on a line of its own or in a table.

    >>> in_markdown("CIFAR-10-C* | 5 < 6"), in_markdown("gaussian_noise, _this_")
    ('CIFAR-10-C\\\\* \\\\| 5 &lt; 6', 'gaussian_noise, \\\\_this\\\\_')
    """
    text = _MARKDOWN.sub(r"\\\g<0>", " ".join(text.splitlines()))
    text = _NUMBERED.sub(r"\1\\\2", text)
    return _ENTITY.sub("&amp;", text).replace("<", "&lt;")


def as_markdown(table: Table) -> str:
    """A table and its caption, in GitHub's Markdown."""
    rule = ["---" if column.format is None else "--:" for column in table.columns]
    titles = [in_markdown(column.title) for column in table.columns]
    body = [[in_markdown(text) for text in row] for row in table.texts()]
    lines = [f"| {' | '.join(cells)} |" for cells in [titles, rule, *body]]
    return "\n".join([*lines, "", in_markdown(table.caption), ""])


def as_latex(table: Table) -> str:
    """A floating table in LaTeX; wants the package booktabs.

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
    """Text that LaTeX prints literally.

    >>> escape("r_t ≤ τ")
    'r\\\\_t $\\\\le$ $\\\\tau$'
    """
    text = " ".join(text.splitlines()).translate(_LATEX).replace("--", "-{}-")
    return f"{{*}}{text[1:]}" if text.startswith("*") else text


def _signed(text: str) -> str:
    """A number: its minus is not a hyphen."""
    return escape(text).replace("-", "$-$") if text != NONE else "--"


def _latex_row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def as_csv(table: Table) -> str:
    """Values as they are, not as they are read; an interval has a column for each end."""
    wide = [
        any(isinstance(row[place], Interval) for row in table.rows)
        for place in range(len(table.columns))
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
    """The shortest text that gives all digits that mean something."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.12g}" if isinstance(value, float) else str(value)
