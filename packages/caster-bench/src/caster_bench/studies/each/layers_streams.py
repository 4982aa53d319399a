"""Layer transport never, always and behind its certificate, on streams of every kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from caster_bench.studies.agree import is_open
from caster_bench.studies.each.gate import Gate, Policies, policies
from caster_bench.studies.method_names import LAYERS, LAYERS_ALWAYS
from caster_bench.studies.naming import order_of, titles
from caster_bench.studies.results import Mean, Results, mean
from caster_bench.studies.score import Score
from caster_bench.sweeps.names import SPARE
from caster_bench.sweeps.spec import Spec

Pair = tuple[Score, Score]  # of one stream: ungated, gated
ALL = "all"


@dataclass(frozen=True)
class Row:
    """Streams of one backbone, data, order and batch size."""

    policies: Policies
    size: int
    kept: float | None
    worst: float  # least gain of any stream, in accuracy


@dataclass(frozen=True)
class Whole:
    """All streams of a backbone on data, or of all."""

    place: str
    streams: int
    always: Mean  # gains
    gated: Mean
    kept: float | None  # of the gain on shuffled streams
    worst: float
    where: str  # the stream of it
    worst_always: float


@dataclass(frozen=True)
class OnStreams:
    """By backbone and kind of stream, and taken together."""

    rows: tuple[Row, ...]
    wholes: tuple[Whole, ...]
    kinds: Gate  # over backbones, to be drawn


def measure(results: Results) -> OnStreams | None:
    """None where no stream met layer transport both behind its certificate and without."""
    pairs = gated_pairs(results)
    if not pairs:
        return None
    rows, kinds, grounds = defaultdict(list), defaultdict(list), defaultdict(list)
    for spec, pair in pairs.items():
        rows[ground_of(results, spec), kind_of(spec), spec.batch_size].append(pair)
        kinds[kind_of(spec), spec.batch_size].append(pair)
        if not is_spare(spec):
            grounds[ground_of(results, spec)].append(pair)
    wholes = [_whole(place, held) for place, held in grounds.items()]
    every = [pair for held in grounds.values() for pair in held]
    return OnStreams(
        rows=tuple(
            Row(policies(LAYERS, ground, kind, None, held), size, kept(held), worst(held)[0])
            for (ground, kind, size), held in sorted(rows.items(), key=lambda item: item[0])
        ),
        wholes=(*wholes, *((_whole(ALL, every),) if len(wholes) > 1 else ())),
        kinds=Gate(
            rows=tuple(
                policies(LAYERS, kind, f"batches of {size}", None, held)
                for (kind, size), held in sorted(kinds.items())
            ),
            pooled=(policies(LAYERS, ALL, "pooled", None, every),) if every else (),
        ),
    )


def gated_pairs(results: Results) -> dict[Spec, Pair]:
    """Layer transport as it is registered, beside the same update always taken.

    That is the cell without a gate where there is one, which has the ratios too, and else the
    ungated method.
    """
    held = [score for score in results.of("layers") if not score.spec.alone]
    plain = {(s.spec.method, s.spec.stream): s for s in held if not s.spec.settings}
    opens = {s.spec.stream: s for s in held if is_open(s) and _only_gated(s)}
    found = {}
    for (method, stream), gated in plain.items():
        always = opens.get(stream, plain.get((LAYERS_ALWAYS, stream)))
        if method == LAYERS and always is not None:
            found[gated.spec] = always, gated
    return found


def _only_gated(score: Score) -> bool:
    """Whether nothing but its gate is set."""
    return {name for name, _ in score.spec.settings} <= {"gated", "every"}


def kind_of(spec: Spec) -> str:
    """The order of a stream, and what is to be known of its pictures."""
    if not spec.conditions:
        return f"clean, {order_of(spec)}"
    return f"spare, {order_of(spec)}" if is_spare(spec) else order_of(spec)


def is_spare(spec: Spec) -> bool:
    """Whether all its corruptions are of those that constants are chosen on.

    >>> is_spare(Spec("r", "d", "frozen", conditions=(("spatter", 5),)))
    True
    """
    return bool(spec.conditions) and all(name in SPARE for name, _ in spec.conditions)


def ground_of(results: Results, spec: Spec) -> str:
    """A backbone on data, in words."""
    return f"{results.title(spec)} on {titles(results.sweep)[spec.data]}"


def is_shuffled(spec: Spec) -> bool:
    """Whether a corrupted stream comes in an order without meaning, under one condition."""
    return spec.order == "shuffled" and spec.schedule == "each" and bool(spec.conditions)


def kept(pairs: Iterable[Pair]) -> float | None:
    """Gain of the gated as a share of the ungated, over shuffled streams; None without a gain."""
    held = [pair for pair in pairs if is_shuffled(pair[1].spec)]
    whole = sum(always.gain for always, _ in held)
    return sum(gated.gain for _, gated in held) / whole if whole > 0 else None


def worst(pairs: Sequence[Pair]) -> tuple[float, str]:
    """The least gain of any stream, and which it is."""
    _, gated = min(pairs, key=lambda pair: pair[1].gain)
    return gated.gain, f"{gated.spec.condition}, {order_of(gated.spec)} {gated.spec.batch_size}"


def _whole(place: str, pairs: Sequence[Pair]) -> Whole:
    least, where = worst(pairs)
    return Whole(
        place,
        len(pairs),
        always=mean([always.gain for always, _ in pairs]),
        gated=mean([gated.gain for _, gated in pairs]),
        kept=kept(pairs),
        worst=least,
        where=where,
        worst_always=min(always.gain for always, _ in pairs),
    )
