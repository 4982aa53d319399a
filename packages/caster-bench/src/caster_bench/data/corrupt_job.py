"""Images in, the same images under corruptions out, as CIFAR-C or ImageNet-C are published."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from caster.errors import CasterError
from caster.io.files import file_digest
from caster.io.images import Images
from caster.io.progress import Progress, silent
from caster_bench.data.corrupted import manifest as manifests
from caster_bench.data.corrupted.catalogue import Catalogue
from caster_bench.data.corrupted.claim import claimed
from caster_bench.data.corrupted.manifest import Manifest
from caster_bench.data.corrupted.source import Source, gathered
from caster_bench.data.corrupted.targets import ImageArrayFolder, LabelFile, Target, targets
from caster_bench.data.corrupted.workers import Chunk, Result, in_order
from caster_bench.data.corruptions import CORRUPTIONS
from caster_bench.data.corruptions.digital import pillow
from caster_bench.data.corruptions.make import known, parts, published, whole
from caster_bench.data.corruptions.textures import photographs, textures_for

STAGE, CHECKING = "corrupting", "checking what is there"
CHUNK = 2**22  # numbers that a worker makes at once: a second's work or so
DRAWN = "textures drawn by caster"
NEED_PILLOW = frozenset(("pixelate", "jpeg_compression"))


@dataclass(frozen=True)
class Summary:
    """What a run did."""

    images: int
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
        """Each once, severities in their order, and what they need is there."""
        names = list(dict.fromkeys(known(name) for name in corruptions))
        if not names or not severities:
            raise CasterError("nothing is asked for: name a corruption and a severity")
        for severity in severities:
            published(names[0], severity, 1, 1)  # refuses what is none
        if textures is not None and "frost" not in names:
            raise CasterError("the textures are for frost, which is not among the corruptions")
        absolute = None if textures is None else textures.absolute()
        if absolute is not None:
            photographs(str(absolute))  # refuses a folder that holds none
        if not NEED_PILLOW.isdisjoint(names):
            pillow()
        return cls(names, sorted({int(s) for s in severities}), whole("seed", seed), absolute)

    def constants(self, corruption: str, source: Source) -> dict[str, Any]:
        """All that its images depend on, besides pixels and seed."""
        _, height, width, _ = source.shape
        stated: dict[str, Any] = {
            str(s): published(corruption, s, height, width) for s in self.severities
        }
        if corruption != "frost":
            return stated
        textures_for(height, width, self.textures)  # refuses what is too small
        return {**stated, "textures": DRAWN if self.textures is None else _digests(self.textures)}


def corrupt_images(
    images: Images,
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

    Arrays become CIFAR-C's files, image files ImageNet-C's folders. The bytes do not depend on
    the number of workers, nor on where an earlier run was interrupted.
    """
    plan = Plan.checked(corruptions, severities, seed, textures)
    if whole("workers", workers) < 1:
        raise CasterError(f"workers is {workers}: it takes one at least")
    catalogue = Catalogue.of(images)
    with claimed(out, images), gathered(images, out, catalogue, progress) as source:
        settings = {
            "versions": manifests.versions(),
            "layout": catalogue.layout,
            "source": {"sha256": source.sha256, "shape": source.shape, "fitted": source.fitted},
            "seed": plan.seed,
            "severities": plan.severities,
        }
        beside = {"begun_from": images.name, "classes": catalogue.classes}
        manifest = Manifest.opened(out, settings, beside)
        for name in plan.corruptions:
            manifest.state_constants(name, plan.constants(name, source))
        wanted = targets(out, plan.corruptions, plan.severities, source.shape, catalogue.places)
        left = _left(wanted, manifest, progress)
        if catalogue.labels is not None:
            LabelFile(out, catalogue.labels, plan.severities).ensure(manifest)
        made = _make(plan, source, manifest, left, workers, progress)
        size = sum(manifest.whole(target.name)["bytes"] for target in wanted)
    total = len(plan.corruptions) * len(plan.severities)
    return Summary(len(images), made, total - made, size, catalogue.layout)


def _left(
    wanted: Sequence[Target], manifest: Manifest, progress: Progress
) -> list[tuple[Target, Sequence[int]]]:
    """The targets that are not whole, and which severities they lack."""
    left = []
    for done, target in enumerate(wanted, 1):
        if severities := target.left(manifest):
            left.append((target, severities))
        progress(CHECKING, done, len(wanted))
    return left


def _make(
    plan: Plan,
    source: Source,
    manifest: Manifest,
    left: Sequence[tuple[Target, Sequence[int]]],
    workers: int,
    progress: Progress,
) -> int:
    """Write the targets that are not whole; returns how many severities of them that took."""
    pieces = [(target, severity) for target, severities in left for severity in severities]
    count, steps = source.shape[0], list(parts(source.shape, CHUNK))
    textures = None if plan.textures is None else str(plan.textures)
    chunks = (
        Chunk(
            source.pixels,
            step.start,
            step.stop,
            target.corruption,
            severity,
            plan.seed,
            textures,
            as_files=isinstance(target, ImageArrayFolder),
        )
        for target, severity in pieces
        for step in steps
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
            target.write(manifest, lambda: islice(results, len(steps)))
    return len(pieces)


def _digests(folder: Path) -> dict[str, str]:
    """Of the photographs in a folder."""
    return {name: file_digest(folder / name) for name in photographs(str(folder))}
