from __future__ import annotations

import csv
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from caster.report.intervals import Interval
from caster_bench.studies.results import spearman
from caster_bench.studies.tables import Column, Table, as_csv, as_latex, as_markdown, escape
from tests.support.report_files import assert_balanced

TABLE = Table(
    "example",
    "50 % of r_t & more",
    (Column("what"), Column("share, %", ".1f"), Column("95 %", "+.2f")),
    (("a|b_c", 12.345678901, Interval(-1.0, 2.5)), ("{x}^2 \\ ~$#", None, None)),
)


def test_markdown_has_a_cell_a_column_whatever_the_text():
    header, rule, first, second, *_ = as_markdown(TABLE).splitlines()
    assert header == "| what | share, % | 95 % |"
    assert rule == "| --- | --: | --: |"
    assert first == r"| a\|b_c | 12.3 | -1.00 to +2.50 |"
    assert second.endswith("| - | - |")


def test_csv_keeps_all_digits_and_both_ends():
    rows = list(csv.reader(io.StringIO(as_csv(TABLE))))
    assert rows[0] == ["what", "share, %", "95 % low", "95 % high"]
    assert rows[1][0] == "a|b_c"
    assert [float(x) for x in rows[1][1:]] == [12.345678901, -1.0, 2.5]
    assert rows[2][1:] == ["", "", ""]


def test_latex_escapes_all_that_it_would_read_as_commands():
    text = as_latex(TABLE)
    assert r"a\textbar{}b\_c & 12.3 & $-$1.00 to +2.50 \\" in text
    assert r"\{x\}\textasciicircum{}2 \textbackslash{} \textasciitilde{}\$\# & -- & -- \\" in text
    assert r"\caption{50 \% of r\_t \& more}" in text


def unescaped(text: str) -> str:
    """What is left of LaTeX without its escapes: no sign there may be a command's."""
    named = ("backslash", "asciitilde", "asciicircum", "asciigrave", "bar")
    for plain in (*(f"\\text{name}{{}}" for name in named), "{[}", "{]}", "-{}-", "{*}"):
        text = text.replace(plain, "")
    return re.sub(r"\\[&%$#_{}]|\$(<|>|\\le|\\tau|\\Delta)\$", "", text)


@given(st.text(st.characters(codec="ascii", exclude_categories=["Cc"])))
def test_no_text_opens_or_closes_anything_in_latex(text):
    assert not set(unescaped(escape(text))) & set("\\{}$&#%_^~<>`|[]")


def test_latex_is_balanced():
    assert_balanced(as_latex(TABLE))
    with pytest.raises(AssertionError):
        assert_balanced(as_latex(TABLE) + r"\end{table}"[:-1])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-3, 3)), min_size=3, max_size=30))
def test_rank_correlation_is_scipys(pairs):
    first, second = zip(*pairs, strict=True)
    if len(set(first)) == 1 or len(set(second)) == 1:
        assert spearman(first, second) is None
    else:
        assert spearman(first, second) == pytest.approx(spearmanr(first, second)[0], abs=1e-12)


def test_two_cells_have_no_rank_correlation():
    assert spearman([1, 2], [3, 4]) is None
