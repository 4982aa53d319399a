"""All scores of a sweep, and how studies group them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.report.intervals import RESAMPLES, SEED, Interval, between, of_means
from caster_bench.studies.provenance import Origin
from caster_bench.studies.score import Score
from caster_bench.sweeps import STUDIES, Spec, Sweep, part_of
from caster_bench.sweeps.spec import GATE

Streams = dict[Spec, dict[str, Score]]  # stream: the methods that met it, by name


@dataclass(frozen=True)
class Results:
    """Verified: every cell of the sweep is here, with a score or refused with its reason."""

    sweep: Sweep  # may be a part
    whole: Sweep  # of this one
    scores: dict[Spec, Score]
    refused: dict[Spec, str]
    origins: dict[Spec, Origin]  # what the cells were made from and with

    def of(self, study: str) -> list[Score]:
        """Scores of one study, in the sweep's order."""
        return [self.scores[spec] for spec in self.sweep.of(study) if spec in self.scores]

    @property
    def part(self) -> str:
        """Which part of its sweep this is, in a sentence; nothing, where it is all of it."""
        whole, cells = self.whole, self.sweep.cells
        if cells == whole.cells:
            return ""
        studies = [study for study in STUDIES if self.sweep.of(study)]
        backbones = list(dict.fromkeys(spec.backbone for spec in cells))
        named = f"{'study' if len(studies) == 1 else 'studies'} {', '.join(studies)}"
        if part_of(whole, backbones=backbones).cells == cells:
            named = f"all of {', '.join(backbones)}"
        elif part_of(whole, studies).cells != cells:
            named += f" of {', '.join(backbones)}"
        return f"Of the sweep's {len(whole.cells):,} cells: {named}."

    def title(self, spec: Spec) -> str:
        """Of the backbone, those that differ by seed alone taken together."""
        return self.sweep.backbones[spec.backbone].title

    def refusals(self, study: str) -> list[str]:
        """Which backbones a study is without, and why, a line each."""
        return list(
            dict.fromkeys(
                f"{spec.backbone} on {spec.data} was refused: {self.refused[spec]}"
                for spec in self.sweep.of(study)
                if spec in self.refused
            )
        )


def names(specs: Iterable[Spec]) -> dict[Spec, str]:
    """What tables call the method of a cell: with its settings only if it met a stream twice.

    >>> mild = Spec("vit", "pets", "tent", settings=(("lr", 0.1),))
    >>> names([mild]), names([mild, Spec("vit", "pets", "tent")])[mild]
    ({Spec(...): 'tent'}, 'tent (lr 0.1)')
    """
    specs = list(specs)
    met = defaultdict(set)
    for spec in specs:
        met[spec.stream, spec.method].add(spec.settings)
    several = {method for (_, method), settings in met.items() if len(settings) > 1}
    return {spec: label(spec) if spec.method in several else spec.method for spec in specs}


def label(spec: Spec) -> str:
    """The method with its settings, lists among them in words.

    >>> label(Spec("vit", "pets", "sar", settings=(("norms", ("batch", "layer")),)))
    'sar (norms batch and layer)'
    """
    settings = tuple(
        (name, tuple((key, _words(own)) for key, own in value) if name == GATE else _words(value))
        for name, value in spec.settings
    )
    return replace(spec, settings=settings).label


def _words(value: Any) -> Any:
    return " and ".join(map(str, value)) if isinstance(value, tuple) else value


def by_stream(scores: Sequence[Score]) -> Streams:
    """Scores by the stream they share, then by method."""
    called = names(score.spec for score in scores)
    found: Streams = defaultdict(dict)
    for score in scores:
        found[score.spec.stream][called[score.spec]] = score
    return dict(found)


def matched(streams: Streams, methods: Iterable[str]) -> Streams:
    """Streams that all these methods met: a comparison on others would compare streams."""
    wanted = set(methods)
    return {stream: met for stream, met in streams.items() if wanted <= met.keys()}


@dataclass(frozen=True)
class Mean:
    """A mean over cells, and an interval around it."""

    value: float
    interval: Interval | None  # None: a single cell
    cells: int


def mean(values: Sequence[float] | NDArray[np.float64]) -> Mean:
    """Of cells that count the same.

    >>> mean([0.5, 0.7])
    Mean(value=0.6, interval=Interval(low=0.5, high=0.7), cells=2)
    """
    column = np.asarray(values, dtype=float)[:, None]
    return Mean(float(column.mean()), of_means(column)[0], len(column))


def mean_of_means(groups: Sequence[Sequence[float]]) -> Mean:
    """The mean of the means of groups, however many values each has.

    Values are drawn anew within each group, so that the interval is of this very mean. There is
    none where a group has a single value, which would count as if it could not be otherwise.

    >>> mean_of_means([[0.5, 0.5, 0.5, 0.5], [0.9, 0.9]])
    Mean(value=0.7, interval=Interval(low=0.7, high=0.7), cells=6)
    """
    held = [np.asarray(group, dtype=float) for group in groups]
    value = float(np.mean([group.mean() for group in held]))
    count = sum(map(len, held))
    if min(map(len, held)) < 2:
        return Mean(value, None, count)
    rng = np.random.default_rng(SEED)
    drawn = np.mean([rng.choice(group, (RESAMPLES, len(group))).mean(axis=1) for group in held], 0)
    return Mean(value, between(drawn), count)
