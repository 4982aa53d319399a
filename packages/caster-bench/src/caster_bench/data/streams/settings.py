"""What a stream is asked to be, in plain values that can be recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from caster.errors import CasterError
from caster_bench.data.streams.conditions import SCHEDULES, Condition
from caster_bench.data.streams.orders import CONCENTRATION, ORDERS

LAST = ("keep", "drop")
MOST = 1e12  # no stream tells more from it, and sums and powers stay far from overflow


@dataclass(frozen=True)
class StreamSettings:
    """How images are ordered, batched and corrupted; nothing else decides a stream but labels.

    Orders: "shuffled" is i.i.d.; "file" takes the images as they come, and is refused where they
    come class by class; "by-class" is for those who mean that; "dirichlet" brings classes in
    bursts, the more so the lower the `concentration` (0.1 where none is given); "long-tailed" keeps
    a part of the images, the first class `imbalance` times as large as the last, and shuffles it.

    Schedules: "each" goes through all images under each of the conditions and has methods reset
    in between, as the paper does; "continual" is the same without resets, through any sequence of
    conditions; "gradual" climbs the severities of a corruption and goes down again before the next,
    as the paper of CoTTA describes (its script begins the first corruption at the worst severity:
    for that, name the conditions one by one in "continual"); "mixed" brings every image under
    every condition once, and which condition comes when is random. Without conditions the images
    are as they are.

    >>> StreamSettings(batch_size=200, order="dirichlet").order
    'dirichlet'
    """

    batch_size: int = 64
    order: str = "shuffled"
    seed: int = 0
    last: str = "keep"  # or "drop": what becomes of a batch that is not full
    conditions: tuple[Condition, ...] = ()
    schedule: str = "each"
    concentration: float | None = None  # of "dirichlet"
    slots: int | None = None  # of "dirichlet"; as many as classes, at most 100, where none is given
    imbalance: float | None = None  # of "long-tailed"

    def __post_init__(self) -> None:
        _check_whole("batch_size", self.batch_size, 1)
        _check_whole("seed", self.seed, 0)
        _check_name("order", self.order, ORDERS)
        _check_name("schedule", self.schedule, SCHEDULES)
        _check_name("last", self.last, LAST)
        conditions = tuple(self.conditions)
        if not all(isinstance(condition, Condition) for condition in conditions):
            raise CasterError("conditions are Condition(corruption, severity), one or more")
        if self.schedule != "each" and not conditions:
            raise CasterError(f"the schedule {self.schedule!r} needs conditions")
        object.__setattr__(self, "conditions", conditions)
        self._check_options()

    def _check_options(self) -> None:
        for name, order in (
            ("concentration", "dirichlet"),
            ("slots", "dirichlet"),
            ("imbalance", "long-tailed"),
        ):
            if getattr(self, name) is not None and self.order != order:
                raise CasterError(f"{name} belongs to the order {order!r}, not to {self.order!r}")
        if self.order == "dirichlet":
            if self.concentration is None:
                object.__setattr__(self, "concentration", CONCENTRATION)
            _check_number("concentration", self.concentration, 0.0, above=True)
            if self.slots is not None:
                _check_whole("slots", self.slots, 1)
        if self.order == "long-tailed":
            if self.imbalance is None:
                raise CasterError(
                    "the order 'long-tailed' needs an imbalance, such as imbalance=10"
                )
            _check_number("imbalance", self.imbalance, 1.0)


def _check_whole(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise CasterError(f"{name} must be a whole number (int) from {least} up, not {value!r}")


def _check_number(name: str, value: Any, least: float, above: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value <= MOST or (above and value == least):
        bound = "above" if above else "of at least"
        raise CasterError(
            f"{name} must be a number {bound} {least:g} and at most {MOST:g}, not {value!r}"
        )


def _check_name(what: str, name: Any, names: tuple[str, ...]) -> None:
    if name not in names:
        raise CasterError(f"there is no {what} {name!r}: say one of {', '.join(names)}")
