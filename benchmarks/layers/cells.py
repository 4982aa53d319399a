"""One stream through layer transport: what every batch's ratio was, and what it got right."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from time import perf_counter
from typing import Any

import numpy as np
import torch
from conditions import under
from subjects import SUBJECTS, TINY, Array, Batches, Pictures, Run, as_batch, setup, trained

from caster import Adapter
from caster import state as states
from caster.data.streams import StreamSettings, make_stream
from caster.frozen.protocol import Outputs
from caster.frozen.torch import TorchModel
from caster.methods import Source, create, find
from caster.methods.layer_transport import LayerTransport
from caster.state import State

NEVER = 1e9  # a threshold that refuses nothing: the tables gate
IMBALANCE = 20.0  # of long-tailed streams: a few pictures a class are left of a few hundred
ROWS_SEED = 0


@dataclass(frozen=True)
class Cell:
    """A stream: its condition, order and batch size."""

    condition: str
    order: str
    size: int

    @property
    def label(self) -> str:
        """What tells it from others."""
        return f"{self.condition} {self.order} B{self.size}"


@dataclass(frozen=True, eq=False)
class Subject:
    """A network with its state, and the pictures it is tried on."""

    name: str
    run: Run
    model: TorchModel
    state: State
    images: Array  # (N, 32, 32, 3)
    labels: Array

    @property
    def size(self) -> dict[str, int]:
        """How many pictures it was fitted to, and is tried on."""
        return {"source": int(self.state.moments.counts.sum()), "pictures": len(self.labels)}


@dataclass(frozen=True)
class Variant:
    """Layer transport with some settings."""

    chosen: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Its settings in words."""
        return ", ".join(f"{k} {v}" for k, v in self.chosen.items()) or "as registered"

    def make(self, subject: Subject) -> LayerTransport:
        """The method, which refuses nothing."""
        made = create(
            "layer-transport",
            subject.model,
            Source(state=subject.state),
            tau=NEVER,
            min_samples=2,
            **self.chosen,
        )
        assert isinstance(made, LayerTransport)
        return made

    def of(self, subject: Subject) -> dict[str, Any]:
        """All that decides its results."""
        settings = find("layer-transport").options() | self.chosen
        gate = ("tau", "min_samples")  # which the tables choose
        return subject.size | {k: str(v) for k, v in settings.items() if k not in gate}


def open_subject(run: Run, name: str, pictures: int, source: int) -> Subject:
    """A network of benchmarks/methods, its state with layers, and some of the test pictures."""
    data = Pictures(run)
    chosen = SUBJECTS[name]
    model = trained(chosen, data, run)
    assert isinstance(model, TorchModel)
    few = min(source, TINY["train"] if run.tiny else source)
    path = run.out / f"{chosen.key}-layers-{few}.caster"
    if not path.exists():
        batches = Batches(data.train_images[:few], data.train_labels[:few])
        Adapter.fit(model, batches, layers=True).save(path)
    rows = np.random.default_rng(ROWS_SEED).permutation(len(data.test_labels))[:pictures]
    state = states.load(path)
    return Subject(name, run, model, state, data.test_images[rows], data.test_labels[rows])


@lru_cache(maxsize=1)
def pictures_under(subject: Subject, condition: str) -> tuple[Array, list[Outputs]]:
    """The pictures under a condition, and the frozen model's answers to them."""
    images = under(subject.images, condition)
    parts = [as_batch(images[at : at + 64]) for at in range(0, len(images), 64)]
    return images, [subject.model(part) for part in parts]


def measure(
    subject: Subject, variant: Variant, cell: Cell, given: tuple[Array, list[Outputs]]
) -> dict[str, Any]:
    """Every batch of a stream: its size, what both networks get right, and the ratio."""
    images, answered = given
    features = torch.cat([outputs.features for outputs in answered])
    logits = torch.cat([torch.as_tensor(outputs.logits) for outputs in answered])
    imbalance = IMBALANCE if cell.order == "long-tailed" else None
    settings = StreamSettings(batch_size=cell.size, order=cell.order, imbalance=imbalance)
    method = variant.make(subject)
    batches = []
    began = perf_counter()
    for batch in make_stream(subject.labels, settings):
        rows = np.asarray(batch.rows)
        at = torch.from_numpy(rows.copy()).to(features.device)
        before = Outputs(features[at], logits[at])
        found = method.predict_with(as_batch(images[rows]), before)
        truth = torch.from_numpy(subject.labels[rows]).to(features.device)
        frozen, aligned = (
            int((scores.argmax(dim=1) == truth).sum()) for scores in (logits[at], found.logits)
        )
        batches.append([len(rows), frozen, aligned, round(float(found.ratio or 0.0), 4)])
    total = sum(n for n, *_ in batches)
    return {
        "accuracy": sum(aligned for _, _, aligned, _ in batches) / total,
        "frozen": sum(frozen for _, frozen, *_ in batches) / total,
        "batches": batches,
        "order": cell.order,
        "size": cell.size,
        "corruption": cell.condition,
        "seconds": (perf_counter() - began) * 10_000 / total,
        "setup": setup(subject.run, "one process"),
    }
