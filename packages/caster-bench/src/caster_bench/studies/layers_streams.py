"""Layer and mixture transport never, always and gated by a certificate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from caster_bench.studies.gate_policies import Gate, Policies, policies
from caster_bench.studies.naming import ALIGNING, LAYERS, MIXTURE, names, order_of, titles
from caster_bench.studies.results import Mean, Results, mean, shown
from caster_bench.studies.score import Score
from caster_bench.studies.tables import Table, points
from caster_bench.sweeps.spec import SPARE, Spec

Pair = tuple[Score, Score]  # of one stream: ungated, gated
ALL = "all"
PREFIXES = {LAYERS: "layers", MIXTURE: "mixture"}  # of tables and figures


@dataclass(frozen=True)
class StreamRow:
    """Streams of one backbone, data set, order and batch size."""

    policies: Policies
    size: int
    kept: float | None
    worst: float  # smallest accuracy gain on any stream


@dataclass(frozen=True)
class Whole:
    """All streams of a backbone on a data set, or of all."""

    setting: str
    streams: int
    always: Mean  # gains
    gated: Mean
    kept: float | None  # share of the gain on shuffled streams
    worst: float
    where: str  # that stream
    worst_always: float


@dataclass(frozen=True)
class OnStreams:
    """Results of one method by backbone and kind of stream, and overall."""

    method: str
    rows: tuple[StreamRow, ...]
    wholes: tuple[Whole, ...]
    kinds: Gate  # over backbones, for the figure


def measure_streams(results: Results, method: str) -> OnStreams | None:
    """Compare a method with and without its gate; None if no stream has both."""
    pairs = gated_pairs(results, method)
    if not pairs:
        return None
    rows, kinds, settings = defaultdict(list), defaultdict(list), defaultdict(list)
    for spec, pair in pairs.items():
        rows[setting_of(results, spec), kind_of(spec), spec.batch_size].append(pair)
        kinds[kind_of(spec), spec.batch_size].append(pair)
        if not is_spare(spec):
            settings[setting_of(results, spec)].append(pair)
    wholes = [_whole(setting, group) for setting, group in settings.items()]
    every = [pair for group in settings.values() for pair in group]
    return OnStreams(
        method,
        rows=tuple(
            StreamRow(
                policies(method, setting, kind, None, group), size, kept(group), worst(group)[0]
            )
            for (setting, kind, size), group in sorted(rows.items(), key=lambda item: item[0])
        ),
        wholes=(*wholes, *((_whole(ALL, every),) if len(wholes) > 1 else ())),
        kinds=Gate(
            rows=tuple(
                policies(method, kind, f"batches of {size}", None, group)
                for (kind, size), group in sorted(kinds.items())
            ),
            pooled=(policies(method, ALL, "pooled", None, every),) if every else (),
        ),
    )


def gated_pairs(results: Results, method: str) -> dict[Spec, Pair]:
    """Pair a method with its default settings and the same update always applied."""
    group = [s for s in results.of("layers") if not (s.spec.alone or s.spec.settings)]
    plain = {(score.spec.method, score.spec.stream): score for score in group}
    return {
        gated.spec: (plain[ALIGNING[method], stream], gated)
        for (own, stream), gated in plain.items()
        if own == method and (ALIGNING[method], stream) in plain
    }


def called(method: str) -> str:
    """The method in a sentence.

    >>> called("layer-transport")
    'layer transport'
    """
    return method.replace("-", " ")


def kind_of(spec: Spec) -> str:
    """Describe the order of a stream, and whether it is clean or spare."""
    if not spec.conditions:
        return f"clean, {order_of(spec)}"
    return f"spare, {order_of(spec)}" if is_spare(spec) else order_of(spec)


def is_spare(spec: Spec) -> bool:
    """Whether all corruptions are spare ones, on which constants are chosen.

    >>> is_spare(Spec("r", "d", "frozen", conditions=(("spatter", 5),)))
    True
    """
    return bool(spec.conditions) and all(name in SPARE for name, _ in spec.conditions)


def setting_of(results: Results, spec: Spec) -> str:
    """Label a backbone on a data set."""
    return f"{results.title(spec)} on {titles(results.sweep)[spec.data]}"


def is_shuffled(spec: Spec) -> bool:
    """Whether a corrupted stream is shuffled and has one condition."""
    return spec.order == "shuffled" and spec.schedule == "each" and bool(spec.conditions)


def kept(pairs: Iterable[Pair]) -> float | None:
    """Gated share of the gain on shuffled streams of one condition; None without a gain."""
    group = [pair for pair in pairs if is_shuffled(pair[1].spec)]
    return _share((gated.gain for _, gated in group), (always.gain for always, _ in group))


def _share(gated: Iterable[float], ungated: Iterable[float]) -> float | None:
    """Sum of gated gains as a share of the ungated ones; None if these are no gain."""
    whole = sum(ungated)
    return sum(gated) / whole if whole > 0 else None


def worst(pairs: Sequence[Pair]) -> tuple[float, str]:
    """Smallest gain on any stream, and that stream."""
    _, gated = min(pairs, key=lambda pair: pair[1].gain)
    return gated.gain, f"{gated.spec.condition}, {order_of(gated.spec)} {gated.spec.batch_size}"


def _whole(setting: str, pairs: Sequence[Pair]) -> Whole:
    least, where = worst(pairs)
    return Whole(
        setting,
        len(pairs),
        always=mean([always.gain for always, _ in pairs]),
        gated=mean([gated.gain for _, gated in pairs]),
        kept=kept(pairs),
        worst=least,
        where=where,
        worst_always=min(always.gain for always, _ in pairs),
    )


def stream_tables(found: OnStreams) -> tuple[Table, ...]:
    """Accuracy by kind of stream, and overall shares kept and losses."""
    prefix = PREFIXES[found.method]
    return (
        Table.of(
            f"{prefix}-streams",
            f"Top-1 accuracy in percent of the frozen model, of {called(found.method)} ungated and "
            "gated by its certificate. Worst loss: largest loss of any stream to the frozen model, "
            "in points. Kept: share of the ungated gain.",
            "backbone | stream | B:d | streams:d | frozen:.2f | ungated:.2f | gated:.2f | "
            "gated, 95 %:.2f | accepted, %:.1f | worst loss:.2f | kept, %:.0f",
            (
                (
                    *(row.policies.backbone, row.policies.setting, row.size),
                    *(row.policies.gated.cells, points(row.policies.never.value)),
                    *(points(row.policies.always.value), *shown(row.policies.gated)),
                    *(points(row.policies.accept), points(_loss(row.worst)), points(row.kept)),
                )
                for row in found.rows
            ),
        ),
        Table.of(
            f"{prefix}-kept",
            "Gains over the frozen model in points on all streams, the share of the gain on "
            "shuffled streams of a single corruption that the certificate keeps, and the largest "
            "loss of any stream.",
            "backbone | streams:d | ungated:+.2f | ungated, 95 %:+.2f | gated:+.2f | "
            "gated, 95 %:+.2f | kept, %:.0f | worst loss, ungated:.2f | worst loss, gated:.2f | "
            "where",
            (
                (
                    *(whole.setting, whole.streams, *shown(whole.always), *shown(whole.gated)),
                    *(points(whole.kept), points(_loss(whole.worst_always))),
                    *(points(_loss(whole.worst)), whole.where if whole.worst < 0 else None),
                )
                for whole in found.wholes
            ),
        ),
    )


@dataclass(frozen=True)
class MethodRow:
    """A method on the streams of one backbone, data set, order and batch size."""

    setting: str
    kind: str
    size: int
    method: str
    accuracy: Mean
    gain: Mean  # over the frozen model
    worst: float  # smallest gain on any stream
    accept: float
    kept: float | None  # share of the ungated gain; None for an ungated method or without a gain


def measure_methods(results: Results) -> tuple[MethodRow, ...]:
    """Compare all methods on the streams of mixture transport, by kind of stream.

    Only methods that ran on all streams of a kind are compared there.
    """
    scores = [s for s in results.of("layers") if not s.spec.alone and not is_other(s.spec)]
    wanted = {score.spec.stream for score in scores if score.spec.method == MIXTURE}
    called_as = names(score.spec for score in scores)
    kinds: dict[tuple[str, str, int], dict[str, dict[Spec, Score]]] = {}
    for score in (score for score in scores if score.spec.stream in wanted):
        spec = score.spec
        kind = setting_of(results, spec), kind_of(spec), spec.batch_size
        kinds.setdefault(kind, {}).setdefault(called_as[spec], {})[spec.stream] = score
    return tuple(
        MethodRow(
            *kind,
            method,
            accuracy=mean([score.accuracy for score in own.values()]),
            gain=mean([score.gain for score in own.values()]),
            worst=min(score.gain for score in own.values()),
            accept=fmean(score.accept for score in own.values()),
            kept=_share(
                (score.gain for score in own.values()),
                (score.gain for score in methods.get(ALIGNING.get(method, ""), {}).values()),
            ),
        )
        for kind, methods in sorted(kinds.items(), key=lambda item: item[0])
        for method, own in methods.items()
        if own.keys() == methods[MIXTURE].keys()
    )


def is_other(spec: Spec) -> bool:
    """Whether a cell aligns layers with other settings than the registered ones."""
    return bool(spec.settings) and spec.method in (*ALIGNING, *ALIGNING.values())


def method_table(found: Sequence[MethodRow]) -> Table:
    """Every method on every kind of stream."""
    return Table.of(
        "layers-methods",
        "All methods on the streams of mixture transport: top-1 accuracy in percent, mean gain "
        "over the frozen model and largest loss of any stream to it, in points. Kept: gain as a "
        "share of that of the same method without its gate.",
        "backbone | stream | B:d | method | streams:d | top-1:.2f | gain:+.2f | gain, 95 %:+.2f | "
        "worst loss:.2f | accepted, %:.1f | kept, %:.0f",
        (
            (
                *(row.setting, row.kind, row.size, row.method, row.accuracy.cells),
                *(points(row.accuracy.value), *shown(row.gain), points(_loss(row.worst))),
                *(points(row.accept), points(row.kept)),
            )
            for row in found
        ),
    )


def _loss(gain: float) -> float:
    """Loss of accuracy; zero for a gain."""
    return max(0.0, -gain)
