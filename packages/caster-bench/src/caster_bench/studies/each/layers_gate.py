"""The certificate of layer transport against the realised gain, and its threshold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from caster_bench.studies.agree import as_seen, is_open
from caster_bench.studies.each.certificate import Certificate, of_cells
from caster_bench.studies.each.layers_streams import (
    ALL,
    gated_pairs,
    ground_of,
    is_shuffled,
    is_spare,
    kind_of,
)
from caster_bench.studies.method_names import LAYERS
from caster_bench.studies.results import Results
from caster_bench.studies.score import Score
from caster_bench.studies.thresholds import gated_gain

TAUS = (0.9, 0.95, 0.98, 0.99, 1.0, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5)
KEEP = 0.9  # of the gain on shuffled streams: what a threshold should keep
LOSE = 0.01  # of accuracy: what no stream should lose more of


@dataclass(frozen=True)
class AtThreshold:
    """What a gate would have given at a threshold, over the streams of a backbone on data."""

    place: str
    tau: float
    accuracy: float
    gain: float
    kept: float | None  # of the gain on shuffled streams
    worst: float  # least gain of any stream
    accept: float  # share of batches
    registered: bool  # whether it is the method's own

    @property
    def good(self) -> bool:
        """Whether it keeps enough and loses little."""
        return (self.kept is None or self.kept >= KEEP) and self.worst >= -LOSE - 1e-12


@dataclass(frozen=True, eq=False)
class Gating:
    """Certificates by kind of stream, and all thresholds by backbone and data."""

    certificate: Certificate
    thresholds: tuple[AtThreshold, ...]


def measure(results: Results) -> Gating | None:
    """None where no stream met the registered method and an open gate beside it."""
    pairs = [
        (always, gated)
        for spec, (always, gated) in gated_pairs(results).items()
        if is_open(always) and not is_spare(spec)
    ]
    if not pairs:
        return None
    tau = pairs[0][1].tau  # of all: verified records have one choice of settings
    held = [as_seen(always) for always, _ in pairs]
    grounds = defaultdict(list)
    for score in held:
        grounds[ground_of(results, score.spec)].append(score)
    places = dict(grounds) if len(grounds) == 1 else {**grounds, ALL: held}
    return Gating(
        of_cells(LAYERS, held, {score.spec: kind_of(score.spec) for score in held}, tau),
        tuple(
            at_threshold(place, some, each, each == tau)
            for place, some in places.items()
            for each in sorted({*TAUS, tau})
        ),
    )


def at_threshold(
    place: str, scores: Sequence[Score], tau: float, registered: bool = False
) -> AtThreshold:
    """A gate at `tau` on updates that were always taken."""
    gains = [gated_gain(score, tau) for score in scores]
    shuffled = [at for at, score in enumerate(scores) if is_shuffled(score.spec)]
    whole = sum(scores[at].gain for at in shuffled)
    return AtThreshold(
        place,
        tau,
        accuracy=fmean(s.accuracy - s.gain + g for s, g in zip(scores, gains, strict=True)),
        gain=fmean(gains),
        kept=sum(gains[at] for at in shuffled) / whole if whole > 0 else None,
        worst=min(gains),
        accept=fmean(float((score.batches.opens <= tau).mean()) for score in scores),
        registered=registered,
    )
