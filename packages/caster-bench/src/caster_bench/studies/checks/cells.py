"""Whether `cell.json` of every cell says what the sweep, the sources and the others say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from caster.config import Settings, recorded
from caster.errors import CasterError
from caster_bench.records import DONE, Admission, Cell
from caster_bench.studies.checks.gates import CONSTANTS
from caster_bench.studies.checks.problem import Problem
from caster_bench.studies.checks.sources import Admissions
from caster_bench.studies.method_names import CERTIFICATE, OWN, inner_and_gate
from caster_bench.sweeps import Spec, Sweep
from caster_bench.sweeps.names import CLASS_ORDERED
from caster_bench.sweeps.spec import GATE, PRESET, frozen_value

SOFTWARE = ("python", "numpy", "torch", "caster")  # versions that must be stated
HARDWARE = ("device",)
Cells = dict[Spec, Cell]


def check_cells(cells: Cells, admissions: Admissions, sweep: Sweep) -> Iterator[Problem]:
    """Every cell on its own, and the cells of one backbone or data beside one another."""
    constants = recorded(sweep.constants)
    for spec, cell in cells.items():
        for kind in _faults(spec, cell, constants):
            yield Problem(kind, spec.full)
        admission = admissions.get((spec.backbone, spec.data))
        if admission is not None:  # its absence is a problem of its own
            for kind in _disagreements(cell, admission):
                yield Problem(kind, spec.full)
    yield from _differences(cells, frozenset(sweep.of("cost")))


def _faults(spec: Spec, cell: Cell, constants: Settings) -> Iterator[str]:
    if _settings(cell.identity.get("constants")) != constants:
        yield "other constants than the sweep's"
    settings = cell.identity.get("settings")
    if not isinstance(settings, dict):
        yield "settings of the method not stated"
    elif not _as_given(spec, settings):
        yield "other settings of the method than the sweep's"
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
        yield "other settings of the method than the cell is known by"
    if type(cell.method.get("inert")) is not bool:
        yield "not stated whether the method is inert"
    ordered = cell.stream.get("class_ordered")
    if type(ordered) is not bool:
        yield "not stated whether the stream is class-ordered"
    elif ordered and spec.order not in CLASS_ORDERED:
        yield "a class-ordered stream that nobody asked for"


def _as_given(spec: Spec, settings: dict[str, Any]) -> bool:
    """Whether resolved settings are those of the sweep, and of caster's constants no others.

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


def _settings(given: Any) -> Settings | None:
    try:
        return recorded(given)
    except (AttributeError, TypeError, CasterError):
        return None


def _disagreements(cell: Cell, admission: Admission) -> Iterator[str]:
    """Where a cell and the admission of its source say different things."""
    for name, kind in (
        ("checkpoint", "made from another checkpoint than the one admitted"),
        ("moments", "made from other moments than those of the source"),
        ("source", "made from other source data than was admitted"),
        ("target", "made from other target data than was admitted"),
        ("classes", "made with other classes than were admitted"),
    ):
        if cell.identity.get(name) != getattr(admission, name):
            yield kind
    if (cell.status == DONE) != admission.admitted:
        yield "refused though admitted" if admission.admitted else "done though refused"
    if cell.status != DONE and (not cell.reason or cell.reason != admission.reason):
        yield "refused for another reason than the source's, or for none"
    stated = {name: getattr(admission, name) for name in ("accuracy", "n", "threshold")}
    if {name: cell.admission.get(name) for name in stated} != stated:
        yield "another admission than the source's"


def _differences(cells: Cells, timed: frozenset[Spec]) -> Iterator[Problem]:
    """Cells that differ from the first of the same backbone, data, method or study of times."""
    first: dict[tuple[Any, ...], Any] = {}
    for spec, cell in cells.items():
        hardware = cell.hardware if cell.status == DONE else None
        pairs: dict[tuple[Any, ...], Any] = {
            ("the version of caster",): cell.software.get("caster"),
            ("the choice of settings", spec.method, spec.settings): _resolved(cell),
            ("the hardware of the cost study",): hardware if spec in timed else None,
            ("the checkpoint", spec.backbone): cell.identity.get("checkpoint"),
            ("the source data", spec.data): cell.identity.get("source"),
            ("the target data", spec.data): cell.identity.get("target"),
            ("the number of classes", spec.data): cell.identity.get("classes"),
            ("the frozen model", spec.backbone, spec.data): cell.frozen.get("before"),
        }
        pairs |= _defaults(spec, cell)
        for key, value in pairs.items():
            # a cell refused for want of a checkpoint has nothing to say of the rest
            if value is not None and first.setdefault(key, value) != value:
                yield Problem(f"{key[0]} differs between cells", spec.full)


def _defaults(spec: Spec, cell: Cell) -> dict[tuple[Any, ...], Any]:
    """Settings that the sweep leaves to a method or gate: the same in all of its cells."""
    inner, gate = inner_and_gate(spec.method)
    settings = _resolved(cell) or {}
    own = settings.get(GATE)
    parts = [(inner, spec.given, settings)] if PRESET not in spec.given else []
    parts += [(gate, spec.given.get(GATE, {}), own)] if isinstance(own, dict) else []
    return {
        ("the default of a setting", owner, name): value
        for owner, given, resolved in parts
        for name, value in resolved.items()
        if name not in given and name != GATE
    }


def _resolved(cell: Cell) -> dict[str, Any] | None:
    """All settings of a cell's method, but for the seed, which is the stream's."""
    settings = cell.identity.get("settings")
    if not isinstance(settings, dict):  # which is a fault of its own
        return None
    return {name: value for name, value in settings.items() if name != "seed"}
