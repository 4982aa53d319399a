"""A sweep in memory: its vocabulary, its cells, and parts of it.

Names of corruptions, orders, schedules and networks are defined here rather than in
`caster_bench.data` and `caster_bench.engine`, because reports read sweeps and must not import
either.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from itertools import chain
from typing import Any

from caster.errors import CasterError

CORRUPTION_FAMILIES = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
}
REPORTED = tuple(chain.from_iterable(CORRUPTION_FAMILIES.values()))
SPARE = ("speckle_noise", "gaussian_blur", "spatter", "saturate")  # constants are chosen on these
GROUPS = {"all": REPORTED + SPARE, "reported": REPORTED, "spare": SPARE}
CLEAN = "clean"
SEVERITIES = (1, 2, 3, 4, 5)
SCHEDULES = ("each", "continual", "gradual", "mixed")
RECURRING = "recurring"  # a continual stream that goes through its conditions again
LAST = ("keep", "drop")
FAMILIES = ("batch", "batch-plain", "layer")
TRAINED_NETWORKS = (  # by `caster bench train`; the small ones are for tests
    *("resnet18", "resnet50", "convnext_tiny", "vit_base", "deit_base", "swin_tiny"),
    *("mini-resnet", "mini-convnext", "mini-vit", "mini-deit", "mini-swin"),
)
PUBLISHED_NETWORKS = ("keras_resnet50", "efficientnet_lite0")  # see benchmarks/real/published.py
ORDERS: dict[str, tuple[str, ...]] = {  # and their settings
    "shuffled": (),
    "file": (),
    "by-class": (),
    "dirichlet": ("concentration", "slots"),
    "long-tailed": ("imbalance",),
    "runs": ("shortest", "longest"),
    "turning": (),
}
CLASS_ORDERED = ("by-class", "dirichlet", "runs", "turning")  # batches lack classes on purpose
THRESHOLDS = {"cifar10": 0.85, "cifar100": 0.55}  # of clean accuracy, from the paper
TUNING = "tuning"
STUDIES = (  # the paper's results, then aligned layers, then how settings were chosen
    "estimators",
    "certificate",
    "gate",
    "corruption",
    "coverage",
    "specificity",
    "cost",
    "layers",
    TUNING,
)
GATE = "gate"  # the one setting that is itself a table
PRESET = "preset"  # the setting that stands for several others


def known(name: object, names: Iterable[str], what: str) -> str:
    """Return the name if it is one of these, else raise with the closest one in any case.

    >>> known("foggy", ["fog", "snow"], "corruption")
    Traceback (most recent call last):
        ...
    caster.errors.CasterError: there is no corruption 'foggy': did you mean 'fog'?
    """
    names = list(names)
    if isinstance(name, str) and name in names:
        return name
    raise CasterError(f"there is no {what} {name!r}: {closest(name, names)}")


def closest(name: object, names: Sequence[str]) -> str:
    """Suggest the closest name in any case, or else all of them."""
    folded = {each.casefold(): each for each in names}
    near = [folded[each] for each in get_close_matches(str(name).casefold(), folded, n=1)]
    return f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(names) or 'none'}"


def inner_and_gate(method: str) -> tuple[str, str]:
    """Split a method into the inner method and its gate; the gate is empty if there is none.

    >>> inner_and_gate("tent+referee"), inner_and_gate("tent")
    (('tent', 'referee'), ('tent', ''))
    """
    inner, _, gate = method.partition("+")
    return inner, gate


@dataclass(frozen=True)
class Spec:
    """A cell: backbone, data under conditions, stream, and method with its settings.

    >>> spec = Spec(backbone="resnet18", data="cifar10", method="tent", conditions=(("fog", 3),))
    >>> spec.title
    'resnet18 on cifar10, fog-3: tent'
    """

    backbone: str  # key of the sweep's backbones
    data: str  # key of the sweep's data
    method: str  # as listed by `caster methods`
    settings: tuple[tuple[str, Any], ...] = ()  # of the method, sorted; may include `preset`
    conditions: tuple[tuple[str, int], ...] = ()  # corruption and severity; empty: clean
    schedule: str = "each"  # or, for several conditions in one stream: continual, gradual, mixed
    order: str = "shuffled"
    order_settings: tuple[tuple[str, Any], ...] = ()  # see ORDERS
    batch_size: int = 64
    last: str = "keep"
    seed: int = 0  # of the stream, the corruptions and the method
    alone: bool = False  # on an idle device with its own forward pass, to measure cost

    @property
    def condition(self) -> str:
        """Name in tables: "fog-3", "clean", or the schedule of several conditions."""
        if not self.conditions:
            return "clean"
        if self.schedule != "each":
            return self.schedule_name
        ((corruption, severity),) = self.conditions
        return f"{corruption}-{severity}"

    @property
    def schedule_name(self) -> str:
        """The schedule, or "recurring" if a continual stream returns to a condition.

        >>> Spec("r", "d", "tent", conditions=(("fog", 5),) * 3, schedule="continual").schedule_name
        'recurring'
        """
        returns = len(set(self.conditions)) < len(self.conditions)
        return RECURRING if self.schedule == "continual" and returns else self.schedule

    @property
    def label(self) -> str:
        """The method with its settings.

        >>> Spec("r", "d", "tent+referee", (("gate", (("agreement", 0.9),)), ("lr", 0.1))).label
        'tent+referee (agreement 0.9, lr 0.1)'
        """
        pairs = (value if name == GATE else ((name, value),) for name, value in self.settings)
        given = ", ".join(f"{name} {value}" for name, value in chain.from_iterable(pairs))
        return f"{self.method} ({given})" if given else self.method

    @property
    def title(self) -> str:
        """Short name of the cell."""
        return f"{self.backbone} on {self.data}, {self.condition}: {self.label}"

    @property
    def full(self) -> str:
        """Unambiguous name of the cell.

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
        """Key shared by all methods on one stream: one frozen pass serves them."""
        return replace(self, method="frozen", settings=())

    @property
    def given(self) -> dict[str, Any]:
        """Settings for `methods.create`, with those of the gate as a dict.

        >>> Spec("r", "d", "tent+referee", (("gate", (("least", 0.9),)), ("lr", 0.1))).given
        {'gate': {'least': 0.9}, 'lr': 0.1}
        """
        return {name: dict(value) if name == GATE else value for name, value in self.settings}

    def plain(self) -> dict[str, Any]:
        """The fields as JSON values; the inverse of `of`."""
        return {name: _listed(getattr(self, name)) for name in self.__dataclass_fields__}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Spec:
        """Build the cell that `plain` describes.

        >>> spec = Spec("resnet18", "cifar10", "caster", (("tau", 3.0),), (("fog", 3),))
        >>> Spec.of(spec.plain()) == spec
        True
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(plain, dict) or sorted(plain) != sorted(names):
            raise CasterError(f"a cell has exactly the fields {', '.join(names)}")
        return cls(**{name: frozen_value(value) for name, value in plain.items()})


def frozen_value(value: Any) -> Any:
    """Make a value hashable: tuples for lists, sorted pairs for tables."""
    if isinstance(value, dict):
        return tuple((name, frozen_value(value[name])) for name in sorted(value))
    return tuple(map(frozen_value, value)) if isinstance(value, list | tuple) else value


def _listed(value: Any) -> Any:
    return [_listed(each) for each in value] if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Backbone:
    """A model in a sweep."""

    name: str
    family: str  # normalisation, and "batch-plain" for a network trained with crops and flips only
    checkpoint: str  # from `caster bench train`, relative to a run's root; or timm:NAME
    architecture: str | None = None  # required one; None: as the checkpoint says
    group: str | None = None  # shared by one backbone trained with several seeds
    sha256: str | None = None  # of the checkpoint, if pinned

    @property
    def title(self) -> str:
        """Name in tables, shared by all seeds."""
        return self.group or self.name

    @property
    def is_file(self) -> bool:
        """Whether its checkpoint is a file rather than a named model."""
        return not self.checkpoint.startswith("timm:")


@dataclass(frozen=True)
class Data:
    """Source and target data in a sweep."""

    name: str
    source: str  # as in `caster data`: cifar10:train, or a path
    target: str
    threshold: float | None = None  # required clean accuracy; None: no head is used
    source_limit: int | None = None  # maximum number of images
    target_limit: int | None = None


@dataclass(frozen=True)
class Sweep:
    """All cells in the order they are run, with their studies."""

    name: str
    title: str
    constants: dict[str, Any]  # of caster, where not the defaults
    backbones: dict[str, Backbone]
    data: dict[str, Data]
    cells: dict[Spec, frozenset[str]]  # cell: studies
    sha256: str  # of the file
    origins: dict[Spec, str] = field(default_factory=dict)  # file and first grid, for errors

    def of(self, study: str) -> list[Spec]:
        """Return the cells of one study."""
        return [spec for spec, studies in self.cells.items() if study in studies]


def part_of(
    sweep: Sweep,
    studies: Collection[str] | None = None,  # None means all
    backbones: Collection[str] | None = None,
    methods: Collection[str] | None = None,
) -> Sweep:
    """Restrict a sweep to some studies, backbones and methods."""
    wanted = frozenset(STUDIES if studies is None else studies)
    cells = {
        spec: own & wanted
        for spec, own in sweep.cells.items()
        if own & wanted
        and (backbones is None or spec.backbone in backbones)
        and (methods is None or spec.method in methods)
    }
    return _with_cells(sweep, cells)


def without(sweep: Sweep, left_out: Mapping[str, Collection[str]]) -> Sweep:
    """Remove some backbones from some studies of a sweep."""
    cells = {
        spec: kept
        for spec, own in sweep.cells.items()
        if (kept := frozenset(s for s in own if spec.backbone not in left_out.get(s, ())))
    }
    return _with_cells(sweep, cells)


def select(
    sweep: Sweep,
    only: Sequence[str] = (),  # studies; empty means all
    backbones: Sequence[str] = (),  # likewise
    methods: Sequence[str] = (),  # likewise
) -> Sweep:
    """Apply the options `--only`, `--backbone` and `--method` to a sweep."""
    for name in only:
        if name not in STUDIES:
            raise CasterError(f"there is no study {name!r}: choose from {', '.join(STUDIES)}")
    for name in backbones:
        known(name, sweep.backbones, f"backbone of {sweep.name} called")
    for name in methods:
        known(name, sorted({spec.method for spec in sweep.cells}), f"method of {sweep.name} called")
    part = part_of(sweep, only or None, backbones or None, methods or None)
    if not part.cells:
        study = (
            f" of the {'study' if len(only) == 1 else 'studies'} {', '.join(only)}" if only else ""
        )
        named = (*backbones, *methods)
        of = f" for {', '.join(named)}" if named else ""
        raise CasterError(f"{sweep.name} has no cells{study}{of}")
    return part


def _with_cells(sweep: Sweep, cells: dict[Spec, frozenset[str]]) -> Sweep:
    """Restrict a sweep to these cells; the same object if that is all of them."""
    if cells == sweep.cells:
        return sweep
    names = {spec.backbone for spec in cells}
    backbones = {name: backbone for name, backbone in sweep.backbones.items() if name in names}
    return replace(sweep, cells=cells, backbones=backbones)
