"""A stream: batches of rows, each with the condition that its images are under."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from caster.errors import CasterError
from caster.io.labels import Labels, as_labels, encode, unique_labels
from caster.io.traits import is_by_class
from caster_bench.data.streams.conditions import Condition, Leg, legs_of
from caster_bench.data.streams.diversity import Diversity, diversity_of
from caster_bench.data.streams.orders import Indices, by_class, dirichlet, generator, long_tail
from caster_bench.data.streams.settings import StreamSettings


@dataclass(frozen=True, eq=False)
class Batch:
    """Which images come together, and what they are under."""

    index: int  # in the stream, from 0
    rows: Indices  # (B,) which images
    condition: Condition | tuple[Condition, ...] | None  # of all rows, of every row, or clean
    starts_segment: bool  # whether a method is to be reset before it

    def parts(self) -> list[tuple[Condition | None, Indices]]:
        """Every condition in the batch, with the places in `rows` of what is under it.

        >>> fog, snow = Condition("fog", 1), Condition("snow", 1)
        >>> Batch(0, np.array([7, 3, 5]), (fog, snow, fog), True).parts()[0]
        (Condition(corruption='fog', severity=1), array([0, 2]))
        """
        if not isinstance(self.condition, tuple):
            return [(self.condition, np.arange(len(self.rows)))]
        places: dict[Condition, list[int]] = {}
        for place, condition in enumerate(self.condition):
            places.setdefault(condition, []).append(place)
        return [(condition, np.array(places[condition])) for condition in sorted(places)]


@dataclass(frozen=True, eq=False)
class Stream:
    """A plan that labels and settings decide, and nothing else: it holds no image.

    A segment is what a method goes through without a reset: all images under one condition in
    the schedule "each", and the whole stream in the others. The rows of a condition do not depend
    on the other conditions, so that a segment of "each" can be run on its own.
    """

    settings: StreamSettings
    classes: Labels  # (C,)
    codes: Indices  # (N,) the class of every image, as a place in `classes`
    kept: Indices  # (M,) rows that are in the stream: all but those a long tail leaves out
    legs: tuple[Leg, ...]

    def __len__(self) -> int:
        return len(self.legs) * len(self._sizes)

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """The batches from number `start` on: the same as those a whole run has from there."""
        if not 0 <= start <= len(self):
            raise CasterError(f"the stream has {len(self)} batches: it cannot start at {start}")
        return self._batches(start)

    def _batches(self, start: int) -> Iterator[Batch]:
        ends = np.cumsum(self._sizes)
        first, skipped = divmod(start, len(ends))
        for number, leg in enumerate(self.legs[first:], first):
            rows, which = self._arranged(leg)
            for i in range(skipped, len(ends)):
                part = slice(ends[i] - self._sizes[i], ends[i])
                condition: Condition | tuple[Condition, ...] | None
                if len(leg.conditions) > 1:
                    condition = tuple(leg.conditions[c] for c in which[part])
                else:
                    condition = leg.conditions[0] if leg.conditions else None
                yield Batch(
                    number * len(ends) + i, rows[part], condition, leg.starts_segment and i == 0
                )
            skipped = 0

    @cached_property
    def diversity(self) -> Diversity:
        """How many classes every batch holds, and would hold at random."""
        counts = np.bincount(self.codes[self.kept]) * self._times
        return diversity_of(self._classes_met, np.tile(self._sizes, len(self.legs)), counts)

    @cached_property
    def is_class_ordered(self) -> bool:
        """Whether batches hold few classes because of the order the images come in.

        They do where two images of a batch differ in class at most half as often as at random, or
        where it holds at most half of the classes beyond the first. Batches of one image are
        judged by their neighbours, as a data set is. No order is to blame where there is one class,
        or one batch.
        """
        if len(self.classes) == 1 or len(self._sizes) == 1:
            return False
        if self.settings.batch_size == 1:
            return is_by_class(self._classes_met)
        return self.diversity.is_low

    @property
    def _classes_met(self) -> Indices:
        n = int(self._sizes.sum())
        return np.concatenate([self.codes[self._arranged(leg)[0][:n]] for leg in self.legs])

    @property
    def _times(self) -> int:
        """How often a leg goes through the images."""
        return max(1, len(self.legs[0].conditions))

    @cached_property
    def _sizes(self) -> Indices:
        """Of the batches of a leg; all legs are of one length."""
        size = self.settings.batch_size
        full, rest = divmod(len(self.kept) * self._times, size)
        sizes = [size] * full + [rest] * (rest > 0 and self.settings.last == "keep")
        return np.array(sizes, dtype=np.int64)

    def _arranged(self, leg: Leg) -> tuple[Indices, Indices]:  # (L,), (L,)
        """Rows in order, and which of the leg's conditions each is under."""
        purpose = [astuple(condition) for condition in leg.conditions]
        rng = generator(self.settings.seed, "order", purpose, leg.occurrence)
        rows = np.tile(self.kept, self._times)
        # As often through the images as there are conditions, and no two times under the same.
        turns = np.tile(np.arange(self._times), (len(self.kept), 1))
        which = rng.permuted(turns, axis=1).T.ravel() if self._times > 1 else turns.ravel()
        order = self._order(self.codes[rows], rng)
        rows, which = rows[order], which[order]
        rows.setflags(write=False)
        return rows, which

    def _order(self, codes: Indices, rng: np.random.Generator) -> Indices:
        match self.settings.order:
            case "file":
                return np.arange(len(codes))
            case "by-class":
                return by_class(codes, rng)
            case "dirichlet":
                assert self.settings.concentration is not None  # settings see to it
                return dirichlet(codes, rng, self.settings.concentration, self.settings.slots)
            case _:  # a long tail is one of what is kept
                return rng.permutation(len(codes))


def make_stream(labels: Any, settings: StreamSettings | None = None) -> Stream:
    """The stream of images with these labels (N,), of any hashable kind.

    A "file" order that brings the images class by class is refused.

    >>> stream = make_stream(["cat", "dog"] * 50, StreamSettings(batch_size=30))
    >>> len(stream), [len(batch.rows) for batch in stream], stream.diversity.classes
    (4, [30, 30, 30, 10], array([2, 2, 2, 2]))
    """
    settings = settings or StreamSettings()
    labels = as_labels(labels)
    if len(labels) == 0:
        raise CasterError("a stream needs an image or more, and there is no label")
    classes = unique_labels(labels)
    codes = encode(labels, classes)
    kept = np.arange(len(codes))
    if settings.imbalance is not None:
        kept = long_tail(codes, generator(settings.seed, "long tail"), settings.imbalance)
    legs = legs_of(settings.conditions, settings.schedule)
    stream = Stream(settings, classes, codes, kept, legs)
    if len(stream) == 0:
        raise CasterError(
            f"last='drop' drops all {len(kept)} images, too few for a batch of "
            f"{settings.batch_size}: say last='keep' or a smaller batch_size"
        )
    if settings.order == "file" and stream.is_class_ordered:
        found = stream.diversity
        raise CasterError(
            f"in file order the images come class by class (a batch of {settings.batch_size} "
            f"holds {found.classes.mean():.1f} classes, at random {found.expected.mean():.1f}): "
            "say order='shuffled', or order='by-class' to mean it"
        )
    return stream
