"""Records of every study that were never run, whose gated cells follow from their transports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from caster_bench.records.schema import REJECTED, Admission, Cell
from caster_bench.records.store import cells_of, write
from caster_bench.studies.naming import ALIGNING, MIXTURE
from caster_bench.studies.score import transport_of
from caster_bench.sweeps import Spec, Sweep, read
from tests.support.record_maker import HARDWARE, SOFTWARE, Maker, sha

DEFAULTS = {"tau": 1.0, "window": 80, "every": 32, "gated": True, "prior": 16.0}
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
            seen=admission.seen,
        )

    def settings(self, spec: Spec) -> dict[str, Any]:
        """With those that a score is computed from."""
        own = {"mixture": True} if spec.method.startswith(MIXTURE) else {}
        return (DEFAULTS if spec.method in ALIGNING else {}) | own | super().settings(spec)

    def cell(self, out: Path, spec: Spec, **changes: Any) -> Path:
        """As a run writes it: of a backbone that was never loaded there is nothing to say."""
        if spec.backbone not in self.missing:
            return super().cell(out, spec, **changes)
        threshold = self.sweep.data[spec.data].threshold
        refused = Cell(
            identity=self.identity(spec),
            status=REJECTED,
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
        if spec.method == "caster-mixed-metric":  # ends otherwise than A's gated ones
            return self.gated(spec, scale=10)
        if "+" in spec.method:
            return self.behind_gate(spec)
        maker = Maker(self.sweep, n=self.n, classes=self.classes, accuracy=self.skill(spec))
        return maker.columns(spec)

    def behind_gate(self, spec: Spec) -> tuple[dict[str, Any], dict[str, Any]]:
        """A method where its gate allows; here it learns nothing, so that batches are alike."""
        method, _, gate = spec.method.partition("+")
        own = tuple(pair for pair in spec.settings if pair[0] != "gate")
        samples, batches = self.columns(replace(spec, method=method, settings=own))
        size = batches["size"]
        if gate == "certificate":
            _, found = self.transported(replace(spec, method="caster-ungated", settings=()))
            measured = {name: found[name] for name in ("ratio", "confident", "confident_classes")}
            reasons = self.verdicts(spec, size, *measured.values())
        else:
            source, _ = self.columns(replace(spec, method="source-gda", settings=()))
            same = source["prediction"] == samples["frozen"]
            share = np.bincount(samples["batch"][same], minlength=len(size)) / size
            measured = {"ratio": 1 - share}
            least = self.settings(spec)["gate"]["agreement"]
            reasons = ["accepted" if yes else "disagreement" for yes in share >= least]
        passed = np.array(reasons) == "accepted"
        accepted = passed & batches["accepted"]
        reasons = np.where(passed & ~accepted, "inert", reasons).tolist()
        kept = ~accepted[samples["batch"]]
        prediction = np.where(kept, samples["frozen"], samples["prediction"])
        decided = {"accepted": accepted, "reason": reasons}
        return samples | {"prediction": prediction}, batches | measured | decided

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
        confident = np.minimum(rng.integers(0, 17, n), batches["size"])
        occupied = np.minimum(rng.integers(2, self.classes + 1, n), confident)
        ratio = np.where(confident == 0, np.inf, ratio)
        batches |= {"ratio": ratio, "confident": confident, "confident_classes": occupied}
        return samples, batches

    def gated(self, spec: Spec, scale: float = 1.0) -> tuple[dict[str, Any], dict[str, Any]]:
        samples, batches = self.transported(transport_of(spec))
        ratio = scale * batches["ratio"]
        counts = batches["confident"], batches["confident_classes"]
        reasons = self.verdicts(spec, batches["size"], ratio, *counts)
        accepted = np.array(reasons) == "accepted"
        kept = ~accepted[samples["batch"]]
        prediction = np.where(kept, samples["frozen"], samples["prediction"])
        decided = {"ratio": ratio, "accepted": accepted, "reason": reasons}
        return samples | {"prediction": prediction}, batches | decided


@dataclass(frozen=True)
class Layered(Consistent):
    """A maker whose transport of layers follows from one update a stream and its gate."""

    def columns(self, spec: Spec) -> tuple[dict[str, Any], dict[str, Any]]:
        if not spec.method.startswith(tuple(ALIGNING)):
            return super().columns(spec)
        gate = ("tau", "gated", "every", "window")
        chosen = {k: v for k, v in spec.settings if k not in gate}
        always = ALIGNING.get(spec.method, spec.method)
        update = replace(spec, method=always, settings=tuple(sorted(chosen.items())))
        skill = self.skill(replace(update, settings=()))
        maker = Maker(self.sweep, n=self.n, classes=self.classes, accuracy=skill)
        samples, batches = maker.columns(update)
        if spec.method == always:
            return samples, batches
        own = self.settings(spec)
        rng = np.random.default_rng(int(sha("ratios", update, own["window"])[:12], 16))
        ratio = np.exp(rng.normal(1.5 * (0.6 - skill), 0.2, len(batches["size"])))
        accepted = (ratio <= own["tau"]) | (not own["gated"])
        reasons = np.where(accepted, "accepted" if own["gated"] else "ungated", "ratio")
        before = batches["size"][:-1].sum()
        if own["every"] > 1 and own["gated"] and before >= own["window"]:  # rests at the end
            accepted[-1] = accepted[-2]
            ratio[-1], reasons[-1] = np.nan, "rest"
        kept = ~accepted[samples["batch"]]
        samples["prediction"] = np.where(kept, samples["frozen"], samples["prediction"])
        batches |= {"ratio": ratio, "accepted": accepted, "reason": reasons.tolist()}
        return samples, batches
