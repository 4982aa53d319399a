"""Streams: the order, batches and corruptions in which images reach a method."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.special import gammaln

from caster.errors import CasterError
from caster.io.labels import Labels, as_labels, encode, is_by_class, unique_labels
from caster_bench.data.corruptions.constants import check_corruption
from caster_bench.sweeps.spec import LAST, ORDERS, SCHEDULES, SEVERITIES, known

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]
MAX_SLOTS = 100  # RoTTA: one slot per class, and at most these
FEW_CLASSES = 30  # up to this many classes, runs are long by default
LONG_RUNS, SHORT_RUNS = (20, 60), (4, 16)  # of CIFAR-10 and CIFAR-100: images, both inclusive
CONCENTRATION = 0.1  # NOTE's and RoTTA's
LARGEST = 1e12  # larger numbers make no other stream, and sums and powers stay far from overflow


# --- settings, as plain values that can be recorded ----------------------------------------------


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
        known(self.order, ORDERS, "order")
        known(self.schedule, SCHEDULES, "schedule")
        known(self.last, LAST, "last")
        conditions = tuple(self.conditions)
        if not all(isinstance(condition, Condition) for condition in conditions):
            raise CasterError("conditions must be Condition(corruption, severity)")
        if self.schedule != "each" and not conditions:
            raise CasterError(f"the schedule {self.schedule!r} needs conditions")
        object.__setattr__(self, "conditions", conditions)
        self._check_order_options()

    def _check_order_options(self) -> None:
        for name, order in ((name, order) for order, names in ORDERS.items() for name in names):
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


# --- the stream ----------------------------------------------------------------------------------


def make_stream(labels: Any, settings: StreamSettings | None = None) -> Stream:
    """Make the stream of images with these labels (N,), of any hashable type.

    A "file" order that is sorted by class is rejected.

    >>> stream = make_stream(["cat", "dog"] * 50, StreamSettings(batch_size=30))
    >>> len(stream), [len(batch.rows) for batch in stream], stream.diversity.classes
    (4, [30, 30, 30, 10], array([2, 2, 2, 2]))
    """
    settings = settings or StreamSettings()
    labels = as_labels(labels)
    if len(labels) == 0:
        raise CasterError("a stream needs at least one image, and there are no labels")
    classes = unique_labels(labels)
    targets = encode(labels, classes)
    kept = np.arange(len(targets))
    if settings.imbalance is not None:
        kept = long_tail(targets, generator(settings.seed, "long tail"), settings.imbalance)
    passes = _passes(settings.conditions, settings.schedule)
    stream = Stream(settings, classes, targets, kept, passes)
    if len(stream) == 0:
        raise CasterError(
            f"last='drop' drops all {len(kept)} images, too few for a batch of "
            f"{settings.batch_size}: set last='keep' or a smaller batch_size"
        )
    if settings.order == "file" and stream.is_class_ordered:
        found = stream.diversity
        raise CasterError(
            f"in file order the images are sorted by class (a batch of {settings.batch_size} "
            f"has {found.classes.mean():.1f} classes, at random {found.expected.mean():.1f}): "
            "set order='shuffled', or order='by-class' if that is intended"
        )
    return stream


@dataclass(frozen=True, eq=False)
class Batch:
    """Images that arrive together, and their conditions."""

    index: int  # in the stream, from 0
    rows: Indices  # (B,) which images
    condition: Condition | tuple[Condition, ...] | None  # of all rows, one per row, or clean
    starts_segment: bool  # whether to reset a method before it

    def parts(self) -> list[tuple[Condition | None, Indices]]:
        """Group positions in `rows` by condition.

        >>> fog, snow = Condition("fog", 1), Condition("snow", 1)
        >>> Batch(0, np.array([7, 3, 5]), (fog, snow, fog), True).parts()[0]
        (Condition(corruption='fog', severity=1), array([0, 2]))
        """
        if not isinstance(self.condition, tuple):
            return [(self.condition, np.arange(len(self.rows)))]
        positions: dict[Condition, list[int]] = {}
        for position, condition in enumerate(self.condition):
            positions.setdefault(condition, []).append(position)
        return [(condition, np.array(positions[condition])) for condition in sorted(positions)]


@dataclass(frozen=True)
class Pass:
    """One pass through the images: clean, under one condition, or under several at once."""

    conditions: tuple[Condition, ...]
    occurrence: int  # number of earlier passes under the same condition
    starts_segment: bool


def _passes(conditions: Sequence[Condition], schedule: str) -> tuple[Pass, ...]:
    if not conditions:
        return (Pass((), 0, True),)
    if schedule != "continual" and len(set(conditions)) < len(conditions):
        (twice, _), *_ = Counter(conditions).most_common(1)
        raise CasterError(
            f"{twice.corruption} at severity {twice.severity} is listed twice: "
            "only the schedule 'continual' can return to a condition"
        )
    if schedule == "mixed":
        return (Pass(tuple(conditions), 0, True),)
    seen: Counter[Condition] = Counter()
    passes: list[Pass] = []
    for condition in _ramps(conditions) if schedule == "gradual" else conditions:
        passes.append(Pass((condition,), seen[condition], schedule == "each" or not passes))
        seen[condition] += 1
    return tuple(passes)


def _ramps(conditions: Sequence[Condition]) -> list[Condition]:
    """Climb and descend the severities of each corruption in turn."""
    ramps = []
    for name in dict.fromkeys(condition.corruption for condition in conditions):
        up = sorted(condition for condition in conditions if condition.corruption == name)
        if len(up) < 2:
            raise CasterError(
                f"{name} has only severity {up[0].severity}: "
                "the schedule 'gradual' needs at least two severities of every corruption"
            )
        ramps += up + up[-2::-1]
    return ramps


@dataclass(frozen=True, eq=False)
class Stream:
    """A plan that labels and settings determine; it holds no images.

    A segment is what a method goes through without a reset: all images under one condition in
    the schedule "each", and the whole stream in the others. The rows of a condition do not depend
    on the other conditions, so a segment of "each" can run on its own.
    """

    settings: StreamSettings
    classes: Labels  # (C,)
    targets: Indices  # (N,) class index of every image
    kept: Indices  # (M,) rows in the stream: all but those a long tail leaves out
    passes: tuple[Pass, ...]

    def __len__(self) -> int:
        return len(self.passes) * len(self._sizes)

    def __iter__(self) -> Iterator[Batch]:
        ends = np.cumsum(self._sizes)
        for number, one in enumerate(self.passes):
            rows, which = self._arranged(one)
            for i, end in enumerate(ends):
                part = slice(end - self._sizes[i], end)
                condition: Condition | tuple[Condition, ...] | None
                if len(one.conditions) > 1:
                    condition = tuple(one.conditions[c] for c in which[part])
                else:
                    condition = one.conditions[0] if one.conditions else None
                yield Batch(
                    number * len(ends) + i, rows[part], condition, one.starts_segment and i == 0
                )

    @cached_property
    def diversity(self) -> Diversity:
        """Number of classes in every batch, and its expectation for a random batch."""
        counts = np.bincount(self.targets[self.kept]) * self._repeats
        sizes = np.tile(self._sizes, len(self.passes))
        return Diversity.of(self._streamed_targets, sizes, counts)

    @cached_property
    def is_class_ordered(self) -> bool:
        """Whether batches have few classes because of the order of the images.

        True if two images of a batch differ in class at most half as often as at random, or if it
        has at most half of the classes beyond the first. Batches of one image are judged by their
        neighbours, as a data set is. False with a single class or a single batch.
        """
        if len(self.classes) == 1 or len(self._sizes) == 1:
            return False
        if self.settings.batch_size == 1:
            return is_by_class(self._streamed_targets)
        return self.diversity.is_low

    @property
    def _streamed_targets(self) -> Indices:
        n = int(self._sizes.sum())
        return np.concatenate([self.targets[self._arranged(one)[0][:n]] for one in self.passes])

    @property
    def _run_lengths(self) -> tuple[int, int]:
        """Shortest and longest run of the order "runs"."""
        if self.settings.shortest is None or self.settings.longest is None:
            return LONG_RUNS if len(self.classes) <= FEW_CLASSES else SHORT_RUNS
        return self.settings.shortest, self.settings.longest

    @property
    def _repeats(self) -> int:
        """How often a pass shows every image: once per condition."""
        return max(1, len(self.passes[0].conditions))

    @cached_property
    def _sizes(self) -> Indices:
        """Batch sizes of a pass; all passes have the same length."""
        size = self.settings.batch_size
        full, rest = divmod(len(self.kept) * self._repeats, size)
        sizes = [size] * full + [rest] * (rest > 0 and self.settings.last == "keep")
        return np.array(sizes, dtype=np.int64)

    def _arranged(self, one: Pass) -> tuple[Indices, Indices]:  # (L,), (L,)
        """Return rows in order, and the index of each row's condition."""
        purpose = [astuple(condition) for condition in one.conditions]
        rng = generator(self.settings.seed, "order", purpose, one.occurrence)
        rows = np.tile(self.kept, self._repeats)
        # Every image once under every condition, the conditions of each in random order.
        turns = np.tile(np.arange(self._repeats), (len(self.kept), 1))
        which = rng.permuted(turns, axis=1).T.ravel() if self._repeats > 1 else turns.ravel()
        order = self._order(self.targets[rows], rng)
        rows, which = rows[order], which[order]
        rows.setflags(write=False)
        return rows, which

    def _order(self, targets: Indices, rng: Generator) -> Indices:
        match self.settings.order:
            case "file":
                return np.arange(len(targets))
            case "by-class":
                return by_class(targets, rng)
            case "dirichlet":
                assert self.settings.concentration is not None  # StreamSettings sets it
                return dirichlet(targets, rng, self.settings.concentration, self.settings.slots)
            case "runs":
                return runs(targets, rng, self._run_lengths)
            case "turning":
                return turning(targets, rng)
            case _:  # "long-tailed" shuffles the rows it kept
                return rng.permutation(len(targets))


# --- orders --------------------------------------------------------------------------------------


def generator(seed: int, *purpose: Any) -> Generator:
    """Make a random generator for one purpose, independent of all others.

    >>> generator(0, "rows").random() == generator(0, "rows").random()
    True
    """
    digest = hashlib.sha256(json.dumps([seed, *purpose]).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))


def by_class(targets: Indices, rng: Generator) -> Indices:  # (n,) -> (n,)
    """Sort rows by class, in random order within a class.

    >>> targets = np.array([1, 0, 1, 0])
    >>> targets[by_class(targets, generator(0))]
    array([0, 0, 1, 1])
    """
    shuffled = rng.permutation(len(targets))
    return shuffled[np.argsort(targets[shuffled], kind="stable")]


def dirichlet(
    targets: Indices,  # (n,)
    rng: Generator,
    concentration: float,
    slots: int | None = None,
) -> Indices:  # (n,)
    """Order rows in bursts of classes, as NOTE (Gong et al. 2022) and RoTTA (Yuan et al. 2023) do.

    Time is divided into slots. Every class draws its shares of the slots from a symmetric Dirichlet
    distribution, and each of its rows a slot by these shares. Within a slot, classes follow each
    other in random order. A concentration near zero gives whole classes one after the other. A
    large one spreads every class over all slots; that is not i.i.d. if slots are longer than
    batches, as with the published number of slots, because classes still take turns within a slot.
    With at least four slots per batch it is nearly i.i.d.

    The published code cuts a class at rounded multiples of its shares. Drawing the slots has the
    same expectation, and no rounding artefacts where rows are fewer than slots.

    >>> targets = np.repeat(np.arange(3), 4)
    >>> targets[dirichlet(targets, generator(0), concentration=1e-6)]
    array([1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0, 0])
    """
    counts = np.bincount(targets)
    slots = min(len(counts), MAX_SLOTS) if slots is None else slots
    sorted_rows = by_class(targets, rng)
    slot = np.empty_like(targets)
    for rows in np.split(sorted_rows, np.cumsum(counts)[:-1]):
        shares = rng.dirichlet(np.full(slots, concentration))
        slot[rows] = rng.choice(slots, size=len(rows), p=shares)
    runs, run = np.unique(slot * len(counts) + targets, return_inverse=True)
    turn = rng.permutation(len(runs))[run]
    return sorted_rows[np.lexsort((turn[sorted_rows], slot[sorted_rows]))]


def runs(targets: Indices, rng: Generator, lengths: tuple[int, int]) -> Indices:  # (n,) -> (n,)
    """Order rows in runs of one class, whose lengths are uniform between two bounds, inclusive.

    The class of every run is drawn from those with rows left, so two runs in a row may have the
    same one. Runs that use up a class may be shorter.

    >>> targets = np.repeat(np.arange(3), 4)
    >>> targets[runs(targets, generator(0), (2, 2))]
    array([2, 2, 2, 2, 0, 0, 1, 1, 1, 1, 0, 0])
    """
    counts = np.bincount(targets)
    left = dict(enumerate(np.split(by_class(targets, rng), np.cumsum(counts)[:-1])))
    found = []
    while left:
        chosen = list(left)[rng.integers(len(left))]
        length = rng.integers(*lengths, endpoint=True)
        found.append(left[chosen][:length])
        left[chosen] = left[chosen][length:]
        if not len(left[chosen]):
            del left[chosen]
    return np.concatenate(found)


def turning(targets: Indices, rng: Generator) -> Indices:  # (n,) -> (n,)
    """Shuffle rows, and sort the second half by class.

    >>> targets = np.arange(12) % 3
    >>> targets[turning(targets, generator(0))][6:]
    array([1, 1, 1, 2, 2, 2])
    """
    shuffled = rng.permutation(len(targets))
    first, second = np.split(shuffled, [len(targets) // 2])
    return np.concatenate([first, second[np.argsort(targets[second], kind="stable")]])


def long_tail(targets: Indices, rng: Generator, imbalance: float) -> Indices:  # (n,) -> (m,)
    """Choose the largest subset whose class sizes fall exponentially; rows in ascending order.

    The first class is `imbalance` times as large as the last (Cui et al. 2019). The rows of a
    class are chosen at random.

    >>> targets = np.repeat(np.arange(3), 100)
    >>> np.bincount(targets[long_tail(targets, generator(0), imbalance=100)])
    array([100,  10,   1])
    """
    counts = np.bincount(targets)
    shape = imbalance ** -np.linspace(0.0, 1.0, len(counts))
    sizes = np.rint(np.min(counts / shape) * shape).astype(np.int64)
    if sizes.min() < 1:
        raise CasterError(
            f"an imbalance of {imbalance:g} leaves some of the {len(counts)} classes without "
            f"images: lower it, or give more than {counts.min()} images of the rarest class"
        )
    sorted_rows = by_class(targets, rng)
    rank = np.arange(len(targets)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.sort(sorted_rows[rank < np.repeat(sizes, counts)])


# --- diversity -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Diversity:
    """Classes in every batch, compared with random batches of the same images."""

    sizes: Indices  # (T,)
    classes: Indices  # (T,) number of classes
    unlike: Floats  # (T,) fraction of pairs of different classes, 0 without a pair
    expected: Floats  # (T,) expected number of classes in a random batch of this size
    expected_unlike: float

    @classmethod
    def of(
        cls,
        targets: Indices,  # (n,) in the order of the stream
        sizes: Indices,  # (T,) of the batches, which sum to n
        counts: Indices,  # (C,) images of every class that batches are drawn from
    ) -> Diversity:
        """Count the classes in every batch.

        >>> found = Diversity.of(np.array([0, 0, 0, 1]), np.array([2, 2]), np.array([3, 1]))
        >>> found.classes, found.expected
        (array([1, 2]), array([1.5, 1.5]))
        """
        batch = np.repeat(np.arange(len(sizes)), sizes)
        keys, times = np.unique(batch * len(counts) + targets, return_counts=True)
        owner = keys // len(counts)
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        return cls(
            sizes=sizes,
            classes=np.bincount(owner, minlength=len(sizes)),
            unlike=_unlike(sizes, np.add.reduceat(times**2, first)),
            expected=_expected_classes(sizes, counts),
            expected_unlike=float(_unlike(counts.sum(), np.sum(counts**2))),
        )

    @property
    def relative(self) -> float:
        """Classes beyond the first, relative to random batches: about 1 shuffled, 0 by class.

        It is 1 if no batch could have a second class. Large batches weigh more.
        """
        found, expected = (
            float(np.average(classes, weights=self.sizes)) - 1
            for classes in (self.classes, self.expected)
        )
        return found / expected if expected > 1e-9 else 1.0

    @property
    def relative_unlike(self) -> float:
        """How often two images of a batch differ in class, relative to random batches."""
        weights = np.where(self.sizes > 1, self.sizes, 0)  # one image has no pair
        if not weights.any() or self.expected_unlike == 0:
            return 1.0
        return float(np.average(self.unlike, weights=weights)) / self.expected_unlike

    @property
    def is_low(self) -> bool:
        """Whether one of the two ratios is at most a half.

        The first detects streams of many classes: a batch of ImageNet in runs of five misses most
        classes but few pairs. The second detects those of few, where a batch often has all of them.
        """
        return min(self.relative, self.relative_unlike) <= 0.5


def _unlike(n: Any, squares: Any) -> Floats:
    """Fraction of unlike pairs among n, from the sum of squared class sizes."""
    return np.asarray((n**2 - squares) / np.maximum(n * (n - 1), 1))


def _expected_classes(sizes: Indices, counts: Indices) -> Floats:  # (T,), (C,) -> (T,)
    """Expected number of classes in a random batch drawn without replacement."""
    distinct, which = np.unique(sizes, return_inverse=True)
    return np.array([np.sum(1 - _absent(int(size), counts)) for size in distinct])[which]


def _absent(size: int, counts: Indices) -> Floats:  # (C,)
    """Probability that a class is absent: (n - n_c choose size) / (n choose size)."""
    n = int(counts.sum())
    others = n - counts
    enough = np.maximum(others, size)  # keeps the logarithms finite
    log = gammaln(enough + 1) - gammaln(enough - size + 1) - gammaln(n + 1) + gammaln(n - size + 1)
    return np.where(others >= size, np.exp(log), 0.0)
