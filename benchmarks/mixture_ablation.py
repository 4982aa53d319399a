"""Mixture transport without one of its parts each: accuracy on four orders of a stream.

    python benchmarks/mixture_ablation.py MODEL SOURCE.npz TARGET.npz --preprocessing P.toml

MODEL is a torch model that `caster --model` takes, or a checkpoint of `caster bench train`; the
.npz files hold `images` (uint8) and `labels`, and published data can be named instead
(cifar10:train). SOURCE should be images that the network was not trained on; all are fitted, or
`--fit` of them. TARGET is met clean and under the four spare corruptions at severity 5, shuffled,
in runs of one class, sorted by class and long-tailed (100 : 1), in batches of 64; `--sizes` names
other sizes. Columns: accuracy in percent if every batch is accepted (ungated) and behind the
certificate (gated), and the share of accepted batches, as means over the conditions. The last table
is the mean over the streams.

`smoothed frozen` estimates the classes of the stream as mixture transport does, but from the frozen
model's predictions, and aligns nothing. Two variants show what the size of a state costs: moments
of classes at the deep half of the sites only, as with many classes, and moments of classes in
float32 instead of the stored float16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import caster
from caster.adapt.layer_passes import PLAIN, LayerSettings
from caster.adapt.layer_transport import LayerTransport
from caster.core.arrays import to_numpy
from caster.core.channels import ChannelMoments, Site
from caster.core.class_moments import ClassChannelMoments
from caster.core.label_chain import LabelChain
from caster.core.stream_labels import StreamLabels
from caster.io.labels import encode
from caster.models.activation_statistics import ActivationStatistics
from caster.models.heads import Columns
from caster.models.protocol import Outputs
from caster_bench.data.corruptions import corrupt
from caster_bench.data.streams import StreamSettings, make_stream
from caster_bench.methods.protocol import Frozen, OnFeatures
from caster_bench.methods.smoothed_frozen import SmoothedFrozen
from caster_bench.methods.source import Source
from measure import machine
from small_source_layers import BATCH, labelled_batches, options, read, wrapped

SPARE = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
SEVERITY = 5
STREAMS = {
    "shuffled": StreamSettings(),
    "runs": StreamSettings(order="runs"),
    "sorted": StreamSettings(order="by-class"),
    "long-tailed": StreamSettings(order="long-tailed", imbalance=100.0),
}
WIDTHS = (6, 13, 26, 9, 9, 10)
HEADING = ("B", "stream", "variant", "ungated", "gated", "accepted")

Figures = NDArray[np.float64]  # (3,): ungated, gated, accepted
Layers = Mapping[Site, ChannelMoments]
Stream = list[tuple[NDArray[Any], Outputs, NDArray[np.int64]]]
Labelled = Iterable[tuple[NDArray[Any], NDArray[Any]]]


class Shuffled(LabelChain):
    """Labels that are never taken for correlated."""

    is_evident = False


class SourcePrior(StreamLabels):
    """Labels whose prior is the source's if they are shuffled."""

    @property
    def _believed(self) -> NDArray[np.float64]:  # type: ignore[override]
        return self.chain.prior


class TrueMixture(StreamLabels):
    """Labels that know the mixture of the current batch, which decides only what to align with."""

    truth: ClassVar[NDArray[np.float64]]

    @property
    def mixture(self) -> NDArray[np.float64]:
        """The true mixture."""
        return self.truth


def never_correlated(labels: StreamLabels) -> StreamLabels:
    return replace(labels, chain=Shuffled(**vars(labels.chain)))


def source_prior(labels: StreamLabels) -> StreamLabels:
    return SourcePrior(labels.chain, labels.recent)


def true_mixture(labels: StreamLabels) -> StreamLabels:
    return TrueMixture(labels.chain, labels.recent)


DEFAULT = LayerSettings(every=1)
VARIANTS = {
    "plain: half depth": (PLAIN, None),
    "whole depth, no classes": (replace(DEFAULT, mixture=False, maps="diagonal"), None),
    "mixture transport": (DEFAULT, None),
    "- full maps": (replace(DEFAULT, maps="diagonal"), None),
    "- memory: 64": (replace(DEFAULT, memory=64), None),
    "- memory: 512": (replace(DEFAULT, memory=512), None),
    "- depth: half": (replace(DEFAULT, depth=0.5), None),
    "- chain": (DEFAULT, never_correlated),
    "- believed prior": (DEFAULT, source_prior),
    "+ true mixture": (DEFAULT, true_mixture),
}


def classes_at_deep_half(layers: Layers) -> Layers:
    shallow = [*layers][: len(layers) // 2]
    return {**layers, **{site: replace(layers[site], classes=None) for site in shallow}}


def classes_in_float32(adapter: caster.Adapter, source: Labelled) -> Layers:
    """The adapter's layers with moments of classes that are measured again, and not in float16."""
    statistics = ActivationStatistics(adapter.model)
    for images, labels in source:
        statistics(images, encode(labels, adapter.classes))
    layers = dict(adapter.state.layers or {})
    for site, found in statistics.sums.items():
        if found.classes is not None:
            parts = found.classes.counts, found.classes.means, found.classes.variances
            single = (to_numpy(part).astype(np.float32).astype(np.float64) for part in parts)
            layers[site] = replace(layers[site], classes=ClassChannelMoments(*single))
    return layers


def transports(adapter: caster.Adapter, source: Labelled) -> Iterator[tuple[str, LayerTransport]]:
    """Every variant over the adapter's model and state, which was fitted to this source."""
    state, model = adapter.state, adapter.model
    columns, ends = Columns(state.head), state.input_range
    for name, (settings, changed) in VARIANTS.items():
        own = LayerTransport(model, state.layers, columns, ends, settings)
        if changed is not None and own._start is not None:
            labels = changed(own._start.labels)
            own._start = replace(own._start, labels=labels)
        yield name, own.new_stream()
    deep = classes_at_deep_half(state.layers or {})
    yield "- classes: deep half", LayerTransport(model, deep, columns, ends)
    single = classes_in_float32(adapter, source)
    yield "+ classes in float32", LayerTransport(model, single, columns, ends)


def accuracy(scores: Any, truth: NDArray[np.int64]) -> float:
    return float(np.sum(to_numpy(scores).argmax(axis=1) == truth))


def alone(method: OnFeatures, met: Stream) -> Figures:
    """Answer a stream without a certificate; accuracies in percent."""
    method.reset()
    right = sum(accuracy(method.answer(outputs).logits, truth) for _, outputs, truth in met)
    top1 = 100 * right / sum(len(truth) for _, _, truth in met)
    return np.array([top1, top1, 0.0])


def figures(transport: LayerTransport, met: Stream) -> Figures:
    """Answer a stream: accuracies ungated and gated, and the share accepted, in percent."""
    found = np.zeros(3)
    transport.reset()
    for batch, frozen, truth in met:
        C = len(transport.columns(frozen.logits)[0])
        TrueMixture.truth = np.bincount(truth, minlength=C) / len(truth)
        answer = transport(batch, frozen)
        adapted = answer.scores if answer.adapted is None else answer.adapted
        found += accuracy(adapted, truth), accuracy(answer.scores, truth), 0
        found[2] += answer.verdict.accepted * len(truth)
    return 100 * found / sum(len(truth) for _, _, truth in met)


def conditions(images: NDArray[Any]) -> Iterator[NDArray[Any]]:
    yield images
    for name in SPARE:
        yield np.stack(list(corrupt(images, name, SEVERITY, seed=0)))


def row(*cells: Any) -> None:
    shown = (f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells)
    print("".join(f"{c:>{w}}" for c, w in zip(shown, WIDTHS, strict=True)), flush=True)


def main() -> None:
    given = options(__doc__, limit=2048, sizes=[BATCH])
    print(machine())
    model = wrapped(given)
    assert model.preprocessing is not None
    source, labels = read(given.source, given.fit)
    labelled = labelled_batches(model, source, labels, np.arange(len(labels)))
    adapter = caster.fit(model, labelled)
    target, truth = read(given.target, given.limit)
    truth = encode(truth, adapter.classes)
    shifted = list(conditions(target))
    variants = dict(transports(adapter, labelled))
    own = Source(state=adapter.state)
    baselines = {"frozen": Frozen(model, own), "smoothed frozen": SmoothedFrozen(model, own)}
    rows = (*baselines, *variants)
    sums: dict[tuple[int, str, str], Figures] = {}
    row(*HEADING)
    for size in given.sizes:
        for stream, settings in STREAMS.items():
            plan = list(make_stream(truth, replace(settings, batch_size=size)))
            for images in shifted:
                met = []
                for chosen in (batch.rows for batch in plan):
                    prepared = model.preprocessing.batch(list(images[chosen]))
                    met.append((prepared, model(prepared), truth[chosen]))
                found = {name: alone(method, met) for name, method in baselines.items()}
                found |= {name: figures(transport, met) for name, transport in variants.items()}
                for name, values in found.items():
                    key = size, stream, name
                    sums[key] = sums.get(key, np.zeros(3)) + values / len(shifted)
            for name in rows:
                row(size, stream, name, *map(float, sums[size, stream, name]))
    for size in given.sizes:
        for name in rows:
            mean = np.mean([sums[size, stream, name] for stream in STREAMS], axis=0)
            row(size, "mean", name, *map(float, mean))


if __name__ == "__main__":
    main()
