"""Under which corruptions the images come, one after the other or all at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from caster.errors import CasterError
from caster_bench.data.corruptions.make import known

SCHEDULES = ("each", "continual", "gradual", "mixed")
WORST = 5  # severities count from 1


@dataclass(frozen=True, order=True)
class Condition:
    """What images are under: a corruption, and how severe it is.

    >>> Condition("fog", 3)
    Condition(corruption='fog', severity=3)
    """

    corruption: str  # one of CORRUPTIONS
    severity: int  # from 1 to 5

    def __post_init__(self) -> None:
        known(self.corruption)
        if type(self.severity) is not int or not 1 <= self.severity <= WORST:
            raise CasterError(
                f"a severity is a whole number from 1 to {WORST}, not {self.severity!r}"
            )


def all_conditions(
    corruptions: Iterable[str], severities: Iterable[int] = range(1, WORST + 1)
) -> tuple[Condition, ...]:
    """Every corruption at every severity, corruption after corruption.

    >>> [(c.corruption, c.severity) for c in all_conditions(["fog", "snow"], [1, 5])]
    [('fog', 1), ('fog', 5), ('snow', 1), ('snow', 5)]
    """
    if isinstance(corruptions, str):
        raise CasterError(f"corruptions are a list of names: give [{corruptions!r}]")
    severities = tuple(severities)
    return tuple(Condition(name, severity) for name in corruptions for severity in severities)


@dataclass(frozen=True)
class Leg:
    """Once through the images: under nothing, one condition, or several at once."""

    conditions: tuple[Condition, ...]
    occurrence: int  # how many legs before it are under the same
    starts_segment: bool


def legs_of(conditions: Sequence[Condition], schedule: str) -> tuple[Leg, ...]:
    """The legs of a schedule.

    >>> fog = all_conditions(["fog"], [1, 2, 3])
    >>> [leg.conditions[0].severity for leg in legs_of(fog, "gradual")]
    [1, 2, 3, 2, 1]
    """
    if not conditions:
        return (Leg((), 0, True),)
    if schedule != "continual" and len(set(conditions)) < len(conditions):
        (twice, _), *_ = Counter(conditions).most_common(1)
        raise CasterError(
            f"{twice.corruption} at severity {twice.severity} is named twice: "
            "only the schedule 'continual' may come back to a condition"
        )
    if schedule == "mixed":
        return (Leg(tuple(conditions), 0, True),)
    seen: Counter[Condition] = Counter()
    legs: list[Leg] = []
    for condition in _ramps(conditions) if schedule == "gradual" else conditions:
        legs.append(Leg((condition,), seen[condition], schedule == "each" or not legs))
        seen[condition] += 1
    return tuple(legs)


def _ramps(conditions: Sequence[Condition]) -> list[Condition]:
    """Up through the severities of a corruption and down again, before the next corruption."""
    ramps = []
    for name in dict.fromkeys(condition.corruption for condition in conditions):
        up = sorted(condition for condition in conditions if condition.corruption == name)
        if len(up) < 2:
            raise CasterError(
                f"{name} comes at severity {up[0].severity} alone: "
                "the schedule 'gradual' needs two severities of every corruption or more"
            )
        ramps += up + up[-2::-1]
    return ramps
