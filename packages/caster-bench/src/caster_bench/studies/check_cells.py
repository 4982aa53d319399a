"""Check admissions and `cell.json` of every cell against the sweep and one another."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caster.config import Settings
from caster.errors import CasterError
from caster.io.files import file_digest
from caster_bench.records.schema import DONE, Admission, Cell
from caster_bench.records.store import Listing, Records, admission_path, read_admission
from caster_bench.studies.check_gates import CONSTANTS
from caster_bench.studies.naming import CERTIFICATE, OWN
from caster_bench.sweeps import Spec, Sweep
from caster_bench.sweeps.spec import CLASS_ORDERED, GATE, PRESET, frozen_value, inner_and_gate

MAX_SHOWN = 5  # per kind; the rest are counted
MISSING, UNADMITTED, LEFT = "missing", "admission missing", "left by a killed run"
OF_ANOTHER = "not of this sweep"
DAMAGED, CHANGED = "changed or damaged", "admission changed or damaged"
Pair = tuple[str, str]  # backbone and data
Admissions = dict[Pair, Admission]
SOFTWARE = ("python", "numpy", "torch", "caster")  # versions that must be stated
HARDWARE = ("device", "cpu")  # a CPU is its own device
Cells = dict[Spec, Cell]


@dataclass(frozen=True, order=True)
class Problem:
    """What is wrong, and where.

    >>> print(Problem("missing", "resnet18 on cifar10, fog-3: tent"))
    missing: resnet18 on cifar10, fog-3: tent
    """

    kind: str  # the same text for the same fault
    where: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}"


def lines(problems: Iterable[Problem], shown: int = MAX_SHOWN) -> list[str]:
    """Format problems by kind, with counts and the first few locations.

    >>> lines([Problem("missing", "a"), Problem("missing", "b"), Problem("foreign", "c")], shown=1)
    ['foreign (1)', '  c', 'missing (2)', '  a', '  and 1 more']
    """
    kinds: dict[str, list[str]] = {}
    for problem in sorted(problems):
        kinds.setdefault(problem.kind, []).append(problem.where)
    text = []
    for kind, where in kinds.items():
        text += [f"{kind} ({len(where)})", *(f"  {each}" for each in where[:shown])]
        if len(where) > shown:
            text.append(f"  and {len(where) - shown} more")
    return text


def read_admissions(out: Records, pairs: Iterable[Pair]) -> tuple[Admissions, list[Problem]]:
    """Read admissions, and report those that cannot be read."""
    admissions: Admissions = {}
    problems = []
    for pair in pairs:
        path = admission_path(out, "--".join(pair))
        try:
            admissions[pair] = read_admission(path)
        except CasterError as error:
            problems.append(Problem(CHANGED if path.exists() else UNADMITTED, str(error)))
    return admissions, problems


def foreign_files(there: Listing, sweep: Sweep) -> list[Problem]:
    """Report admissions and packed streams that do not belong to the sweep."""
    pairs = {f"{spec.backbone}--{spec.data}" for spec in sweep.cells}
    data = {spec.data for spec in sweep.cells}
    paths = [path for path in there.admissions if path.stem not in pairs]
    paths += [path for path in there.streams if path.stem not in data]
    return [Problem(OF_ANOTHER, str(path)) for path in paths]


def check_admissions(admissions: Admissions, sweep: Sweep) -> Iterator[Problem]:
    """Check admissions against the sweep."""
    for admission in admissions.values():
        for kind in _admission_faults(admission, sweep):
            yield Problem(kind, f"{admission.backbone} on {admission.data}")


def compared(sweep: Sweep, recorded: Container[str], root: Path | None = None) -> str:
    """Say how many checkpoint files exist and were compared with the records.

    Backbones that are not `recorded` have no digest in their records to compare with.
    """
    files = {name: own.checkpoint for name, own in sweep.backbones.items() if own.is_file}
    there = sum(
        name in recorded and ((root or Path()) / file).is_file() for name, file in files.items()
    )
    return f"{there} of {len(files)} checkpoint files compared"


def _admission_faults(admission: Admission, sweep: Sweep) -> Iterator[str]:
    yield from _other_inputs(admission, sweep)
    pinned = sweep.backbones[admission.backbone].sha256
    threshold = sweep.data[admission.data].threshold
    if pinned is not None and admission.checkpoint not in (None, pinned):
        yield "the checkpoint is not the one the sweep names"
    if admission.threshold != threshold:
        yield "admitted with a threshold other than the sweep's"
    if not admission.admitted and not admission.reason:
        yield "rejected without a reason"
    if not admission.admitted:
        return
    if admission.checkpoint is None or admission.moments is None:
        yield "admitted without checkpoint or moments"
    if threshold is not None and (admission.accuracy is None or admission.accuracy < threshold):
        yield "admitted below the threshold"


def _other_inputs(admission: Admission, sweep: Sweep) -> Iterator[str]:
    """Family and data that are not what the sweep states, although its names are the same.

    A run records what its sweep stated; images that were read state their name and number too. Only
    a rejected backbone may have read none.
    """
    data, family = sweep.data[admission.data], sweep.backbones[admission.backbone].family
    stated = admission.seen.get("backbone", {}) | admission.seen.get("data", {})
    if absent := {"family", "source", "source_limit", "target", "target_limit"} - stated.keys():
        yield f"not stated: {', '.join(sorted(absent))}"
        return
    if stated["family"] != family:
        yield "the family is not the one the sweep names"
    for part, wanted, limit, images in (
        ("source", data.source, data.source_limit, admission.source),
        ("target", data.target, data.target_limit, admission.target),
    ):
        if images is None and not admission.admitted:
            images = {"name": wanted, "n": 0}
        if images is None or not {"name", "n"} <= images.keys():
            yield f"the {part} images are not stated"
            continue
        if stated[part] != wanted or not _is_named(images["name"], wanted):
            yield f"the {part} data are not those the sweep names"
        if stated[f"{part}_limit"] != limit or (limit is not None and images["n"] > limit):
            yield f"the limit of the {part} data is not the sweep's"


def _is_named(name: str, wanted: str) -> bool:
    """Whether images have the name that a sweep gives their source, in full or not.

    >>> _is_named("imagenet-a:test", "imagenet-a"), _is_named("cifar100:test", "cifar10:test")
    (True, False)
    """
    return name in (wanted, str(Path(wanted))) or name.startswith(f"{wanted}:")


def check_files(
    cells: Cells, admissions: Admissions, sweep: Sweep, root: Path
) -> Iterator[Problem]:
    """Check that checkpoint files which exist here are among those that were recorded."""
    recorded = {(own, admission.checkpoint) for (own, _), admission in admissions.items()}
    recorded |= {(spec.backbone, cell.identity.get("checkpoint")) for spec, cell in cells.items()}
    for name, backbone in sweep.backbones.items():
        digests = {digest for own, digest in recorded if own == name} - {None}
        path = root / backbone.checkpoint
        if backbone.is_file and digests and path.is_file() and file_digest(path) not in digests:
            yield Problem("the checkpoint is not the one that was admitted", name)


def check_cells(cells: Cells, admissions: Admissions, sweep: Sweep) -> Iterator[Problem]:
    """Check every cell on its own, and cells of one backbone or data set against each other."""
    constants = Settings(**sweep.constants)
    for spec, cell in cells.items():
        for kind in _cell_faults(spec, cell, constants):
            yield Problem(kind, spec.full)
        admission = admissions.get((spec.backbone, spec.data))
        if admission is not None:  # its absence is reported separately
            for kind in _disagreements(cell, admission):
                yield Problem(kind, spec.full)
    yield from _differences(cells, sweep)


def _cell_faults(spec: Spec, cell: Cell, constants: Settings) -> Iterator[str]:
    if _constants(cell.identity.get("constants")) != constants:
        yield "constants differ from the sweep's"
    settings = cell.identity.get("settings")
    if not isinstance(settings, dict):
        yield "method settings not stated"
    elif not _as_given(spec, settings):
        yield "method settings differ from the sweep's"
    for name in SOFTWARE:
        if not cell.software.get(name):
            yield f"software not stated: {name}"
    for name in HARDWARE:
        if not cell.hardware.get(name):
            yield f"hardware not stated: {name}"
    if cell.status != DONE:
        return
    before, after = cell.frozen.get("before"), cell.frozen.get("after")
    if not before or before != after:
        yield "the frozen model changed while the cell ran"
    if cell.method.get("settings") != cell.identity.get("settings"):
        yield "method settings differ from the cell's identity"
    if type(cell.method.get("inert")) is not bool:
        yield "not stated whether the method is inert"
    ordered = cell.stream.get("class_ordered")
    if type(ordered) is not bool:
        yield "not stated whether the stream is class-ordered"
    elif ordered and spec.order not in CLASS_ORDERED:
        yield "class-ordered stream without a class-ordered spec"


def _as_given(spec: Spec, settings: dict[str, Any]) -> bool:
    """Whether resolved settings match the sweep's, and no other constant of caster is set.

    >>> spec = Spec("r18", "digits", "caster", (("tau", 3.0),))
    >>> tried = {"tau": 3.0, "lam": None}, {"tau": 0.8, "lam": None}, {"tau": 3.0, "lam": 1.0}
    >>> [_as_given(spec, settings) for settings in tried]
    [True, False, False]
    """
    inner, gate = inner_and_gate(spec.method)
    gate_settings = settings.get(GATE)
    parts = [(spec.given, settings, inner.startswith(OWN))]
    if gate:
        given = spec.given.get(GATE, {})
        parts.append(
            (given, gate_settings if isinstance(gate_settings, dict) else {}, gate == CERTIFICATE)
        )
    for given, resolved, own in parts:
        wanted = {name: value for name, value in given.items() if name not in (GATE, PRESET)}
        if any(frozen_value(resolved.get(name)) != value for name, value in wanted.items()):
            return False
        if own and any(resolved.get(name) is not None for name in CONSTANTS - wanted.keys()):
            return False
    return True


def _constants(constants: Any) -> Settings | None:
    """Constants of a cell; None if one is missing, unknown or invalid."""
    if not isinstance(constants, dict) or constants.keys() != CONSTANTS:
        return None
    try:
        return Settings(**constants)
    except CasterError:
        return None


def _disagreements(cell: Cell, admission: Admission) -> Iterator[str]:
    """Disagreements between a cell and the admission of its source.

    Files of the same weights may have different bytes, so a checkpoint is known by its moments, and
    by the weights in memory, which all cells of a backbone must share.
    """
    for name, kind in (
        ("moments", "moments differ from the source's"),
        ("source", "source data differ from the admitted ones"),
        ("target", "target data differ from the admitted ones"),
        ("classes", "classes differ from the admitted ones"),
    ):
        if cell.identity.get(name) != getattr(admission, name):
            yield kind
    if (cell.status == DONE) != admission.admitted:
        yield "rejected though admitted" if admission.admitted else "done though rejected"
    if cell.status != DONE and (not cell.reason or cell.reason != admission.reason):
        yield "rejected without the source's reason"
    stated = {name: getattr(admission, name) for name in ("accuracy", "n", "threshold")}
    if {name: cell.admission.get(name) for name in stated} != stated:
        yield "admission differs from the source's"


def _differences(cells: Cells, sweep: Sweep) -> Iterator[Problem]:
    """Report cells that differ from the first with the same backbone, data, method or timing.

    A method has one revision on all backbones of a family, because tables pool a family, and a
    revision has the same settings everywhere. Reports name methods that have several revisions in a
    sweep.
    """
    first: dict[tuple[Any, ...], Any] = {}
    timed = frozenset(sweep.of("cost"))
    for spec, cell in cells.items():
        hardware = cell.hardware if cell.status == DONE else None
        family = sweep.backbones[spec.backbone].family
        pairs: dict[tuple[Any, ...], Any] = {
            ("the version of caster",): cell.software.get("caster"),
            ("the choice of settings", spec.method, spec.settings, cell.revision): _resolved(cell),
            ("the revision of a method", _method(spec), family): cell.revision,
            ("the hardware of the cost study",): hardware if spec in timed else None,
            ("the source data", spec.data): cell.identity.get("source"),
            ("the target data", spec.data): cell.identity.get("target"),
            ("the number of classes", spec.data): cell.identity.get("classes"),
            ("the frozen model", spec.backbone): cell.frozen.get("before"),
        }
        pairs |= _defaults(spec, cell)
        for key, value in pairs.items():
            # a cell rejected for lack of a checkpoint leaves the rest empty
            if value is not None and first.setdefault(key, value) != value:
                yield Problem(f"{key[0]} differs between cells", spec.full)


def _method(spec: Spec) -> str:
    """A method with or without its gate, or behind another one: they share their revision.

    >>> _method(Spec("resnet18", "cifar10", "mixture-transport-ungated"))
    'mixture-transport'
    """
    return inner_and_gate(spec.method)[0].removesuffix("-ungated")


def _defaults(spec: Spec, cell: Cell) -> dict[tuple[Any, ...], Any]:
    """Settings that the sweep leaves at their defaults.

    They must be the same in all cells of a method's revision. Gates have no revision, so theirs
    must be the same in all cells.
    """
    inner, gate = inner_and_gate(spec.method)
    settings = _resolved(cell) or {}
    own = settings.get(GATE)
    parts: list[tuple[Any, ...]] = []
    if PRESET not in spec.given:
        parts.append(((inner, cell.revision), spec.given, settings))
    if isinstance(own, dict):
        parts.append((gate, spec.given.get(GATE, {}), own))
    return {
        ("the default of a setting", owner, name): value
        for owner, given, resolved in parts
        for name, value in resolved.items()
        if name not in given and name != GATE
    }


def _resolved(cell: Cell) -> dict[str, Any] | None:
    """All settings of a cell's method except the seed, which belongs to the stream."""
    settings = cell.identity.get("settings")
    if not isinstance(settings, dict):  # reported separately
        return None
    return {name: value for name, value in settings.items() if name != "seed"}
