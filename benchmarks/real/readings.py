"""Which reading of the paper gives its figures: what the transport gains, and from which features.

    python benchmarks/real/readings.py [--frozen] CHECKPOINT DATA CONDITION ...

CHECKPOINT is a file of `caster bench train` or `published.py`, DATA a set such as cifar10 (below
$CASTER_DATA) or what `split.py` was given as OUT, a CONDITION a corruption and its severity, as
fog:5. 512 test images of each, shuffled. A row is a setting of the transport, or its source cut
to a share of the images: the accuracy of Source-GDA, which does not transport; then that of the
transport always taken, behind its gate, and how many batches that accepts: of the frozen features;
and, where there are BatchNorms and `--frozen` is not said, of those that the network gives when
these go by the batch, with the source's statistics of frozen features and of such ones, and when
the batch's statistics at all of them are carried to those of source images. Before them T3A, as
published and with class sums that are not scaled to length 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from depth import chosen
from numpy.typing import NDArray

from caster import Caster
from caster.adapt.source import Source
from caster.core.arrays import to_numpy
from caster.models.protocol import Outputs
from caster.models.sites import batchnorm_sites
from caster.models.torch import TorchModel
from caster_bench.data.corruptions import corrupt
from caster_bench.engine.train.checkpoint import model_of
from caster_bench.methods.registry import create

FIT, FIT_EACH = 3000, 100  # source images at least, in all and of a class
IMAGES, BATCH = 512, 64
SETTINGS: tuple[dict[str, float], ...] = (
    {},
    *({"lam": value} for value in (1e-4, 1e-2, 100.0)),
    *({"beta": value} for value in (1e-4, 1e-2, 100.0)),
    *({"lam": value, "beta": value} for value in (1e-4, 1e-2, 100.0)),
    {"k_max": 4},
    {"k_max": 32},
    {"k_max": 512},
    {"batch": 128},
    {"batch": 256},
    {"source": 0.5},
)
NOT_OURS = ("batch", "source")  # settings that are none of the estimator's
Pass = Callable[[Any], tuple[NDArray[Any], NDArray[Any]]]  # images: features, logits


@dataclass(frozen=True)
class Seen:
    """What a network gave for images."""

    features: NDArray[Any]  # (n, d)
    logits: NDArray[Any]  # (n, C)
    codes: NDArray[np.int64]  # (n,)

    @classmethod
    def through(cls, run: Pass, pixels: Any, codes: Any, prepare: Any) -> Seen:
        """Images in batches."""
        parts = [run(prepare(pixels[n : n + BATCH])) for n in range(0, len(pixels), BATCH)]
        features, logits = (np.concatenate(part) for part in zip(*parts, strict=True))
        return cls(features, logits, codes)

    @property
    def right(self) -> float:
        """Accuracy of the head."""
        return float((self.logits.argmax(axis=1) == self.codes).mean())


def passes(model: TorchModel, known: list[tuple[Any, Any]], frozen_alone: bool) -> dict[str, Pass]:
    """Ways through the network: as it is; with BatchNorms that go by the batch; and carried.

    By the batch they give what they were told to in training, mean and deviation of the images
    it was made of; carried, what they give for the plain source images in `known`.
    """

    def frozen(images: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        outputs = model(images)
        return to_numpy(outputs.features), to_numpy(outputs.logits)

    found: dict[str, Pass] = {"frozen": frozen}
    if batchnorm_sites(model.module) and not frozen_alone:
        found["by batch"] = _aligned(model, Source())
        found["carried"] = _aligned(model, Source(batches=known))
    return found


def _aligned(model: TorchModel, source: Source) -> Pass:
    settings = {"prior": 0.0, "memory": 0, "depth": 1.0}
    method: Any = create("layer-transport-ungated", model, source, **settings)

    def run(images: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        outputs = method._alignment(images)
        return to_numpy(outputs.features), to_numpy(outputs.logits)

    return run


def fitted(source: Seen, given: dict[str, float]) -> Caster:
    """The estimator, of all source images or of a share of every class."""
    settings: dict[str, Any] = {name: v for name, v in given.items() if name not in NOT_OURS}
    codes, share = source.codes, given.get("source", 1.0)
    every = (np.flatnonzero(codes == code) for code in np.unique(codes))
    rows = np.concatenate([row[: max(2, round(share * len(row)))] for row in every])
    return Caster(**settings).fit(source.features[rows], codes[rows])


def answered(source: Seen, targets: list[Seen], given: dict[str, float]) -> tuple[float, ...]:
    """Accuracy of the transport always taken and behind its gate, and the share it accepts."""
    size = int(given.get("batch", BATCH))
    clf = fitted(source, given)
    always, gated, accepted = [], [], []
    for seen in targets:
        for n in range(0, len(seen.codes), size):
            part = slice(n, n + size)
            found = clf.adapt(seen.features[part], seen.logits[part])
            answers = found.transported.argmax(axis=1), np.asarray(found.predictions)
            for kept, answer in zip((always, gated), answers, strict=True):
                kept.append(float((answer == seen.codes[part]).mean()))
            accepted.append(found.verdict.accepted)
    return tuple(float(np.mean(values)) for values in (always, gated, accepted))


def source_gda(source: Seen, targets: list[Seen], given: dict[str, float]) -> float:
    """Accuracy without transport."""
    clf = fitted(source, given)
    answers = (clf.source_scores(seen.features).argmax(axis=1) == seen.codes for seen in targets)
    return float(np.mean([answer.mean() for answer in answers]))


def t3a(model: TorchModel, targets: list[Seen]) -> tuple[float, float]:
    """Accuracy of T3A as published, and with class sums as long as their supports make them."""
    method: Any = create("t3a", model, Source(), filter_k=100)
    published, unscaled = [], []
    for seen in targets:
        method.reset()
        for n in range(0, len(seen.codes), BATCH):
            part = slice(n, n + BATCH)
            features = torch.from_numpy(seen.features[part])
            given = Outputs(features, torch.from_numpy(seen.logits[part]))
            answers = method.answer(given).logits, features.double() @ method._sums.T
            for kept, scores in zip((published, unscaled), answers, strict=True):
                kept.append(float((to_numpy(scores.argmax(dim=1)) == seen.codes[part]).mean()))
    return float(np.mean(published)), float(np.mean(unscaled))


def readings(sources: dict[str, Seen], targets: dict[str, list[Seen]]) -> Iterator[str]:
    """A row a setting: without transport, and three columns for every pair of features."""
    pairs = [("frozen", "frozen")]
    if "by batch" in targets:
        pairs += [("frozen", "by batch"), ("by batch", "by batch"), ("frozen", "carried")]
    titles = "".join(f" {a} to {b} | gated | accepted |" for a, b in pairs)
    yield f"| setting | Source-GDA |{titles}"
    yield "|---|--:|" + "--:|--:|--:|" * len(pairs)
    most = sources["frozen"].logits.shape[1]  # directions there can be
    for given in (given for given in SETTINGS if given.get("k_max", 0) < most):
        name = ", ".join(f"{key} {value:g}" for key, value in given.items()) or "as registered"
        cells = [answered(sources[a], targets[b], given) for a, b in pairs]
        shown = "".join(f" {100 * a:.1f} | {100 * g:.1f} | {k:.0%} |" for a, g, k in cells)
        alone = source_gda(sources["frozen"], targets["frozen"], given)
        yield f"| {name} | {100 * alone:.1f} |{shown}"


def main(checkpoint: Path, data: str, conditions: list[str], frozen_alone: bool) -> None:
    model = model_of(checkpoint)
    assert model.preprocessing is not None
    prepare = model.preprocessing.batch
    splits = ("-source", "-target") if Path(f"{data}-source").is_dir() else (":train", ":test")
    train, test = (data + split for split in splits)
    pixels, codes = chosen(test, IMAGES, seed=0)
    known = chosen(train, max(FIT, FIT_EACH * len(np.unique(codes))), seed=1)
    parts = [slice(n, n + BATCH) for n in range(0, len(known[1]), BATCH)]
    labelled = [(prepare(known[0][part]), known[1][part]) for part in parts]
    ways = passes(model, labelled, frozen_alone)
    sources = {name: Seen.through(run, *known, prepare) for name, run in ways.items()}
    targets: dict[str, list[Seen]] = {name: [] for name in ways}
    for condition in conditions:
        name, _, severity = condition.partition(":")
        met = corrupt(pixels, name, int(severity), seed=0)
        for way, run in ways.items():
            targets[way].append(Seen.through(run, met, codes, prepare))
        told = ", ".join(f"{way} {100 * held[-1].right:.1f}" for way, held in targets.items())
        print(f"{condition}: head {told}", flush=True)
    for way, held in targets.items():
        print(f"mean of the head, {way}: {100 * np.mean([seen.right for seen in held]):.1f}")
    published, unscaled = t3a(model, targets["frozen"])
    print(f"T3A: {100 * published:.1f}; class sums not scaled: {100 * unscaled:.1f}", flush=True)
    for line in readings(sources, targets):
        print(line, flush=True)


if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if word != "--frozen"]
    if len(given) < 3:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    main(Path(given[0]), given[1], given[2:], "--frozen" in sys.argv)
