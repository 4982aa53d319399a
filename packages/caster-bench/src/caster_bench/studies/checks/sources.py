"""Whether every backbone was rightly admitted to its data, or rightly refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from caster.errors import CasterError
from caster.io.files import file_digest
from caster_bench.records import Admission, Records, admission_path, read_admission
from caster_bench.studies.checks.problem import Problem
from caster_bench.sweeps import Sweep

Pair = tuple[str, str]  # backbone and data
Admissions = dict[Pair, Admission]


def read_admissions(out: Records, pairs: Iterable[Pair]) -> tuple[Admissions, list[Problem]]:
    """The admissions of these, and what is wrong with those that cannot be read."""
    admissions: Admissions = {}
    problems = []
    for pair in pairs:
        try:
            admissions[pair] = read_admission(admission_path(out, "--".join(pair)))
        except CasterError as error:
            problems.append(Problem("admission missing or changed", str(error)))
    return admissions, problems


def foreign_admissions(paths: Iterable[Path], sweep: Sweep) -> list[Problem]:
    """Admissions of what is not in the sweep."""
    known = {f"{spec.backbone}--{spec.data}" for spec in sweep.cells}
    return [Problem("not of this sweep", str(path)) for path in paths if path.stem not in known]


def check_admissions(admissions: Admissions, sweep: Sweep, root: Path) -> Iterator[Problem]:
    """Admissions beside the sweep, the checkpoints themselves, and one another."""
    for admission in admissions.values():
        for kind in _faults(admission, sweep):
            yield Problem(kind, f"{admission.backbone} on {admission.data}")
    for name, backbone in sweep.backbones.items():
        digests = {a.checkpoint for (own, _), a in admissions.items() if own == name}
        path = root / backbone.checkpoint
        if backbone.is_file and path.is_file():
            digests.add(file_digest(path))
        if len(digests - {None}) > 1:
            yield Problem("the checkpoint is not the one that was admitted", name)


def compared(sweep: Sweep, root: Path | None = None) -> str:
    """How many checkpoint files `verify` finds to compare with the records, in words."""
    files = [backbone.checkpoint for backbone in sweep.backbones.values() if backbone.is_file]
    there = sum(((root or Path()) / file).is_file() for file in files)
    return f"{there} of {len(files)} checkpoint files compared"


def _faults(admission: Admission, sweep: Sweep) -> Iterator[str]:
    pinned = sweep.backbones[admission.backbone].sha256
    threshold = sweep.data[admission.data].threshold
    if pinned is not None and admission.checkpoint not in (None, pinned):
        yield "the checkpoint is not the one the sweep names"
    if admission.threshold != threshold:
        yield "admitted by another threshold than the sweep's"
    if not admission.admitted and not admission.reason:
        yield "refused without a reason"
    if not admission.admitted:
        return
    if admission.checkpoint is None or admission.moments is None:
        yield "admitted without checkpoint or moments"
    if threshold is not None and (admission.accuracy is None or admission.accuracy < threshold):
        yield "admitted below the threshold"
