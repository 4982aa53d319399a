"""Records that were never run, but agree with themselves and with their sweep in everything."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from caster.config import Settings
from caster.core.verdict import decide
from caster_bench.data.streams import Stream, make_stream
from caster_bench.engine.cell_settings import stream_settings
from caster_bench.records.digest import canonical
from caster_bench.records.parquet import as_batches, as_samples
from caster_bench.records.schema import DONE, REJECTED, Admission, Cell
from caster_bench.records.store import cells_of, sources_of, write, write_admission
from caster_bench.sweeps import Spec, Sweep

SOFTWARE = {"python": "3.12.1", "numpy": "2.1.0", "torch": "2.13.0", "caster": "0.1.0"}
HARDWARE = {"device": "a processor", "cpu": "a processor", "cores": 2}
GATED = ("caster", "caster-mixed-metric")  # methods that decide by their own certificate
MEASURED = (*GATED, "caster-ungated")  # and those that say what it would have been


def sha(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def checkpoint_bytes(backbone: str) -> bytes:
    """What `make` puts in a checkpoint's file."""
    return f"weights of {backbone}".encode()


@dataclass(frozen=True)
class Maker:
    """Record sets of a sweep: `Maker(sweep).make(out)`."""

    sweep: Sweep
    n: int = 96  # images of every target
    classes: int = 4
    frozen_accuracy: float = 0.6
    accuracy: float = 0.75  # of methods, where they answer
    refused: tuple[tuple[str, str], ...] = ()  # backbone and data
    checkpoints: bool = False  # whether to write files for them, in the folder of the run

    def make(self, out: Path) -> Path:
        """Write every cell and admission; the folder of the run."""
        for backbone, data in dict.fromkeys((s.backbone, s.data) for s in self.sweep.cells):
            self.admit(out, backbone, data)
        for spec in self.sweep.cells:
            self.cell(out, spec)
        return out

    def admit(self, out: Path, backbone: str, data: str) -> None:
        """The admission of a backbone on data, with a state and a checkpoint beside it."""
        admission = self.admission(backbone, data)
        sources_of(out).mkdir(parents=True, exist_ok=True)
        for name in admission.files:
            (sources_of(out) / name).write_bytes(self.state(backbone, data))
        write_admission(out, admission)
        file = out / self.sweep.backbones[backbone].checkpoint
        if self.checkpoints and ":" not in self.sweep.backbones[backbone].checkpoint:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(checkpoint_bytes(backbone))

    def state(self, backbone: str, data: str) -> bytes:
        return f"state of {backbone} on {data}".encode()

    def admission(self, backbone: str, data: str) -> Admission:
        held = self.sweep.data[data]
        threshold = held.threshold
        refused = (backbone, data) in self.refused
        accuracy = None if threshold is None else threshold + (-0.01 if refused else 0.01)
        name = f"{backbone}--{data}"
        state = hashlib.sha256(self.state(backbone, data)).hexdigest()
        return Admission(
            backbone=backbone,
            data=data,
            checkpoint=hashlib.sha256(checkpoint_bytes(backbone)).hexdigest(),
            moments=None if refused else sha("moments", name),
            accuracy=accuracy,
            n=self.n,
            threshold=threshold,
            admitted=not refused,
            reason="clean accuracy is below the threshold" if refused else None,
            files={} if refused else {f"{name}.caster": state},
            source={"name": held.source, "sha256": sha("data", held.source), "n": 10 * self.n},
            target={"name": held.target, "sha256": sha("data", held.target), "n": self.n},
            classes=self.classes,
            constants=asdict(Settings(**self.sweep.constants)),
            seen={"backbone": asdict(self.sweep.backbones[backbone]), "data": asdict(held)},
        )

    def identity(self, spec: Spec) -> dict[str, Any]:
        admission = self.admission(spec.backbone, spec.data)
        shared = ("constants", "checkpoint", "moments", "source", "target", "classes")
        own = {"spec": spec.plain(), "settings": self.settings(spec)}
        return own | {name: getattr(admission, name) for name in shared}

    def settings(self, spec: Spec) -> dict[str, Any]:
        """Of a cell's method."""
        referee = {"gate": {"agreement": 0.97} | spec.given.get("gate", {})}
        return spec.given | (referee if spec.method.endswith("+referee") else {})

    def cell(self, out: Path, spec: Spec, **changes: Any) -> Path:
        """Write one record; `changes` are columns of samples, to make a fault."""
        admission = self.admission(spec.backbone, spec.data)
        head = {"accuracy": admission.accuracy, "n": admission.n, "threshold": admission.threshold}
        inert = self.is_inert(spec)
        stream = self.stream(spec)
        cell = Cell(
            identity=self.identity(spec),
            status=DONE if admission.admitted else REJECTED,
            reason=admission.reason,
            admission=head,
            method={
                "inert": inert,
                "gradients": spec.method.startswith(("tent", "eata", "sar")),
                "settings": self.settings(spec),
                "retained": {"features": 7000 * (spec.method == "knn"), "statistics": 1000},
            },
            frozen={
                "before": sha("weights", spec.backbone),
                "after": sha("weights", spec.backbone),
            },
            stream={
                "relative_diversity": stream.diversity.relative,
                "class_ordered": stream.is_class_ordered,
            },
            memory={"peak": None},
            software=SOFTWARE,
            hardware=HARDWARE,
        )
        if not admission.admitted:
            return write(cells_of(out), cell)
        samples, batches = self.columns(spec)
        return write(cells_of(out), cell, as_samples(samples | changes), as_batches(batches))

    def is_inert(self, spec: Spec) -> bool:
        """As in the paper: Tent and EATA find no BatchNorm in the layer family."""
        layer = self.sweep.backbones[spec.backbone].family == "layer"
        return layer and spec.method in ("tent", "eata")

    def columns(self, spec: Spec) -> tuple[dict[str, Any], dict[str, Any]]:
        """Samples and batches of a cell, in the order of the stream."""
        stream = self.stream(spec)
        rows = [batch.rows for batch in stream]
        size = np.array([len(own) for own in rows])
        index, batch = np.concatenate(rows), np.repeat(np.arange(len(rows)), size)
        label = stream.targets[index]
        rng = np.random.default_rng(int(sha("stream", spec.stream)[:12], 16))
        headless = self.sweep.data[spec.data].threshold is None
        frozen = self.frozen_answers(spec, label, rng)
        own = np.random.default_rng(int(sha("cell", spec)[:12], 16))
        below = own.random(len(size)) < 0.7
        ratio = np.where(below, own.uniform(0.1, 0.8, len(size)), own.uniform(0.8, 9, len(size)))
        confident = size // 2
        ratio = np.where(confident == 0, np.inf, ratio)
        occupied = np.minimum(self.classes, confident)
        measured = spec.method in MEASURED
        reasons = [self.reason(spec)] * len(size)
        if spec.method in GATED:
            reasons = self.verdicts(spec, size, ratio, confident, occupied)
        accepted = np.array([reason in ("accepted", "ungated") for reason in reasons])
        kept = ~accepted[batch] & (not headless)
        prediction = np.where(kept, frozen, self.answers(label, self.accuracy, own))
        nothing = [None] * len(size)
        samples = {"index": index, "label": label, "frozen": frozen}
        samples |= {"prediction": prediction, "batch": batch}
        batches = {
            "batch": np.arange(len(size)),
            "size": size,
            "classes": [len(np.unique(stream.targets[own])) for own in rows],
            "accepted": accepted,
            "reason": reasons,
            "ratio": ratio if measured else nothing,
            "confident": confident if measured else nothing,
            "confident_classes": occupied if measured else nothing,
            "seconds": own.uniform(0.01, 0.02, len(size)),
        }
        return samples, batches

    def reason(self, spec: Spec) -> str:
        """Of every batch, where no gate is asked."""
        if spec.method == "frozen":
            return "frozen"
        return "inert" if self.is_inert(spec) else "ungated"

    def verdicts(self, spec: Spec, size: Any, *evidence: Any) -> list[str]:
        """The certificate's reasons, at the constants and thresholds of a cell."""
        own = spec.given.get("gate", {}) if "+" in spec.method else spec.given
        settings = Settings(**self.sweep.constants | own)
        given = zip(*(np.asarray(column).tolist() for column in evidence), strict=True)
        reasons = [decide(each, self.classes, settings).reason for each in given]
        return ["batch_too_small" if n == 1 else r for n, r in zip(size, reasons, strict=True)]

    def frozen_answers(self, spec: Spec, label: Any, rng: np.random.Generator) -> Any:
        """What the frozen model says; on clean images it is as right as it was admitted with."""
        admitted = self.admission(spec.backbone, spec.data).accuracy
        if admitted is None:
            return np.full(len(label), -1)
        if spec.conditions:
            return self.answers(label, self.frozen_accuracy, rng)
        wrong = rng.permutation(len(label)) >= round(admitted * len(label))
        return np.where(wrong, (label + 1) % self.classes, label)

    def answers(self, label: Any, accuracy: float, rng: np.random.Generator) -> Any:
        anything = rng.integers(self.classes, size=len(label))
        return np.where(rng.random(len(label)) < accuracy, label, anything)

    def stream(self, spec: Spec) -> Stream:
        """The very stream that a run would have, whatever the backbone."""
        return stream_of(replace(spec.stream, backbone="", alone=False), self.n, self.classes)


@lru_cache(maxsize=4)
def stream_of(spec: Spec, n: int, classes: int) -> Stream:
    return make_stream(np.arange(n) % classes, stream_settings(spec))


def of_format(path: Path, number: int, **changes) -> None:
    """A description as another version would have sealed it."""
    plain = json.loads(path.read_text()) | {"format": number} | changes
    del plain["sha256"]
    lines = {name: canonical({name: value})[1:-1] for name, value in sorted(plain.items())}
    seal = hashlib.sha256(f"{{{','.join(lines.values())}}}".encode()).hexdigest()
    path.write_text("{\n" + ",\n".join([*lines.values(), f'"sha256":"{seal}"']) + "\n}\n")
