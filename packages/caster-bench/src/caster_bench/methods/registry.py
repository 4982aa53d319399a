"""Methods by name: our own, those of other packages, and any of them behind a gate."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from caster.errors import CasterError
from caster.models.protocol import FrozenModel
from caster.state import State
from caster_bench.methods.gates import GATES, Gated, keywords, make_gate
from caster_bench.methods.protocol import Method
from caster_bench.methods.source import Source
from caster_bench.sweeps.spec import inner_and_gate, known

Need = Literal[
    "torch",
    "torch module",
    "transformer",
    "residual blocks",
    "linear head",
    "images",
    "state",
    "source images",
]
Settings = Mapping[str, Any]
EXTRAS = dict.fromkeys(("torch", "cma"), "'caster-bench[methods]'")
GROUP = "caster_bench.methods"  # entry points of other packages


@dataclass(frozen=True)
class Entry:
    """A registered method, not yet imported.

    `make` is called with the model, a `Source`, its name and its settings; a string
    "module:name" is imported on first use. Other packages register an entry under the entry point
    group "caster_bench.methods".

    >>> Entry("mine", "Does nothing.", make="caster_bench.methods.protocol:Frozen").gradients
    False
    """

    name: str
    summary: str  # one line
    make: str | Callable[..., Method]
    needs: tuple[Need, ...] = ()
    gradients: bool = False
    settings: Settings = field(default_factory=dict)  # that distinguish variants of one class
    presets: Mapping[str, Settings] = field(default_factory=dict)  # published, by benchmark
    gate: str | None = None  # in front of it
    fault: str | None = None  # why it cannot be loaded

    def maker(self) -> Callable[..., Method]:
        """Import what makes the method."""
        if self.fault is not None:
            raise CasterError(self.fault)
        if not isinstance(self.make, str):
            return self.make
        module, _, attribute = self.make.partition(":")
        try:
            made: Callable[..., Method] = getattr(import_module(module), attribute)
        except AttributeError:
            raise CasterError(f"{self.name} cannot be made: there is no {self.make}") from None
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("caster"):
                raise
            wanted = EXTRAS.get(error.name or "", error.name)
            raise CasterError(f"{self.name} needs {error.name}: pip install {wanted}") from None
        return made

    def options(self) -> dict[str, Any]:
        """Settings with their defaults."""
        own = keywords(self.maker())
        return {name: self.settings.get(name, own[name]) for name in own if name != "name"}

    @property
    def revision(self) -> int | None:
        """`REVISION` of the method's module, which changes when its answers do."""
        return getattr(sys.modules[self.maker().__module__], "REVISION", None)


_HERE = "caster_bench.methods"
_IMAGENET = {"imagenet": {"optimizer": "sgd", "lr": 2.5e-4}}
_MIXTURE = {"memory": 2048, "depth": 1.0, "maps": "full", "mixture": True}
_IMAGENET_VIT = {"imagenet-vit": {"optimizer": "sgd", "lr": 1e-3, "norms": ("layer",)}}
# The same rate on other data.
_LAYER_NORM: dict[str, Settings] = {"layer-norm": _IMAGENET_VIT["imagenet-vit"]}
_COTTA_IMAGENET = {"optimizer": "sgd", "threshold": 0.1, "restore": 0.001, "symmetric": True}


def _eata_presets(**imagenet: float) -> dict[str, Settings]:
    return {
        "cifar100": {"redundancy": 0.1},
        "adam": {"optimizer": "adam", "lr": 1e-3},
        "imagenet": _IMAGENET["imagenet"] | imagenet,
        "imagenet-vit": _IMAGENET_VIT["imagenet-vit"] | imagenet,
        **_LAYER_NORM,
    }


METHODS = (
    Entry("frozen", "The frozen model's own answer.", f"{_HERE}.protocol:Frozen"),
    Entry(
        "source-gda",
        "The source's Gaussian discriminant, without transport.",
        f"{_HERE}.transport:SourceGDA",
        ("state",),
    ),
    Entry(
        "caster",
        "Class moments transported to the batch, if its certificate allows.",
        f"{_HERE}.transport:Caster",
        ("state",),
    ),
    Entry(
        "caster-ungated",
        "The same transport for every batch, without the gate.",
        f"{_HERE}.transport:Ungated",
        ("state",),
    ),
    Entry(
        "caster-no-transport",
        "Ablation: caster's classifier with the identity in place of the transport.",
        f"{_HERE}.transport:NoTransport",
        ("state",),
    ),
    Entry(
        "caster-mixed-metric",
        "Ablation: gated by a Euclidean residual over a Mahalanobis margin.",
        f"{_HERE}.transport:MixedMetric",
        ("state",),
    ),
    Entry(
        "knn",
        "Vote of the nearest source features, weighted by similarity.",
        f"{_HERE}.knn:KNN",
        ("torch", "source images"),
    ),
    Entry(
        "t3a",
        "Class prototypes from confident test features, in place of the classifier's weights.",
        f"{_HERE}.t3a:T3A",
        ("torch", "linear head"),
        presets={
            "cifar10": {"filter_k": 100},
            "cifar100": {"filter_k": 100},
            "imagenet-vit": {"filter_k": 20},
        },
    ),
    Entry(
        "smoothed-frozen",
        "The frozen model's answers, smoothed along the stream as mixture transport does.",
        f"{_HERE}.smoothed_frozen:SmoothedFrozen",
        ("state",),
    ),
    Entry(
        "lame",
        "Predictions of a batch that near features share, by a fixed point.",
        f"{_HERE}.lame:LAME",
        ("torch",),
    ),
    Entry(
        "coral",
        "Batch features aligned with the source's mean and covariance, then the frozen classifier.",
        f"{_HERE}.coral:Coral",
        ("torch", "linear head", "source images"),
    ),
    Entry(
        "linear-tca",
        "Test features aligned with the confident ones among them, then the frozen classifier.",
        f"{_HERE}.linear_tca:LinearTCA",
        ("torch", "linear head"),
    ),
    Entry(
        "bn-adapt",
        "BatchNorm with batch statistics, shrunk towards the source's.",
        f"{_HERE}.bn_adapt:BNAdapt",
        ("torch module",),
    ),
    Entry(
        "layer-transport",
        "Statistics of shallow layers aligned with the source's, if its own certificate allows.",
        f"{_HERE}.layer_transport:LayerTransport",
        ("torch module",),
    ),
    Entry(
        "layer-transport-ungated",
        "The same layer transport for every batch, without the gate.",
        f"{_HERE}.layer_transport:LayerTransportUngated",
        ("torch module",),
    ),
    Entry(
        "mixture-transport",
        "Statistics of all layers aligned with those of the batch's classes, if certified.",
        f"{_HERE}.layer_transport:LayerTransport",
        ("torch module", "state"),
        settings=_MIXTURE,
    ),
    Entry(
        "mixture-transport-ungated",
        "The same mixture transport for every batch, without the gate.",
        f"{_HERE}.layer_transport:LayerTransportUngated",
        ("torch module", "state"),
        settings=_MIXTURE,
    ),
    Entry(
        "tent",
        "Entropy minimisation on normalisation scales and shifts.",
        f"{_HERE}.tent:Tent",
        ("torch module",),
        gradients=True,
        presets=_IMAGENET | _IMAGENET_VIT | _LAYER_NORM,
    ),
    Entry(
        "eata",
        "Entropy minimisation on reliable, non-redundant samples, anchored to the source weights.",
        f"{_HERE}.eata:EATA",
        ("torch module", "source images"),
        gradients=True,
        presets=_eata_presets(redundancy=0.05, fisher_strength=2000.0),
    ),
    Entry(
        "eta",
        "EATA without its penalty on weight changes.",
        f"{_HERE}.eata:EATA",
        ("torch module",),
        gradients=True,
        settings={"fisher_strength": 0.0},
        presets=_eata_presets(redundancy=0.05),
    ),
    Entry(
        "sar",
        "Sharpness-aware entropy minimisation on reliable samples, with recovery.",
        f"{_HERE}.sar:SAR",
        ("torch module",),
        gradients=True,
        presets={"imagenet": {"lr": 2.5e-4}, "imagenet-vit": {"lr": 1e-3}},
    ),
    Entry(
        "cotta",
        "All weights trained on their own average over time and augmentations, restored at random.",
        f"{_HERE}.cotta:CoTTA",
        ("torch module",),
        gradients=True,
        presets={
            "cifar10": {"threshold": 0.92},
            "cifar100": {"threshold": 0.72},
            "imagenet": _COTTA_IMAGENET | {"lr": 0.01},
            "imagenet-vit": _COTTA_IMAGENET | {"lr": 0.005},
        },
    ),
    Entry(
        "note",
        "Instance-aware BatchNorm, and entropy minimisation on a memory balanced over predictions.",
        f"{_HERE}.note:NOTE",
        ("torch module",),
        gradients=True,
    ),
    Entry(
        "rotta",
        "Robust BatchNorm, and a student taught on recent, certain samples of all classes.",
        f"{_HERE}.rotta:RoTTA",
        ("torch module", "images"),
        gradients=True,
    ),
    Entry(
        "deyo",
        "Entropy minimisation on samples that shuffled patches make less certain.",
        f"{_HERE}.deyo:DeYO",
        ("torch module", "images"),
        gradients=True,
        presets={
            "imagenet": _IMAGENET["imagenet"] | {"drop": 0.3},
            "imagenet-vit": {"optimizer": "sgd", "lr": 1e-3},
        },
    ),
    Entry(
        "roid",
        "Likelihood ratio of certain, diverse samples, with averaged weights and a prior.",
        f"{_HERE}.roid:ROID",
        ("torch module", "images"),
        gradients=True,
        presets=_IMAGENET,
    ),
    Entry(
        "pea",
        "The output of every block aligned with the source's moments, weighted by their distance.",
        f"{_HERE}.pea:PEA",
        ("torch module", "residual blocks", "source images"),
        presets={"imagenet": {"jump": 1.0}},
    ),
    Entry(
        "foa",
        "Vision transformer prompts found with forward passes only, and a shift of features.",
        f"{_HERE}.foa:FOA",
        ("torch module", "transformer", "source images"),
        presets={"imagenet-vit": {"population": 28, "strength": 0.4}},
    ),
)
GATED = ("tent+certificate", "tent+referee", "eata+certificate", "eata+referee")


def names() -> list[str]:
    """Names of all registered methods and of the paper's gated ones.

    Any other method can be gated by name too: "sar+referee".

    >>> names()[:2]
    ['frozen', 'source-gda']
    """
    return [entry.name for entry in entries()]


def entries() -> list[Entry]:
    """All registered methods, those of other packages last.

    >>> [entry.name for entry in entries() if entry.gradients][:2]
    ['tent', 'eata']
    """
    known = {entry.name: entry for entry in METHODS}
    gated = [_gated(name, known[inner_and_gate(name)[0]]) for name in GATED]
    ours = {*known, *GATED}
    points = {point.name: point for point in entry_points(group=GROUP) if point.name not in ours}
    return [*METHODS, *gated, *(_load(points[name]) for name in sorted(points))]


def find(name: str) -> Entry:
    """Find a method by name.

    >>> find("sar+referee").gate
    'referee'
    """
    method, gate = inner_and_gate(name)
    for search in (lambda: METHODS, entries):  # entry points are slow to load
        found = {entry.name: entry for entry in search()}
        if name in found:
            return found[name]
        if method in found and found[method].gate is None and gate in GATES:
            return _gated(name, found[method])
    return found[known(name, found, "method")]  # raises


def create(
    name: str,
    model: FrozenModel,
    source: Source | State | str | os.PathLike[str] | None = None,
    *,
    preset: str | None = None,
    gate: Settings | None = None,
    **settings: Any,
) -> Method:
    """Create a method on a model, which it never changes.

    `source` is a fitted state, its file, or a `Source` that can also hold labelled source batches.
    `preset` selects published settings by benchmark; `gate` holds the settings of a gated method's
    gate, all others are the method's own.

    >>> import numpy as np
    >>> from caster import wrap
    >>> method = create("frozen", wrap(lambda batch: (batch, batch), version="example-1"))
    >>> method.predict(np.array([[1.0, 2.0]])).logits
    array([[1., 2.]])
    """
    entry = find(name)
    source = Source.of(source)
    source.check(model)
    chosen = _preset(entry, preset) | settings
    unknown = sorted(chosen.keys() - entry.options().keys())
    if unknown:
        possible = ", ".join(entry.options()) or "none"
        raise CasterError(f"{name} has no setting {unknown[0]!r}: its settings are {possible}")
    if gate is not None and entry.gate is None:
        raise CasterError(f"{name} has no gate to set: name one, as in '{name}+certificate'")
    inner = name if entry.gate is None else inner_and_gate(name)[0]
    method = entry.maker()(model, source, name=inner, **(dict(entry.settings) | chosen))
    if entry.gate is None:
        return method
    return Gated(method, make_gate(entry.gate, model, source, **(gate or {})))


def _preset(entry: Entry, preset: str | None) -> dict[str, Any]:
    if preset is None:
        return {}
    if preset not in entry.presets:
        known = ", ".join(entry.presets) or "none"
        raise CasterError(f"{entry.name} has no preset {preset!r}: its presets are {known}")
    return dict(entry.presets[preset])


def _gated(name: str, inner: Entry) -> Entry:
    """The entry of a method behind the gate its name ends with."""
    gate = inner_and_gate(name)[1]
    return replace(
        inner,
        name=name,
        summary=f"{inner.name}, if the {gate} accepts the batch.",
        needs=tuple(dict.fromkeys((*inner.needs, "state"))),
        gate=gate,
    )


def _load(point: EntryPoint) -> Entry:
    """Load another package's entry; one that fails to load raises when it is used."""
    try:
        entry = point.load()
        if not isinstance(entry, Entry) or entry.name != point.name:
            raise TypeError(
                f"{point.value} is not a caster_bench.methods.Entry named {point.name!r}"
            )
    except Exception as error:  # another package's code may raise anything
        reason = f"{point.name} cannot be loaded from {point.value}: {error}"
        return Entry(point.name, reason, point.value, fault=reason)
    return entry
