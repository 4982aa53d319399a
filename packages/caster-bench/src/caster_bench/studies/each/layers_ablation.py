"""Layer transport with other settings than the registered ones, on the same streams."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean

from caster_bench.studies.agree import is_open
from caster_bench.studies.each.layers_accuracy import OWN
from caster_bench.studies.each.layers_streams import ground_of, kind_of
from caster_bench.studies.results import Mean, Results, label, mean


@dataclass(frozen=True)
class Row:
    """One choice of settings on the streams of one kind."""

    method: str  # with its settings
    place: str
    kind: str  # of stream
    accuracy: Mean
    registered: float  # accuracy of the method as registered
    over: Mean  # what the settings add to that
    accept: float
    worst: float  # least gain over the frozen model of any stream


def measure(results: Results) -> tuple[Row, ...]:
    """Empty where no stream met both a method of registered and of other settings."""
    scores = {s.spec: s for s in results.of("layers") if s.spec.method in OWN and not s.spec.alone}
    plain = {(s.method, s.stream): scores[s] for s in scores if not s.settings}
    groups = defaultdict(list)
    for spec, score in scores.items():
        beside = plain.get((spec.method, spec.stream))
        if spec.settings and not is_open(score) and beside is not None:
            kind = f"{kind_of(spec)}, batches of {spec.batch_size}"
            groups[label(spec), ground_of(results, spec), kind].append((score, beside))
    return tuple(
        Row(
            *key,
            accuracy=mean([score.accuracy for score, _ in held]),
            registered=fmean(beside.accuracy for _, beside in held),
            over=mean([score.accuracy - beside.accuracy for score, beside in held]),
            accept=fmean(score.accept for score, _ in held),
            worst=min(score.gain for score, _ in held),
        )
        for key, held in groups.items()
    )
