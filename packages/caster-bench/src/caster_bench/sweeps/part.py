"""A part of a sweep: the cells of some studies and of some backbones."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from caster.errors import CasterError
from caster_bench.sweeps.names import known
from caster_bench.sweeps.spec import STUDIES, Spec, Sweep


def part_of(
    sweep: Sweep,
    studies: Collection[str] | None = None,  # None means all
    backbones: Collection[str] | None = None,
) -> Sweep:
    """A sweep of these studies alone, and of these backbones."""
    wanted = frozenset(STUDIES if studies is None else studies)
    cells = {
        spec: own & wanted
        for spec, own in sweep.cells.items()
        if own & wanted and (backbones is None or spec.backbone in backbones)
    }
    return _holding(sweep, cells)


def without(sweep: Sweep, left_out: Mapping[str, Collection[str]]) -> Sweep:
    """A sweep some of whose studies are without some backbones."""
    cells = {
        spec: kept
        for spec, own in sweep.cells.items()
        if (kept := frozenset(s for s in own if spec.backbone not in left_out.get(s, ())))
    }
    return _holding(sweep, cells)


def chosen(
    sweep: Sweep,
    only: str | None,  # a study; None means all
    backbones: Sequence[str],  # none means all
) -> Sweep:
    """What the options `--only` and `--backbone` leave of a sweep."""
    if only is not None and only not in STUDIES:
        raise CasterError(f"there is no study {only!r}: say one of {', '.join(STUDIES)}")
    for name in backbones:
        known(name, sweep.backbones, f"backbone of {sweep.name} called")
    part = part_of(sweep, None if only is None else {only}, backbones or None)
    if not part.cells:
        study = "" if only is None else f" of the study {only}"
        of = f" for {', '.join(backbones)}" if backbones else ""
        raise CasterError(f"{sweep.name} has no cells{study}{of}")
    return part


def _holding(sweep: Sweep, cells: dict[Spec, frozenset[str]]) -> Sweep:
    """A sweep of these cells alone; the same one, where they are all."""
    if cells == sweep.cells:
        return sweep
    met = {spec.backbone for spec in cells}
    held = {name: backbone for name, backbone in sweep.backbones.items() if name in met}
    return replace(sweep, cells=cells, backbones=held)
