"""What methods there are: a line each, what it needs, its published settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from caster.adapt.protocol import Method
from caster.errors import CasterError
from caster_bench.methods.gates import keywords

Need = Literal["torch", "torch module", "transformer", "linear head", "state", "source images"]
Settings = Mapping[str, Any]
EXTRAS = {"torch": "'caster-tta[torch]'", "cma": "'caster-tta[methods]'"}


@dataclass(frozen=True)
class Entry:
    """A method as the registry knows it, without loading it.

    `make` is called with the model, a `Source`, its name and its settings; as text it is
    "module:name", and imported when it is needed. Another package registers one under the entry
    point group "caster_bench.methods".

    >>> Entry("mine", "Does nothing.", make="caster.adapt.frozen:Frozen").gradients
    False
    """

    name: str
    line: str  # what it does, in one line
    make: str | Callable[..., Method]
    needs: tuple[Need, ...] = ()
    gradients: bool = False
    settings: Settings = field(default_factory=dict)  # that make this one of several
    presets: Mapping[str, Settings] = field(default_factory=dict)  # published, by benchmark
    gate: str | None = None  # that it is behind

    def maker(self) -> Callable[..., Method]:
        """What makes the method."""
        if not isinstance(self.make, str):
            return self.make
        home, _, attribute = self.make.partition(":")
        try:
            made: Callable[..., Method] = getattr(import_module(home), attribute)
        except AttributeError:
            raise CasterError(f"{self.name} cannot be made: there is no {self.make}") from None
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("caster"):
                raise
            wanted = EXTRAS.get(error.name or "", error.name)
            raise CasterError(f"{self.name} needs {error.name}: pip install {wanted}") from None
        return made

    def options(self) -> dict[str, Any]:
        """Its settings and their defaults."""
        own = keywords(self.maker())
        return {name: self.settings.get(name, own[name]) for name in own if name != "name"}


_GRADIENT = "caster_bench.methods.gradient"
_TRANSPORT = "caster_bench.methods.transport"
_LAYERS = "caster.adapt.layer_transport"
_IMAGENET = {"imagenet": {"optimizer": "sgd", "lr": 2.5e-4}}
_IMAGENET_VIT = {"imagenet-vit": {"optimizer": "sgd", "lr": 1e-3, "norms": ("layer",)}}
_COTTA_IMAGENET = {"optimizer": "sgd", "threshold": 0.1, "restore": 0.001, "symmetric": True}
_EATA_IMAGENET = {"redundancy": 0.05, "fisher_strength": 2000.0}

OWN = (
    Entry("frozen", "The frozen model's own answer.", "caster.adapt.frozen:Frozen"),
    Entry(
        "source-gda",
        "Gaussian discriminant of the source, nothing transported.",
        "caster_bench.methods.source_gda:SourceGDA",
        ("state",),
    ),
    Entry(
        "caster",
        "Class moments transported to the batch, if its certificate allows.",
        f"{_TRANSPORT}:Caster",
        ("state",),
    ),
    Entry(
        "caster-ungated",
        "The same transport whatever the certificate says.",
        f"{_TRANSPORT}:Ungated",
        ("state",),
    ),
    Entry(
        "caster-no-transport",
        "Ablation: the classifier of caster with the identity for a map.",
        f"{_TRANSPORT}:NoTransport",
        ("state",),
    ),
    Entry(
        "caster-mixed-metric",
        "Ablation: gated by a Euclidean residual over a Mahalanobis margin.",
        f"{_TRANSPORT}:MixedMetric",
        ("state",),
    ),
    Entry(
        "knn",
        "Majority among the nearest source features.",
        "caster_bench.methods.knn:KNN",
        ("torch", "source images"),
    ),
    Entry(
        "t3a",
        "Class prototypes from confident test features, in place of the classifier's rows.",
        "caster_bench.methods.t3a:T3A",
        ("torch", "linear head"),
        presets={
            "cifar10": {"filter_k": 100},
            "cifar100": {"filter_k": 100},
            "imagenet-vit": {"filter_k": 20},
        },
    ),
    Entry(
        "coral",
        "The batch's features given the source's mean and covariance, then the frozen classifier.",
        "caster_bench.methods.coral:Coral",
        ("torch", "linear head", "source images"),
    ),
    Entry(
        "linear-tca",
        "Test features aligned to the confident ones among them, then the frozen classifier.",
        "caster_bench.methods.linear_tca:LinearTCA",
        ("torch", "linear head"),
    ),
    Entry(
        "bn-adapt",
        "BatchNorm by the batch's statistics, shrunk towards the source's.",
        "caster_bench.methods.batchnorm:BNAdapt",
        ("torch module",),
    ),
    Entry(
        "layer-transport",
        "Shallow layers' statistics carried back to the source's, if its own certificate allows.",
        f"{_LAYERS}:LayerTransport",
        ("torch module",),
    ),
    Entry(
        "layer-transport-ungated",
        "The same transport of layers whatever the certificate says.",
        f"{_LAYERS}:LayerTransportUngated",
        ("torch module",),
    ),
    Entry(
        "tent",
        "Entropy minimisation on normalisation scales and shifts.",
        f"{_GRADIENT}.tent:Tent",
        ("torch module",),
        gradients=True,
        presets=_IMAGENET | _IMAGENET_VIT,
    ),
    Entry(
        "eata",
        "Entropy minimisation on reliable, not redundant samples, near the source's weights.",
        f"{_GRADIENT}.eata:EATA",
        ("torch module", "source images"),
        gradients=True,
        presets={
            "cifar100": {"redundancy": 0.1},
            "imagenet": _IMAGENET["imagenet"] | _EATA_IMAGENET,
            "imagenet-vit": _IMAGENET_VIT["imagenet-vit"] | _EATA_IMAGENET,
        },
    ),
    Entry(
        "eta",
        "EATA without its hold on the source's weights.",
        f"{_GRADIENT}.eata:EATA",
        ("torch module",),
        gradients=True,
        settings={"fisher_strength": 0.0},
        presets={
            "cifar100": {"redundancy": 0.1},
            "imagenet": _IMAGENET["imagenet"] | {"redundancy": 0.05},
            "imagenet-vit": _IMAGENET_VIT["imagenet-vit"] | {"redundancy": 0.05},
        },
    ),
    Entry(
        "sar",
        "Sharpness-aware entropy minimisation on reliable samples, with recovery.",
        f"{_GRADIENT}.sar:SAR",
        ("torch module",),
        gradients=True,
        presets={"imagenet": {"lr": 2.5e-4}, "imagenet-vit": {"lr": 1e-3}},
    ),
    Entry(
        "cotta",
        "All weights taught by their own average over time and augmentations, restored at random.",
        f"{_GRADIENT}.cotta:CoTTA",
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
        "foa",
        "Prompts of a vision transformer found by forward passes alone, and a shift of features.",
        "caster_bench.methods.foa:FOA",
        ("torch module", "transformer", "source images"),
        presets={"imagenet-vit": {"population": 28, "strength": 0.4}},
    ),
)
