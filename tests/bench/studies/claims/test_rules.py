"""Verdicts by definition."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caster.errors import CasterError
from caster.report.intervals import Interval
from caster_bench.studies.claims.rules import (
    DIRECTION,
    NOT,
    NOT_RUN,
    PARTLY,
    REPRODUCED,
    UNTESTABLE,
    Rule,
    judge,
    together,
)
from tests.support.messages import error_line

UP, DOWN = Rule("sign", 1.0), Rule("sign", -1.0)
finite = st.floats(-100, 100)


@pytest.mark.parametrize(
    ("rule", "ours", "interval", "paper", "expected"),
    [
        (Rule("near", 1.0), 2.9, None, 2.0, REPRODUCED),
        (Rule("near", 1.0), 3.1, None, 2.0, NOT),
        (Rule("near", 1.0), 3.5, Interval(2.9, 4.0), 2.0, PARTLY),  # only the interval comes near
        (Rule("near", 1.0), 2.5, Interval(-9.0, 9.0), 2.0, PARTLY),  # only the figure does
        (Rule("near", 1.0), 2.5, Interval(1.5, 3.0), 2.0, REPRODUCED),
        (Rule("near", 1.0, direction="sign"), 9.0, Interval(8.0, 10.0), 2.0, DIRECTION),
        (Rule("near", 1.0, direction="sign"), -9.0, Interval(-10.0, -8.0), 2.0, NOT),
        (Rule("near", 1.0, 5.0, "sign"), 9.0, None, 2.0, DIRECTION),
        (Rule("near", 1.0, direction="sign", null=1.5), 2.5, None, 2.0, PARTLY),
        (Rule("near", 1.0, direction="sign", null=0.0), 2.5, None, 2.0, REPRODUCED),
        (Rule("near", 1.0, direction="sign", null=1.5), 9.0, None, 2.0, DIRECTION),
        (Rule("factor", 1.5, null=1.0), 1.2, None, 1.44, PARTLY),
        (Rule("most", 0.8, null=0.0), 0.5, None, None, PARTLY),
        (Rule("factor", 2.0, direction=10.0), 3.0, None, 18.0, DIRECTION),
        (Rule("least", 3.9, direction=0.8), 1.0, None, None, DIRECTION),
        (Rule("least", 3.9, direction=0.8), 0.5, None, None, NOT),
        (Rule("near", 1.0, 5.0), 6.0, Interval(5.5, 6.5), 2.0, PARTLY),
        (Rule("near", 1.0, 5.0), 7.5, Interval(6.5, 8.0), 2.0, NOT),
        (Rule("near", 0.0), 0.0, None, 0.0, REPRODUCED),
        (Rule("factor", 2.0), 9.0, None, 18.0, REPRODUCED),
        (Rule("factor", 2.0, 10.0), 3.0, None, 18.0, PARTLY),
        (Rule("factor", 2.0, 10.0), 1.0, None, 18.0, NOT),
        (Rule("factor", 2.0), -9.0, None, -18.0, REPRODUCED),
        (Rule("least", 3.9, 0.8), 4.0, None, None, REPRODUCED),
        (Rule("least", 3.9, 0.8), 1.0, None, None, PARTLY),
        (Rule("least", 3.9, 0.8), 0.5, None, None, NOT),
        (Rule("least", 3.9), math.inf, None, None, REPRODUCED),
        (Rule("least", 90.0), 95.0, Interval(85.0, 100.0), None, PARTLY),
        (Rule("most", 0.0), -1.0, Interval(-2.0, -0.1), None, REPRODUCED),
        (Rule("most", 0.0), 0.2, Interval(-2.0, 1.0), None, NOT),
        (UP, 1.0, Interval(0.5, 1.5), None, REPRODUCED),
        (UP, 1.0, Interval(-0.5, 1.5), None, PARTLY),
        (UP, -0.1, Interval(-0.5, 1.5), None, NOT),
        (UP, 0.0, None, None, NOT),
        (DOWN, -1.0, None, None, REPRODUCED),
        (Rule("equals", 0.0), 0, None, None, REPRODUCED),
        (Rule("equals", 0.0), 0.01, None, None, NOT),
        (Rule("equals", "no"), False, None, None, REPRODUCED),
        (Rule("equals", "yes"), False, None, None, NOT),
        (Rule("near", 1.0), None, None, 2.0, UNTESTABLE),
    ],
)
def test_a_verdict_is_what_its_rule_says(rule, ours, interval, paper, expected):
    assert judge(rule, ours, interval, paper) == expected


@given(finite, finite, st.floats(0.01, 50), st.floats(0, 20))
def test_an_interval_decides_nothing_but_partly(ours, paper, bound, half):
    narrow, wide = Interval(ours, ours), Interval(ours - half, ours + half)
    alone, found = (judge(Rule("near", bound), ours, ends, paper) for ends in (narrow, wide))
    inside = abs(ours - paper) + half <= bound + 1e-9
    assert found == (REPRODUCED if inside else alone) or found == PARTLY
    assert (found == REPRODUCED) == inside
    assert (alone == REPRODUCED) == (abs(ours - paper) <= bound + 1e-9)


@given(finite, st.floats(0, 20))
def test_of_two_signs_one_at_most_is_borne_out(ours, half):
    interval = Interval(ours - half, ours + half)
    verdicts = [judge(rule, ours, interval, None) for rule in (UP, DOWN)]
    assert NOT in verdicts
    assert (REPRODUCED in verdicts) == (ours != 0 and (interval.low > 0 or interval.high < 0))


def test_what_no_rule_can_judge_is_an_error():
    with pytest.raises(CasterError, match="needs a number, and the table has 'no upper end'"):
        judge(Rule("least", 1.0), "no upper end", None, None)
    with pytest.raises(CasterError, match="needs a figure of the paper"):
        judge(Rule("near", 1.0), 1.0, None, None)
    assert "the rule 'sign' has no 'partly'" in error_line(Rule, "sign", 1.0, 2.0)
    assert "the rule 'equals' has no 'direction'" in error_line(Rule, "equals", 1.0, direction=2.0)
    assert "only with the rule 'near'" in error_line(Rule, "least", 1.0, direction="sign")


def test_a_claim_of_several_figures():
    assert together([REPRODUCED, REPRODUCED]) == REPRODUCED
    assert together([NOT, NOT]) == NOT
    assert together([REPRODUCED, NOT]) == PARTLY
    assert together([DIRECTION, DIRECTION]) == DIRECTION
    assert together([DIRECTION, NOT]) == DIRECTION
    assert together([DIRECTION, REPRODUCED]) == PARTLY
    assert together([PARTLY, NOT, NOT]) == DIRECTION  # fewer than half
    assert together([PARTLY, NOT, UNTESTABLE]) == PARTLY
    assert together([REPRODUCED, UNTESTABLE]) == REPRODUCED
    assert together([UNTESTABLE, UNTESTABLE]) == UNTESTABLE
    assert together([REPRODUCED, NOT, NOT_RUN]) == NOT_RUN
