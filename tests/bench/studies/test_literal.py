"""Titles and labels that look like markup come out literally, in every format."""

from __future__ import annotations

import html
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from caster_bench.studies import report as reporting
from caster_bench.studies.results import load
from caster_bench.studies.tables import Column, Table, as_latex, as_markdown, in_markdown
from tests.support.consistent_records import Consistent, sweep_of

pytestmark = pytest.mark.usefixtures("listed_figures")

HOSTILE = r"a|b <script>alert(1)</script> `c` [d](e) $f$ _g_ *h* R&D &lt; % #1 {i} ~j~ ^k \l"
GROUP = r"r_18|<script>&$\x{$`y`"
MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])
SIGNS = st.text(st.sampled_from("ab1 \n\\|*`[]()<>&;#_~$!-+=.{}^%:\"'/"), max_size=20)


def shown(markdown: str) -> str:
    """What a reader sees of Markdown."""
    return html.unescape(re.sub(r"<[^>]*>", "", MARKDOWN.render(markdown)))


def words(text: str) -> list[str]:
    return text.split()


@given(SIGNS)
def test_any_text_is_shown_literally_in_markdown(text):
    assume(text.strip() != "-")  # which is how tables say that there is none
    assert words(shown(f"# {in_markdown(text)}")) == words(text)
    assert words(shown(f"x\n\n{in_markdown(text)}\n")) == ["x", *words(text)]
    table = Table("t", "caption", (Column("a"), Column("b")), ((text, "end"),))
    assert words(shown(as_markdown(table))) == ["a", "b", *words(text), "end", "caption"]


def test_names_that_need_no_escape_have_none():
    for name in (
        "gaussian_noise",
        "tent+referee (agreement 0.9)",
        "CIFAR-10, 64 > 16",
        "-1.5",
        "-",
    ):
        assert in_markdown(name) == name


def test_latex_prints_it():
    table = Table("t", HOSTILE, (Column(HOSTILE),), ((HOSTILE,), ("[x]",), ("*y",)))
    text = as_latex(table)
    assert r"\textbar{}" in text
    assert r"\textasciigrave{}c\textasciigrave{}" in text
    assert "\n{[}x{]} \\\\" in text  # not an argument of the row's end before it
    assert "\n{*}y \\\\" in text


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("literal")
    text = f"""
    name = "literal"
    title = '{HOSTILE}'
    backbones.r18 = {{family = "batch", checkpoint = "r18", group = '{GROUP}'}}
    data.digits = {{source = "digits:train", target = "digits:test", threshold = 0.5}}
    [[grid]]
    study = ["corruption", "certificate", "gate"]
    corruptions = ["fog", "snow"]
    severities = [5]
    batch_sizes = [16]
    methods = ["frozen", "source-gda", "caster", "caster-ungated"]
    """
    sweep = sweep_of(folder, text)
    results, problems = load(sweep, Consistent(sweep).make(folder / "run"))
    assert problems == []
    reporting.write_report(results, folder / "report")
    return folder / "report"


def test_the_report_shows_titles_and_names_literally(report):
    text = shown((report / "report.md").read_text())
    assert text.splitlines()[0] == HOSTILE
    assert GROUP in text
    page = (report / "index.html").read_text()
    assert "<script>" not in page
    assert html.escape(HOSTILE) in page
    assert html.escape(GROUP) in page
