"""Provenance of records: checkpoints, data, software and hardware."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from caster_bench.records.schema import Cell
from caster_bench.studies.tables import Table, points

if TYPE_CHECKING:
    from caster_bench.studies.results import Results


CHECKPOINTS, DATA = "checkpoints", "data"  # tables with digests


@dataclass(frozen=True)
class Provenance:
    """Provenance of one cell; many cells share it."""

    backbone: str
    data: str
    checkpoint: str | None  # digest of the file
    weights: str | None  # digest of the weights in memory; None if rejected
    moments: str | None
    revision: int  # of the method
    accuracy: float | None  # on clean images
    source: str | None  # name and digest; None if rejected before its data were read
    target: str | None
    software: tuple[tuple[str, str], ...]
    hardware: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, cell: Cell) -> Provenance:
        """Read it from `cell.json`."""
        spec, identity = cell.identity["spec"], cell.identity
        return cls(
            backbone=spec["backbone"],
            data=spec["data"],
            checkpoint=identity["checkpoint"],
            weights=cell.frozen.get("before"),
            moments=identity["moments"],
            revision=cell.revision,
            accuracy=cell.admission["accuracy"],
            source=_data(identity["source"]),
            target=_data(identity["target"]),
            software=tuple((name, str(value)) for name, value in sorted(cell.software.items())),
            hardware=tuple((name, str(value)) for name, value in sorted(cell.hardware.items())),
        )


def _data(data: dict[str, object] | None) -> str | None:
    return None if data is None else f"{data['name']}, {data['n']} images, {data['sha256']}"


def provenance_tables(results: Results) -> list[Table]:
    """Tables of checkpoints, data, software and hardware."""
    counts = Counter(results.provenance.values())
    checkpoints = {(o.backbone, o.data): (o.accuracy, _files(o, counts), o.moments) for o in counts}
    data = {
        (o.data, kind): text
        for o in counts
        for kind, text in (("source", o.source), ("target", o.target))
        if text is not None
    }
    return [
        Table.of(
            CHECKPOINTS,
            "Backbones: clean accuracy in percent, SHA-256 of checkpoint and source moments.",
            "backbone | data | clean:.2f | checkpoint | moments",
            (
                (*key, points(accuracy), *digests)
                for key, (accuracy, *digests) in sorted(checkpoints.items())
            ),
        ),
        Table.of(
            DATA,
            "Data sets, with SHA-256 of their content.",
            "data | part | what",
            ((*key, text) for key, text in sorted(data.items())),
        ),
        _machines("software", counts),
        _machines("hardware", counts),
    ]


def mixed_revisions(results: Results, study: str) -> list[str]:
    """Sentences on methods of a study with several revisions."""
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for spec in results.scores:
        if study in results.sweep.cells[spec]:
            title = results.sweep.backbones[spec.backbone].title
            found[spec.method][results.provenance[spec].revision].add(title)
    return [
        f"{method} has "
        + " and ".join(f"revision {n} on {'; '.join(sorted(own))}" for n, own in sorted(by.items()))
        + ". Rows for all backbones together mix them."
        for method, by in sorted(found.items())
        if len(by) > 1
    ]


def _files(own: Provenance, all_of: Iterable[Provenance]) -> str | None:
    """Digests of a backbone's checkpoint: files of different bytes may hold the same weights."""
    same = (o for o in all_of if (o.backbone, o.data) == (own.backbone, own.data))
    return ", ".join(sorted({o.checkpoint for o in same if o.checkpoint})) or None


def _machines(part: str, counts: Counter[Provenance]) -> Table:
    found: Counter[str] = Counter()
    for provenance, count in counts.items():
        found[", ".join(f"{name} {value}" for name, value in getattr(provenance, part))] += count
    caption = f"{part.capitalize()} that the cells ran on."
    return Table.of(part, caption, f"{part} | cells:d", sorted(found.items()))
