"""Settings of a stream, as plain values that can be recorded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from caster.errors import CasterError
from caster_bench.data.corruptions.constants import SEVERITIES, check_corruption

ORDERS = ("shuffled", "file", "by-class", "dirichlet", "long-tailed", "runs", "turning")
SCHEDULES = ("each", "continual", "gradual", "mixed")
LAST = ("keep", "drop")
CONCENTRATION = 0.1  # NOTE's and RoTTA's
LARGEST = 1e12  # larger numbers make no other stream, and sums and powers stay far from overflow


@dataclass(frozen=True, order=True)
class Condition:
    """A corruption at a severity.

    >>> Condition("fog", 3)
    Condition(corruption='fog', severity=3)
    """

    corruption: str  # one of CORRUPTIONS
    severity: int  # from 1 to 5

    def __post_init__(self) -> None:
        check_corruption(self.corruption)
        if type(self.severity) is not int or self.severity not in SEVERITIES:
            raise CasterError(f"a severity is an integer from 1 to 5, not {self.severity!r}")


def all_conditions(
    corruptions: Iterable[str], severities: Iterable[int] = SEVERITIES
) -> tuple[Condition, ...]:
    """Combine every corruption with every severity, corruption by corruption.

    >>> [(c.corruption, c.severity) for c in all_conditions(["fog", "snow"], [1, 5])]
    [('fog', 1), ('fog', 5), ('snow', 1), ('snow', 5)]
    """
    if isinstance(corruptions, str):
        raise CasterError(f"corruptions must be a list of names: give [{corruptions!r}]")
    severities = tuple(severities)
    return tuple(Condition(name, severity) for name in corruptions for severity in severities)


@dataclass(frozen=True)
class StreamSettings:
    """Order, batches and corruptions of a stream; with the labels they determine it.

    Orders: "shuffled" is i.i.d.; "file" keeps the order of the images, and is rejected if they are
    sorted by class; "by-class" sorts them; "dirichlet" brings classes in bursts, the more so the
    lower the `concentration` (0.1 by default); "long-tailed" keeps a subset in which the first
    class is `imbalance` times as large as the last, and shuffles it; "runs" brings runs of one
    class of `shortest` to `longest` images; "turning" is shuffled in its first half and sorted by
    class in its second.

    Schedules: "each" goes through all images under each condition and resets methods in between,
    as the paper does; "continual" does the same without resets, through any sequence of conditions;
    "gradual" climbs the severities of a corruption and descends again before the next, as the paper
    of CoTTA describes (its script starts the first corruption at the worst severity: for that, list
    the conditions one by one in "continual"); "mixed" shows every image under every condition once,
    conditions in random order. Without conditions the images are clean.

    >>> StreamSettings(batch_size=200, order="dirichlet").order
    'dirichlet'
    """

    batch_size: int = 64
    order: str = "shuffled"
    seed: int = 0
    last: str = "keep"  # or "drop": what happens to an incomplete last batch
    conditions: tuple[Condition, ...] = ()
    schedule: str = "each"
    concentration: float | None = None  # for "dirichlet"
    slots: int | None = None  # for "dirichlet"; the number of classes, at most 100, by default
    imbalance: float | None = None  # for "long-tailed"
    shortest: int | None = None  # for "runs", with `longest`; by the number of classes by default
    longest: int | None = None  # for "runs"

    def __post_init__(self) -> None:
        _check_integer("batch_size", self.batch_size, 1)
        _check_integer("seed", self.seed, 0)
        _check_choice("order", self.order, ORDERS)
        _check_choice("schedule", self.schedule, SCHEDULES)
        _check_choice("last", self.last, LAST)
        conditions = tuple(self.conditions)
        if not all(isinstance(condition, Condition) for condition in conditions):
            raise CasterError("conditions must be Condition(corruption, severity)")
        if self.schedule != "each" and not conditions:
            raise CasterError(f"the schedule {self.schedule!r} needs conditions")
        object.__setattr__(self, "conditions", conditions)
        self._check_order_options()

    def _check_order_options(self) -> None:
        for name, order in (
            ("concentration", "dirichlet"),
            ("slots", "dirichlet"),
            ("imbalance", "long-tailed"),
            ("shortest", "runs"),
            ("longest", "runs"),
        ):
            if getattr(self, name) is not None and self.order != order:
                raise CasterError(f"{name} belongs to the order {order!r}, not to {self.order!r}")
        if self.order == "dirichlet":
            if self.concentration is None:
                object.__setattr__(self, "concentration", CONCENTRATION)
            _check_number("concentration", self.concentration, 0.0, above=True)
            if self.slots is not None:
                _check_integer("slots", self.slots, 1)
        if self.order == "long-tailed":
            if self.imbalance is None:
                raise CasterError(
                    "the order 'long-tailed' needs an imbalance, such as imbalance=10"
                )
            _check_number("imbalance", self.imbalance, 1.0)
        if self.shortest is not None or self.longest is not None:
            if self.shortest is None or self.longest is None:
                raise CasterError("the order 'runs' takes both shortest and longest, or neither")
            _check_integer("shortest", self.shortest, 1)
            _check_integer("longest", self.longest, self.shortest)


def _check_integer(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise CasterError(f"{name} must be an integer (int) of at least {least}, not {value!r}")


def _check_number(name: str, value: Any, least: float, above: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value <= LARGEST or (above and value == least):
        bound = "above" if above else "of at least"
        raise CasterError(
            f"{name} must be a number {bound} {least:g} and at most {LARGEST:g}, not {value!r}"
        )


def _check_choice(what: str, name: Any, names: tuple[str, ...]) -> None:
    if name not in names:
        raise CasterError(f"there is no {what} {name!r}: choose from {', '.join(names)}")
