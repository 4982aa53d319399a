"""Something that is wrong with records, and lists of it that a person can read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SHOWN = 5  # of one kind; the rest are counted


@dataclass(frozen=True, order=True)
class Problem:
    """What is wrong, and with what.

    >>> print(Problem("missing", "resnet18 on cifar10, fog-3: tent"))
    missing: resnet18 on cifar10, fog-3: tent
    """

    kind: str  # the same words for the same fault, wherever it is
    where: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}"


def lines(problems: Iterable[Problem], shown: int = SHOWN) -> list[str]:
    """A line a kind with how often it is found, and where, the first few of them.

    >>> lines([Problem("missing", "a"), Problem("missing", "b"), Problem("foreign", "c")], shown=1)
    ['foreign (1)', '  c', 'missing (2)', '  a', '  and 1 more']
    """
    kinds: dict[str, list[str]] = {}
    for problem in sorted(problems):
        kinds.setdefault(problem.kind, []).append(problem.where)
    text = []
    for kind, places in kinds.items():
        text += [f"{kind} ({len(places)})", *(f"  {place}" for place in places[:shown])]
        if len(places) > shown:
            text.append(f"  and {len(places) - shown} more")
    return text
