"""One cell of a sweep, as the sweep file names it, and nothing that depends on a file's content."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

from caster.errors import CasterError

STUDIES = (  # each has tables and figures of its own: the paper's results, and layer transport
    "estimators",
    "certificate",
    "gate",
    "corruption",
    "coverage",
    "specificity",
    "cost",
    "layers",
)
GATE = "gate"  # the one setting that is a table of settings
PRESET = "preset"  # the one that stands for several


@dataclass(frozen=True)
class Spec:
    """A backbone, data under conditions, a stream of them, and a method with its settings.

    >>> spec = Spec(backbone="resnet18", data="cifar10", method="tent", conditions=(("fog", 3),))
    >>> spec.title
    'resnet18 on cifar10, fog-3: tent'
    """

    backbone: str  # in the sweep's table of backbones
    data: str  # in the sweep's table of data
    method: str  # as `caster methods` names it
    settings: tuple[tuple[str, Any], ...] = ()  # of the method, sorted; `preset` among them
    conditions: tuple[tuple[str, int], ...] = ()  # corruption and severity; none: clean
    schedule: str = "each"  # or several conditions in one stream: continual, gradual, mixed
    order: str = "shuffled"
    order_settings: tuple[tuple[str, Any], ...] = ()  # concentration, slots, imbalance
    batch_size: int = 64
    last: str = "keep"
    seed: int = 0  # of the stream, the corruptions and the method
    alone: bool = False  # on an idle device, with a forward pass of its own: for its cost

    @property
    def condition(self) -> str:
        """As tables have it: "fog-3", "clean", or the schedule of several."""
        if not self.conditions:
            return "clean"
        if self.schedule != "each":
            return self.schedule
        ((corruption, severity),) = self.conditions
        return f"{corruption}-{severity}"

    @property
    def label(self) -> str:
        """The method with the settings it was given.

        >>> Spec("r", "d", "tent+referee", (("gate", (("agreement", 0.9),)), ("lr", 0.1))).label
        'tent+referee (agreement 0.9, lr 0.1)'
        """
        pairs = (value if name == GATE else ((name, value),) for name, value in self.settings)
        given = ", ".join(f"{name} {value}" for name, value in chain.from_iterable(pairs))
        return f"{self.method} ({given})" if given else self.method

    @property
    def title(self) -> str:
        """The cell in words."""
        return f"{self.backbone} on {self.data}, {self.condition}: {self.label}"

    @property
    def full(self) -> str:
        """The title, and what tells the cell from others of that title.

        >>> Spec("r18", "digits", "tent", seed=1, order="by-class", alone=True).full
        'r18 on digits, clean: tent; by-class batches of 64, seed 1, alone'
        """
        options = "".join(f" {name} {value}" for name, value in self.order_settings)
        last = ", the last dropped" if self.last == "drop" else ""
        return (
            f"{self.title}; {self.order}{options} batches of {self.batch_size}{last}, "
            f"seed {self.seed}{', alone' if self.alone else ''}"
        )

    @property
    def stream(self) -> Spec:
        """The same for all methods that meet the same stream: one frozen pass serves them."""
        return replace(self, method="frozen", settings=())

    @property
    def given(self) -> dict[str, Any]:
        """Settings of the method as `methods.create` takes them, those of its gate a dict.

        >>> Spec("r", "d", "tent+referee", (("gate", (("least", 0.9),)), ("lr", 0.1))).given
        {'gate': {'least': 0.9}, 'lr': 0.1}
        """
        return {name: dict(value) if name == GATE else value for name, value in self.settings}

    def plain(self) -> dict[str, Any]:
        """The fields in values that JSON has, from which `of` makes the same cell again."""
        return {name: _listed(getattr(self, name)) for name in self.__dataclass_fields__}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Spec:
        """The cell that `plain` describes.

        >>> spec = Spec("resnet18", "cifar10", "caster", (("tau", 3.0),), (("fog", 3),))
        >>> Spec.of(spec.plain()) == spec
        True
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(plain, dict) or sorted(plain) != sorted(names):
            raise CasterError(f"a cell has the fields {', '.join(names)}, and no others")
        return cls(**{name: frozen_value(value) for name, value in plain.items()})


def frozen_value(value: Any) -> Any:
    """A value that can be compared and hashed: tuples for lists, sorted pairs for tables."""
    if isinstance(value, dict):
        return tuple((name, frozen_value(value[name])) for name in sorted(value))
    return tuple(map(frozen_value, value)) if isinstance(value, list | tuple) else value


def _listed(value: Any) -> Any:
    return [_listed(each) for each in value] if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Backbone:
    """A model of a sweep."""

    name: str
    family: str  # "batch" or "layer": the normalisation tables group it by
    checkpoint: str  # of `caster bench train`, relative to a run's root; or a model: timm:NAME
    architecture: str | None = None  # what it must be; None where the checkpoint says
    group: str | None = None  # one backbone trained with several seeds has one group
    sha256: str | None = None  # what the checkpoint must have

    @property
    def title(self) -> str:
        """What tables call it, seeds taken together."""
        return self.group or self.name

    @property
    def is_file(self) -> bool:
        """Whether its checkpoint is a file, and not a model by name."""
        return not self.checkpoint.startswith("timm:")


@dataclass(frozen=True)
class Data:
    """Source and target of a sweep."""

    name: str
    source: str  # as `caster data` names it: cifar10:train, or a path
    target: str
    threshold: float | None = None  # clean accuracy a checkpoint must have; None: no head is used
    source_limit: int | None = None  # images at most
    target_limit: int | None = None


@dataclass(frozen=True)
class Sweep:
    """All cells, in the order they are run, and which studies each belongs to."""

    name: str
    title: str
    constants: dict[str, Any]  # of caster, where they are not the defaults
    backbones: dict[str, Backbone]
    data: dict[str, Data]
    cells: dict[Spec, frozenset[str]]  # cell: studies
    sha256: str  # of the file

    def of(self, study: str) -> list[Spec]:
        """Cells of one study."""
        return [spec for spec, studies in self.cells.items() if study in studies]
