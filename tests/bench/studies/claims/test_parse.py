"""Files of claims: read, and refused in a line."""

from __future__ import annotations

import pytest

from caster.errors import CasterError
from caster.report.intervals import Interval
from caster_bench.studies.claims.claim_file import read_claims
from caster_bench.studies.claims.rules import Printed, Rule, look_up
from caster_bench.studies.tables import Column, Table
from tests.support.messages import error_line

TEXT = """
title = "Claims"
summary = "The first page."
intro = "Gains of {gain}."
records = "records"
document = "CLAIMS.md"
reports = "reports"
sweeps.every = "every.toml"
values.gain = {sweep = "every", table = "t", row = {data = "a"}, column = "gain"}

[[part]]
title = "One"
sweep = "every"

[[part.claim]]
id = "A1"
says = "It gains."
where = "Sec. 1"
note = "By {gain}, see Sec. 4.3, at `tau = 0.8`."
tests = [{what = "gain", table = "t", CELL, PAPER, near = 1, direction = "sign"}]

[[part.claim]]
id = "A2"
says = "It flies."
where = "Sec. 2"
why = "Nothing here has wings."
"""
CELL = 'row = {data = "a"}, column = "gain", interval = "95 %"'
TEXT = TEXT.replace("CELL", CELL).replace("PAPER", 'paper = ["certificate", "gated"]')

TABLE = Table(
    "t",
    "",
    (Column("data"), Column("τ", "g"), Column("gain", "+.2f"), Column("95 %", "+.2f")),
    (
        ("a", 1.0, 1.5, Interval(1.0, 2.0)),
        ("b", 2.0, 0.5, None),
        ("b", 3.0, None, None),
    ),
)


def parsed(tmp_path, *changes):
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "claims.toml"
    path.write_text(text, encoding="utf-8")
    return read_claims(path)


def test_a_file_is_read(tmp_path):
    claims = parsed(tmp_path)
    first, second = claims.parts[0].claims
    (test,) = first.tests
    assert test.rule == Rule("near", 1.0, direction="sign")
    assert test.paper == Printed(("certificate", "gated"))
    assert (test.paper.value, test.paper.text) == (1.69, "1.69")
    assert second.why == "Nothing here has wings."
    found = look_up(test.figure, {"every": {"t": TABLE}})
    assert (found.value, found.interval) == (1.5, Interval(1.0, 2.0))
    assert found.text == "+1.50 (+1.00 to +2.00)"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("By {gain}", "By 1.50", "A1: a figure is typed by hand: 'By 1.50"),
        ("By {gain}", "By 3 %", "A1: a figure is typed by hand"),
        ("By {gain}", "By {gian}", "did you mean 'gain'"),
        ("Gains of {gain}", "Gains of 12.5", "intro: a figure is typed by hand"),
        ('id = "A2"', 'id = "A1"', "there are two claims A1"),
        ("near = 1", "near = 1, least = 2", "a test has exactly one rule of"),
        ("near = 1, ", "", "a test has exactly one rule of"),
        ("near = 1, ", "near = 1, main = 1, ", "'main' can only be true"),
        ('"gated"], ', '"gatde"], ', "the paper's figures have no certificate.gatde"),
        ('paper = ["certificate", "gated"], ', "", "needs a figure of the paper"),
        ("near = 1", 'near = "one"', "must be a number"),
        ('why = "Nothing here has wings."', "", "exactly one of 'tests', 'proof' and 'why'"),
        ('sweep = "every"\n\n', 'sweep = "evry"\n\n', "did you mean 'every'"),
        ('column = "gain", interval', 'colum = "gain", interval', "did you mean 'column'"),
        ('row = {data = "a"}, column = "gain", interval', 'column = "gain", interval', "'row'"),
        ('document = "CLAIMS.md"', "", "'document' is missing"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(tmp_path, old, new, told):
    line = error_line(parsed, tmp_path, (old, new))
    assert told in line
    assert "claims.toml" in line


def figure(tmp_path, words):
    """The figure of a test that says this of its cell."""
    return parsed(tmp_path, (CELL, words)).parts[0].claims[0].tests[0].figure


@pytest.mark.parametrize(
    ("words", "value", "text"),
    [
        ('row = {data = "b", "τ" = 2}, column = "gain"', 0.5, "+0.50"),
        ('row = {"τ" = [1, 2, 3]}, column = "gain", take = "least"', 0.5, "+0.50"),
        ('row = {"τ" = [1, 2, 3]}, column = "gain", take = "most"', 1.5, "+1.50"),
        ('row = {data = "b"}, column = "gain", take = "count"', 2, "2"),
        ('row = {data = "a"}, column = "gain", less = {row = {"τ" = 2}}', 1.0, "+1.00"),
        ('row = {data = "a"}, column = "gain", less = {column = "τ"}', 0.5, "+0.50"),
        ('row = {data = "a"}, column = "gain", over = {row = {"τ" = 2}}', 3.0, "3"),
        ('row = {"τ" = 3}, column = "gain"', None, "-"),
        ('row = {data = "a"}, column = "gain", less = {row = {"τ" = 3}}', None, "-"),
    ],
)
def test_figures_by_their_place(tmp_path, words, value, text):
    found = look_up(figure(tmp_path, words), {"every": {"t": TABLE}})
    assert found.value == (None if value is None else pytest.approx(value))
    assert found.text == text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ('row = {data = "c"}, column = "gain"', "the table has no such row"),
        ('row = {data = "b"}, column = "gain"', "the table has 2 such rows"),
        ('row = {data = "a"}, column = "loss"', "no column 'loss', but data, τ, gain"),
        ('row = {date = "a"}, column = "gain"', "no column 'date'"),
        ('row = {data = "a"}, column = "gain", interval = "τ"', "has no intervals"),
        ('row = {data = "a"}, column = "data", less = {column = "gain"}', "is not a number"),
    ],
)
def test_a_place_that_is_not_there_is_an_error(tmp_path, words, told):
    with pytest.raises(CasterError, match="every: t, ") as caught:
        look_up(figure(tmp_path, words), {"every": {"t": TABLE}})
    assert told in str(caught.value)
    with pytest.raises(CasterError, match="there is no such table, but u"):
        look_up(figure(tmp_path, words), {"every": {"u": TABLE}})


def test_differences_of_the_papers_figures():
    tent = ("corruption", "CIFAR-10-C", "batch", "tent", 0)
    frozen = ("corruption", "CIFAR-10-C", "batch", "frozen", 0)
    assert Printed(tent, less=frozen).value == 13.7
    assert Printed(tent, over=frozen).value == pytest.approx(85.7 / 72.0)
    assert Printed(("certificate", "correlation")).text == "positive"
    with pytest.raises(CasterError, match=r"have no corruption\.where\.0"):
        _ = Printed(("corruption", "where", 0)).value
