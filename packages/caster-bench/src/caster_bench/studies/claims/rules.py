"""When a figure of ours bears out the paper's: rules that are written down before any run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from caster.errors import CasterError
from caster.report.intervals import Interval
from caster_bench.studies.tables import Value

REPRODUCED, PARTLY, NOT = "reproduced", "partly reproduced", "not reproduced"
UNTESTABLE, NOT_RUN = "not testable here", "not run yet"
VERDICTS = (REPRODUCED, PARTLY, NOT, UNTESTABLE, NOT_RUN)
KINDS = ("near", "factor", "sign", "least", "most", "equals")
SIGNS = {"positive": 1.0, "negative": -1.0}
SAME_SIGN = "sign"
EXACT = 1e-9  # of figures that must be the same


@dataclass(frozen=True)
class Rule:
    """One way to judge a figure, and what it is held against.

    near: our interval, or figure without one, comes within `bound` of the paper's figure.
    factor: it comes within that factor of it.
    least, most: our figure and all of its interval are at least, at most `bound`.
    sign: our figure and all of its interval are of the sign that `bound` has.
    equals: our figure or word is `bound`.
    """

    kind: str
    bound: float | str
    partly: float | str | None = None  # a wider bound; or "sign", the paper's figure's

    def __post_init__(self) -> None:
        wide = self.kind in ("near", "factor", "least", "most")
        if self.partly is not None and not wide:
            raise CasterError(f"there is no 'partly' of the rule '{self.kind}'")
        if self.partly == SAME_SIGN and self.kind != "near":
            raise CasterError("'partly' is \"sign\" of the rule 'near' alone")

    @property
    def needs_paper(self) -> bool:
        """Whether it is held against the paper's figure."""
        return self.kind in ("near", "factor")

    def words(self) -> str:
        """The rule, to be read.

        >>> Rule("near", 2.0, "sign").words(), Rule("least", 3.9, 0.8).words()
        ("within 2 of the paper's; partly: of its sign", 'at least 3.9; partly: at least 0.8')
        """
        if self.partly is None:
            return _bounded(self.kind, self.bound)
        wider = "of its sign" if self.partly == SAME_SIGN else _bounded(self.kind, self.partly)
        return f"{_bounded(self.kind, self.bound)}; partly: {wider}"


def _bounded(kind: str, bound: float | str) -> str:
    if kind == "sign":
        return "positive" if bound == SIGNS["positive"] else "negative"
    told = bound if isinstance(bound, str) else f"{bound:g}"
    return {
        "near": f"within {told} of the paper's",
        "factor": f"within a factor of {told} of the paper's",
        "least": f"at least {told}",
        "most": f"at most {told}",
        "equals": f"exactly {told}",
    }[kind]


def judge(rule: Rule, ours: Value, interval: Interval | None, paper: float | None) -> str:
    """The verdict on one figure.

    >>> judge(Rule("near", 0.5, "sign"), 1.0, Interval(0.8, 1.2), 1.69)
    'reproduced'
    >>> judge(Rule("sign", 1.0), 1.0, Interval(-0.1, 2.0), None)
    'partly reproduced'
    """
    if ours is None:
        return UNTESTABLE
    if rule.kind == "equals":
        return REPRODUCED if _same(ours, rule.bound) else NOT
    if isinstance(ours, str | bool | Interval):
        raise CasterError(f"the rule '{rule.kind}' needs a number, and the table has {ours!r}")
    ends = interval or Interval(ours, ours)
    if rule.needs_paper:
        if paper is None:
            raise CasterError(f"the rule '{rule.kind}' needs a figure of the paper's")
        return _beside(rule, ours, ends, paper)
    low, high = _range(rule, rule.bound)
    if low <= ends.low and ends.high <= high and low <= ours <= high:
        return REPRODUCED
    wide = _range(rule, rule.bound if rule.partly is None else rule.partly)
    return PARTLY if wide[0] <= ours <= wide[1] else NOT


def _beside(rule: Rule, ours: float, ends: Interval, paper: float) -> str:
    low, high = _band(rule, rule.bound, paper)
    if ends.low <= high and ends.high >= low:
        return REPRODUCED
    if rule.partly is None:
        return NOT
    if rule.partly == SAME_SIGN:
        return PARTLY if ours * paper > 0 else NOT
    low, high = _band(rule, rule.partly, paper)
    return PARTLY if low <= ours <= high else NOT


def _band(rule: Rule, bound: float | str, paper: float) -> tuple[float, float]:
    width = float(bound)
    if rule.kind == "near":
        return paper - width - EXACT, paper + width + EXACT
    low, high = sorted((paper / width, paper * width))
    return low, high


def _range(rule: Rule, bound: float | str) -> tuple[float, float]:
    """The figures that a rule allows; more than nothing, where it is a sign."""
    if rule.kind == "sign":
        least = math.ulp(0.0)
        return (least, math.inf) if rule.bound == SIGNS["positive"] else (-math.inf, -least)
    return (float(bound), math.inf) if rule.kind == "least" else (-math.inf, float(bound))


def _same(ours: Value, wanted: float | str) -> bool:
    if isinstance(ours, bool):
        return wanted == ("yes" if ours else "no")
    if isinstance(ours, str) or isinstance(wanted, str):
        return ours == wanted
    return isinstance(ours, int | float) and abs(ours - wanted) <= EXACT


def together(verdicts: Sequence[str]) -> str:
    """The verdict on a claim of several figures: what all are, or else partly.

    >>> together(["reproduced", "not reproduced"]), together(["reproduced", "not run yet"])
    ('partly reproduced', 'not run yet')
    """
    found = set(verdicts)
    if NOT_RUN in found:
        return NOT_RUN
    found -= {UNTESTABLE} if len(found) > 1 else set()
    return found.pop() if len(found) == 1 else PARTLY
