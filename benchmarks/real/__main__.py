"""Checks on real networks and real images, with the numbers they give.

    CASTER_DATA=FOLDER python benchmarks/real

FOLDER holds `models/` (see models.py), `imagenet-val5k/` (five validation images a class, one
folder a class), Oxford-IIIT Pets and CIFAR-10 as published; what is missing is left out, by name.
Features are kept as `caster fit` keeps them, so a second run is quick.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.neighbors import KNeighborsClassifier

from caster import Adapter, Caster, wrap
from caster.adapt.adapter import bound_state
from caster.adapt.extract import ImageArrayFeatures, extract
from caster.core.arrays import to_numpy
from caster.io.feature_cache import default_store
from caster.io.images import Images, open_images
from caster.models.heads import head_columns
from caster.models.preprocessing import Preprocessing
from caster.report.evaluation import evaluate
from models import CONDITIONS, RAW_32, RAW_224, corrupt, exported, load

BATCH = 64
ROOT = Path(os.environ["CASTER_DATA"])
MODELS = ROOT / "models"
SIZES: dict[str, tuple[int, Preprocessing]] = {
    "efficientnet_lite0": (224, RAW_224),
    "resnet50": (224, RAW_224),
    "cifar10": (32, RAW_32),
}


@dataclass(frozen=True)
class Stream:
    """Rows of extracted features in shuffled batches."""

    features: NDArray[Any]
    labels: NDArray[Any]
    logits: NDArray[Any] | None

    def batches(self, seed: int = 0) -> list[tuple[Any, Any, Any]]:
        """Shuffled rows, so many at a time."""
        order = np.random.default_rng(seed).permutation(len(self.labels))
        rows = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
        logits = self.logits
        return [
            (self.features[r], self.labels[r], None if logits is None else logits[r]) for r in rows
        ]


def features_of(name: str, images: Images) -> ImageArrayFeatures:
    pixels, preprocessing = SIZES[name]
    model = wrap(exported(name, MODELS, pixels), preprocessing=preprocessing)
    return extract(model, images, default_store(), batch_size=BATCH)


def stream(found: ImageArrayFeatures, rows: NDArray[Any] | slice, head: bool = True) -> Stream:
    logits = found.read("logits")[rows] if head else None
    return Stream(found.read("features")[rows], found.read("labels")[rows], logits)


def row(title: str, clf: Caster, target: Stream) -> None:
    found = evaluate(clf, target.batches())
    cells = []
    for name in ("frozen", "source_gda", "ungated", "gated"):
        score = found.scores.get(name)
        cells.append("" if score is None else f"{100 * score.accuracy:.1f}")
    ratio = f"{found.ratio:.2f}" if np.isfinite(found.ratio) else "none"
    print(f"| {title} | {' | '.join(cells)} | {found.acceptance:.0%} | {ratio} |", flush=True)


def imagenet(names: Sequence[str]) -> None:
    """Three images a class fit, the other two are predicted."""
    images = open_images(ROOT / "imagenet-val5k", labelled=True)
    place = np.concatenate([np.arange(n) for n in np.unique(images.labels, return_counts=True)[1]])
    for name in names:
        found = features_of(name, images)
        source, target = (stream(found, np.flatnonzero(r)) for r in (place < 3, place >= 3))
        clf = Caster().fit(source.features, source.labels)
        row(f"{name}, ImageNet, 3 source images a class", clf, target)


def pets(names: Sequence[str]) -> None:
    """trainval fits, test is predicted; k-NN on the same features beside it."""
    for name in names:
        parts = [
            stream(features_of(name, open_images(f"pets:{part}", ROOT)), slice(None), head=False)
            for part in ("trainval", "test")
        ]
        clf = Caster().fit(parts[0].features, parts[0].labels)
        row(f"{name} features, Pets", clf, parts[1])
        source, target = (p.features / np.linalg.norm(p.features, axis=1)[:, None] for p in parts)
        for k in (1, 5, 20):
            knn = KNeighborsClassifier(k).fit(source, parts[0].labels)
            right = float(np.mean(knn.predict(target) == parts[1].labels))
            print(
                f"| k-NN on the same, cosine, k = {k} | | {100 * right:.1f} | | | | |", flush=True
            )


def cifar10(device: str) -> None:
    """Fitted on train, predicted on test: clean, and under the corruptions kept for tuning."""
    model = wrap(load("cifar10", MODELS), preprocessing=RAW_32, device=device)
    source = extract(
        model, open_images("cifar10:train", ROOT), default_store(), batch_size=500
    )  # fmt: skip
    clf = Caster().fit(source.read("features"), source.read("labels"))
    test = open_images("cifar10:test", ROOT)
    images = np.stack([test.read(i) for i in range(len(test))])
    for condition in CONDITIONS:
        corrupted = corrupt(images, condition)
        parts = [model(RAW_32.batch(corrupted[i : i + 500])) for i in range(0, len(images), 500)]
        features, logits = (
            np.concatenate([to_numpy(getattr(part, what)) for part in parts])
            for what in ("features", "logits")
        )
        row(f"cifar10, {condition}", clf, Stream(features, np.asarray(test.labels), logits))


def agreement(name: str, images: Images) -> None:
    """torch and its ONNX export on the same images, and what adaptation makes of both."""
    pixels, preprocessing = SIZES[name]
    torch_model = wrap(load(name, MODELS), preprocessing=preprocessing)
    onnx_model = wrap(exported(name, MODELS, pixels), preprocessing=preprocessing)
    rows = np.random.default_rng(0).permutation(len(images))[: 2 * BATCH]
    batch = preprocessing.batch([preprocessing.fitted(images.read(int(i))) for i in rows])
    outs = [[m(part) for part in (batch[:BATCH], batch[BATCH:])] for m in (torch_model, onnx_model)]

    def apart(what: str) -> float:
        a, b = (np.concatenate([np.asarray(getattr(o, what)) for o in out]) for out in outs)
        return float(np.abs(a - b).max() / np.abs(a).max())

    found = features_of(name, images) if name != "cifar10" else None
    same = "" if found is None else adapted_agreement(found, torch_model, onnx_model, batch)
    print(f"| {name} | {apart('features'):.1e} | {apart('logits'):.1e} | {same} |", flush=True)


def adapted_agreement(found: ImageArrayFeatures, a: Any, b: Any, batch: NDArray[Any]) -> str:
    clf = Caster().fit(found.read("features"), found.read("labels"))
    head = head_columns(clf.classes_, found.read("logits").shape[1])
    outs = [Adapter(m, bound_state(clf, m, head)) for m in (a, b)]
    first, second = ([adapter(part) for part in np.split(batch, 2)] for adapter in outs)
    pairs = list(zip(first, second, strict=True))
    same = np.mean([np.mean(np.asarray(x.proposed) == np.asarray(y.proposed)) for x, y in pairs])
    verdicts = all(x.verdict.reason == y.verdict.reason for x, y in pairs)
    return f"{same:.1%} of transported answers, verdicts {'equal' if verdicts else 'DIFFER'}"


def main() -> None:
    present = [name for name in SIZES if (MODELS / f"{name}.safetensors").exists()]
    on_imagenet = [name for name in present if name != "cifar10"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in SIZES.keys() - set(present):
        print(f"left out: {name} (no {MODELS / name}.safetensors)")
    print("\n| | frozen | Source-GDA | ungated | gated | accepted | ratio |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    if (ROOT / "imagenet-val5k").exists():
        imagenet(on_imagenet)
    if (ROOT / "oxford-iiit-pet").exists():
        pets(on_imagenet[:1])  # the quick one
    if "cifar10" in present:
        cifar10(device)
    print("\n| torch against ONNX | features, relative | logits, relative | adapted alike |")
    print("|---|--:|--:|---|")
    for name in present:
        small = name == "cifar10"
        agreement(name, open_images("cifar10:test" if small else ROOT / "imagenet-val5k", ROOT))


if __name__ == "__main__":
    main()
