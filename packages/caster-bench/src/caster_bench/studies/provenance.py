"""What records were made from and with: checkpoints, data, software, machines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from caster_bench.records.schema import Cell
from caster_bench.studies.tables import Column, Table, points

if TYPE_CHECKING:
    from caster_bench.studies.results import Results


@dataclass(frozen=True)
class Origin:
    """Of one cell; many cells share one."""

    backbone: str
    data: str
    checkpoint: str | None  # digests
    moments: str | None
    accuracy: float | None  # on clean pictures
    source: str | None  # name and digest; None of a cell refused before its data were read
    target: str | None
    software: tuple[tuple[str, str], ...]
    hardware: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, cell: Cell) -> Origin:
        """What `cell.json` says."""
        spec, identity = cell.identity["spec"], cell.identity
        return cls(
            backbone=spec["backbone"],
            data=spec["data"],
            checkpoint=identity["checkpoint"],
            moments=identity["moments"],
            accuracy=cell.admission["accuracy"],
            source=_data(identity["source"]),
            target=_data(identity["target"]),
            software=tuple((name, str(value)) for name, value in sorted(cell.software.items())),
            hardware=tuple((name, str(value)) for name, value in sorted(cell.hardware.items())),
        )


def _data(told: dict[str, object] | None) -> str | None:
    return None if told is None else f"{told['name']}, {told['n']} pictures, {told['sha256']}"


def tables(results: Results) -> list[Table]:
    """Checkpoints, data, and the software and hardware of all cells."""
    counts = Counter(results.origins.values())
    checkpoints = {(o.backbone, o.data): (o.accuracy, o.checkpoint, o.moments) for o in counts}
    data = {
        (o.data, kind): told
        for o in counts
        for kind, told in (("source", o.source), ("target", o.target))
        if told is not None
    }
    return [
        Table(
            "checkpoints",
            "Backbones: clean accuracy in percent, and SHA-256 of checkpoint and source moments.",
            (
                *(Column("backbone"), Column("data"), Column("clean", ".2f")),
                *(Column("checkpoint"), Column("moments")),
            ),
            tuple(
                (*key, points(accuracy), *digests)
                for key, (accuracy, *digests) in sorted(checkpoints.items())
            ),
        ),
        Table(
            "data",
            "Data, with SHA-256 of their content.",
            (Column("data"), Column("part"), Column("what")),
            tuple((*key, told) for key, told in sorted(data.items())),
        ),
        _machines("software", counts),
        _machines("hardware", counts),
    ]


def _machines(part: str, counts: Counter[Origin]) -> Table:
    found: Counter[str] = Counter()
    for origin, count in counts.items():
        found[", ".join(f"{name} {value}" for name, value in getattr(origin, part))] += count
    rows = tuple((words, count) for words, count in sorted(found.items()))
    return Table(part, f"The {part} of the cells.", (Column(part), Column("cells", "d")), rows)
