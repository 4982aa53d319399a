"""Pictures in, the same pictures under corruptions out, as CIFAR-C or ImageNet-C are published."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from caster.data import CORRUPTIONS, Pictures
from caster.data.corruptions.make import known, published
from caster.data.corruptions.textures import photographs, textures_for
from caster.errors import CasterError
from caster.jobs.corrupted import manifest as manifests
from caster.jobs.corrupted.catalogue import Catalogue
from caster.jobs.corrupted.manifest import Manifest
from caster.jobs.corrupted.source import SCRATCH, Source, gathered
from caster.jobs.corrupted.targets import PictureFolder, Target, file_sha256, targets, write_labels
from caster.jobs.corrupted.workers import Chunk, Result, in_order
from caster.jobs.lock import locked
from caster.jobs.progress import Progress, silent

STAGE = "corrupting"
LOCK = ".lock"
CHUNK = 2**22  # numbers that a worker makes at once: a second's work or so
DRAWN = "textures drawn by caster"


@dataclass(frozen=True)
class Summary:
    """What a run did."""

    pictures: int
    made: int  # corruptions times severities
    kept: int  # those that were there already
    size: int  # bytes of all targets
    layout: str


@dataclass(frozen=True)
class Plan:
    """What is asked for."""

    corruptions: Sequence[str]
    severities: Sequence[int]
    seed: int
    textures: Path | None

    @classmethod
    def checked(
        cls,
        corruptions: Sequence[str],
        severities: Sequence[int],
        seed: int,
        textures: Path | None,
    ) -> Plan:
        """Each once; severities in their order."""
        names = list(dict.fromkeys(known(name) for name in corruptions))
        if not names or not severities:
            raise CasterError("nothing is asked for: name a corruption and a severity")
        for severity in severities:
            published(names[0], severity, 1, 1)  # refuses what is none
        if textures is not None and "frost" not in names:
            raise CasterError("the textures are for frost, which is not among the corruptions")
        absolute = None if textures is None else textures.absolute()
        return cls(names, sorted({int(s) for s in severities}), int(seed), absolute)

    def constants(self, corruption: str, source: Source) -> dict[str, Any]:
        """All that its pictures depend on, besides pixels and seed."""
        _, height, width, _ = source.shape
        stated: dict[str, Any] = {
            str(s): published(corruption, s, height, width) for s in self.severities
        }
        if corruption != "frost":
            return stated
        textures_for(height, width, self.textures)  # refuses what is too small
        return {**stated, "textures": DRAWN if self.textures is None else _digests(self.textures)}


def corrupt_pictures(
    pictures: Pictures,
    out: Path,
    *,
    corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = (1, 2, 3, 4, 5),
    seed: int = 0,
    textures: Path | None = None,  # a folder of photographs, for frost
    workers: int = 1,
    progress: Progress = silent,
) -> Summary:
    """Write a corrupted set, or what is missing of one that was begun with the same settings.

    Arrays become CIFAR-C's files, picture files ImageNet-C's folders. The bytes do not depend on
    the number of workers, nor on where an earlier run was interrupted.
    """
    plan = Plan.checked(corruptions, severities, seed, textures)
    catalogue = Catalogue.of(pictures)
    with _claimed(out, pictures), gathered(pictures, out, catalogue, progress) as source:
        settings = {
            "versions": manifests.versions(),
            "layout": catalogue.layout,
            "source": {"sha256": source.sha256, "shape": source.shape, "fitted": source.fitted},
            "seed": plan.seed,
            "severities": plan.severities,
        }
        beside = {"name": pictures.name, "classes": catalogue.classes}
        manifest = Manifest.opened(out, settings, beside)
        for name in plan.corruptions:
            manifest.state_constants(name, plan.constants(name, source))
        wanted = targets(out, plan.corruptions, plan.severities, source.shape, catalogue.places)
        made = _make(plan, source, manifest, wanted, workers, progress)
        if catalogue.labels is not None:
            write_labels(out, manifest, catalogue.labels, plan.severities)
        size = sum(manifest.whole(target.name)["bytes"] for target in wanted)
    total = len(plan.corruptions) * len(plan.severities)
    return Summary(len(pictures), made, total - made, size, catalogue.layout)


def _make(
    plan: Plan,
    source: Source,
    manifest: Manifest,
    wanted: Sequence[Target],
    workers: int,
    progress: Progress,
) -> int:
    """Write the targets that are not whole; returns how many severities of them that took."""
    left = [(target, severities) for target in wanted if (severities := target.left(manifest))]
    pieces = [(target, severity) for target, severities in left for severity in severities]
    count, height, width, channels = source.shape
    step = max(CHUNK // (height * width * channels), 1)
    starts = range(0, count, step)
    textures = None if plan.textures is None else str(plan.textures)
    chunks = (
        Chunk(
            source.pixels,
            start,
            min(start + step, count),
            target.corruption,
            severity,
            plan.seed,
            textures,
            as_files=isinstance(target, PictureFolder),
        )
        for target, severity in pieces
        for start in starts
    )
    total = count * len(plan.corruptions) * len(plan.severities)

    def told(results: Iterator[Result]) -> Iterator[Result]:
        done = total - count * len(pieces)
        for result in results:
            done += len(result)
            progress(STAGE, done, total)
            yield result

    progress(STAGE, total - count * len(pieces), total)
    manifest.save()
    with closing(in_order(chunks, workers)) as made:
        results = told(made)
        for target, _ in left:
            target.write(manifest, lambda: islice(results, len(starts)))
    return len(pieces)


@contextmanager
def _claimed(out: Path, pictures: Pictures) -> Iterator[None]:
    """A folder that nobody else writes to: new, empty, or one with a manifest.

    Where nothing comes of it, a folder that was not there before is not there afterwards.
    """
    data = Path(pictures.name)
    if data.is_dir() and out.resolve().is_relative_to(data.resolve()):
        raise CasterError(f"{out} lies in {data}, among its pictures: write to another folder")
    if out.exists() and not out.is_dir():
        raise CasterError(f"cannot write to {out}: it is no folder")
    if not out.absolute().parent.is_dir():
        raise CasterError(f"cannot write to {out}: there is no folder {out.absolute().parent}")
    try:
        new = not out.exists()
        out.mkdir(exist_ok=True)
        try:
            with locked(out / LOCK, f"another caster is writing to {out}: wait until it is done"):
                foreign = sorted(set(os.listdir(out)) - {LOCK, SCRATCH})
                if foreign and manifests.NAME not in foreign:
                    raise CasterError(
                        f"{out} holds {foreign[0]} and no {manifests.NAME}: name a new or an empty "
                        "folder, or one that an interrupted run began"
                    )
                yield
        finally:
            if new:
                with suppress(OSError):  # there is something in it
                    out.rmdir()
    except OSError as error:
        raise CasterError(f"cannot write to {out}: {error.strerror or error}") from None


def _digests(folder: Path) -> dict[str, str]:
    """Of the photographs in a folder."""
    return {name: file_sha256(folder / name) for name in photographs(str(folder))}
