"""Records of every study that were never run, whose gated cells follow from their transports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from caster.config import Settings
from caster.core.gate import decide
from caster.records import REFUSED, Admission, Cell, cells_of, write
from caster.report.bench.agree import transport_of
from caster.sweeps import Spec, Sweep, read
from tests.records.make import HARDWARE, SOFTWARE, Maker, sha

NO_CHECKPOINT = "there is no checkpoint"

SWEEP = """
name = "every"
title = "Every study"

[backbones]
r18-a = {family = "batch", checkpoint = "r18-a", group = "r18"}
r18-b = {family = "batch", checkpoint = "r18-b", group = "r18"}
r50 = {family = "batch", checkpoint = "r50"}
vit = {family = "layer", checkpoint = "vit"}
swin = {family = "layer", checkpoint = "swin"}

[data]
cifar10 = {source = "cifar10:train", target = "cifar10:test", threshold = 0.5}
imagenet = {source = "imagenet:train", target = "imagenet:val", threshold = 0.5}
pets = {source = "pets:train", target = "pets:test", threshold = "none"}

[[grid]]
study = ["corruption", "certificate", "gate"]
data = ["cifar10"]
corruptions = ["fog", "saturate"]
severities = [5]
seeds = [0, 1]
batch_sizes = [16]
methods = ["frozen", "source-gda", "tent", "caster", "caster-ungated"]

[[grid]]
study = ["coverage", "certificate", "gate"]
backbones = ["r50"]
data = ["imagenet"]
corruptions = ["fog", "snow"]
severities = [5]
batch_sizes = [16]
methods = ["frozen", "source-gda", "t3a", "sar", "caster", "caster-ungated", "caster-mixed-metric"]

[[grid]]
study = "specificity"
backbones = ["r50"]
data = ["cifar10"]
corruptions = ["fog", "snow", "contrast"]
severities = [1, 3, 5]
batch_sizes = [16]
methods = ["frozen", "caster-ungated", "caster", "tent", "tent+certificate", "tent+referee"]

[[grid]]
study = "estimators"
backbones = ["r50", "vit"]
data = ["pets"]
methods = ["source-gda", "knn"]
batch_sizes = [16]

[[grid]]
study = "cost"
backbones = ["r50"]
data = ["cifar10"]
corruptions = ["fog"]
severities = [3]
batch_sizes = [16]
methods = ["frozen", "caster", "tent"]
alone = true
"""


def sweep_of(folder: Path, text: str = SWEEP) -> Sweep:
    path = folder / "every.toml"
    path.write_text(text)
    return read(path)


@dataclass(frozen=True)
class Consistent(Maker):
    """A maker whose cells are as good as their names: transports differ by stream, gates follow."""

    missing: tuple[str, ...] = ()  # backbones without a checkpoint

    def admission(self, backbone: str, data: str) -> Admission:
        admission = super().admission(backbone, data)
        if backbone not in self.missing:
            return admission
        return Admission(
            backbone=backbone,
            data=data,
            checkpoint=None,
            moments=None,
            accuracy=None,
            n=0,
            threshold=admission.threshold,
            admitted=False,
            reason=NO_CHECKPOINT,
            constants=admission.constants,
        )

    def settings(self, spec: Spec) -> dict[str, Any]:
        """With those that a score is computed from."""
        layers = {"tau": 1.0, "window": 256, "every": 32, "gated": True}
        return (layers if spec.method == "layer-transport" else {}) | super().settings(spec)

    def cell(self, out: Path, spec: Spec, **changes: Any) -> Path:
        """As a run writes it: of a backbone that was never loaded there is nothing to say."""
        if spec.backbone not in self.missing:
            return super().cell(out, spec, **changes)
        threshold = self.sweep.data[spec.data].threshold
        refused = Cell(
            identity=self.identity(spec),
            status=REFUSED,
            reason=NO_CHECKPOINT,
            admission={"accuracy": None, "n": 0, "threshold": threshold},
            method={},
            frozen={},
            stream={},
            memory={},
            software=SOFTWARE,
            hardware=HARDWARE,
        )
        return write(cells_of(out), refused)

    def columns(self, spec: Spec) -> tuple[dict[str, Any], dict[str, Any]]:
        if spec.method == "caster":
            return self.gated(spec)
        if spec.method == "caster-ungated":
            return self.transported(spec)
        maker = Maker(self.sweep, n=self.n, classes=self.classes, accuracy=self.skill(spec))
        samples, batches = maker.columns(spec)
        if spec.method == "caster-mixed-metric":  # ends otherwise than A's gated ones
            transport = self.transported(replace(spec, method="caster-ungated", settings=()))
            batches |= {
                "ratio": 10 * transport[1]["ratio"],
                "reason": ["ratio"] * len(batches["size"]),
            }
        return samples, batches

    def skill(self, spec: Spec) -> float:
        """How often a method answers rightly, drawn for its stream and name."""
        rng = np.random.default_rng(int(sha("skill", spec.stream, spec.method)[:12], 16))
        return float(rng.uniform(0.1, 0.9))

    def transported(self, spec: Spec) -> tuple[dict[str, Any], dict[str, Any]]:
        maker = Maker(self.sweep, n=self.n, classes=self.classes, accuracy=self.skill(spec))
        samples, batches = maker.columns(spec)
        rng = np.random.default_rng(int(sha("ratios", spec)[:12], 16))
        n = len(batches["size"])
        ratio = np.exp(rng.normal(3 * (0.6 - self.skill(spec)), 0.5, n))
        confident = rng.integers(0, 17, n)
        occupied = np.minimum(rng.integers(2, self.classes + 1, n), confident)
        ratio = np.where(confident == 0, np.inf, ratio)
        batches |= {"ratio": ratio, "confident": confident, "confident_classes": occupied}
        return samples, batches

    def gated(self, spec: Spec) -> tuple[dict[str, Any], dict[str, Any]]:
        samples, batches = self.transported(transport_of(spec))
        constants = Settings(**self.sweep.constants | dict(spec.settings))
        verdicts = [
            decide(
                ratio,
                confident,
                classes,
                n_classes=self.classes,
                tau=constants.tau,
                min_samples=constants.min_samples,
                min_classes=constants.min_classes,
            )
            for ratio, confident, classes in zip(
                batches["ratio"], batches["confident"], batches["confident_classes"], strict=True
            )
        ]
        accepted = np.array([verdict.accepted for verdict in verdicts])
        kept = ~accepted[samples["batch"]]
        prediction = np.where(kept, samples["frozen"], samples["prediction"])
        reasons = [verdict.reason for verdict in verdicts]
        return samples | {"prediction": prediction}, batches | {
            "accepted": accepted,
            "reason": reasons,
        }
