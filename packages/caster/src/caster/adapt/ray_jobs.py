"""Fit and predict on a Ray cluster: workers read blocks of data and return only statistics.

A worker sums a block in row order, and the driver merges the sums of blocks in a fixed tree, so the
result does not depend on scheduling. If a worker dies, only its current block is repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import chain
from operator import add
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from caster.adapt.adapter import Adapter, check_frozen
from caster.adapt.estimator import Caster
from caster.adapt.fitting import (
    FittedFeatures,
    Head,
    LayerChoice,
    distinct_classes,
    fitted_adapter,
    has_logits,
    measures_layers,
    warn_of_missing_classes,
)
from caster.adapt.prediction import Summary, predict_images
from caster.adapt.ray_blocks import (
    Block,
    Chunk,
    DatasetBlock,
    FirstPassSums,
    ImageBlock,
    ParquetBlock,
    block_rows,
    parquet_blocks,
)
from caster.adapt.ray_pool import Make, Pool, has_gpus, on_gpu
from caster.adapt.source_moments import LABELS, HeldOutSums, Subspace, class_scatter, held_out_sums
from caster.config import Limits, Settings
from caster.core.moments import ClassMoments, add_outer
from caster.errors import CasterError
from caster.io import Progress, silent
from caster.io.feature_files import ParquetFile
from caster.io.image_files import FileImages
from caster.io.images import Images
from caster.io.labels import Labels, as_labels, unique_labels
from caster.io.subset import ImageSubset
from caster.models.heads import head_columns
from caster.models.protocol import FrozenModel, is_torch, runs_on_gpu
from caster.models.site_sums import rounded
from caster.state import State

HeadOf = Callable[[int | None], Head]  # takes the number of the model's outputs
Step = Callable[[Any, Any, int], Any]  # takes the model, a block and its index; returns sums


class _Tree:
    """Merge sums of neighbouring blocks pairwise: the order of arrival does not matter."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], Any] = {}  # by level and position

    def add(self, index: int, sums: Any) -> None:
        """Add the sums of a block."""
        level = 0
        while (level, index ^ 1) in self._nodes:
            other = self._nodes.pop((level, index ^ 1))
            sums = other + sums if index & 1 else sums + other
            level, index = level + 1, index >> 1
        self._nodes[level, index] = sums

    def total(self) -> Any:
        """Total over all blocks, which must have been added."""
        if not self._nodes:
            raise CasterError("there are no samples to fit")
        order = sorted(self._nodes, key=lambda node: node[1] << node[0])
        return reduce(add, (self._nodes[node] for node in order))


@dataclass(frozen=True, eq=False)
class SecondSums:
    """Sums of the second pass over some blocks, for the classes that occur in them.

    Images are often sorted by class, so a block has few. All sums are relative to the class
    centroids of the first pass, so that merging is addition.
    """

    classes: NDArray[np.int64]  # (U,), indices
    parts: tuple[NDArray[Any], ...]  # (U,), (U, k), (U, k (k + 1) / 2): counts, sums, products
    kept: Any
    drawn: Any

    @classmethod
    def of(cls, found: HeldOutSums, centroids: NDArray[Any]) -> Self:  # (C, k)
        """Drop classes without samples, and half of every symmetric matrix."""
        classes = np.flatnonzero(found.moments.counts)
        counts, scatters = found.moments.counts[classes], found.moments.scatters[classes]
        step = found.moments.means[classes] - centroids[classes]
        add_outer(scatters, step, counts)
        rows, columns = np.triu_indices(scatters.shape[1])
        parts = counts, counts[:, None] * step, scatters[:, rows, columns]
        return cls(classes, parts, found.kept, found.drawn)

    def __add__(self, later: Self) -> Self:
        classes = np.union1d(self.classes, later.classes)
        places = [np.searchsorted(classes, some.classes) for some in (self, later)]

        def total(mine: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
            if len(mine) == len(other) == len(classes):
                found: NDArray[Any] = mine + other
            else:
                found = np.zeros((len(classes), *mine.shape[1:]))
                found[places[0]] = mine
                found[places[1]] += other
            return found

        parts = tuple(map(total, self.parts, later.parts))
        return type(self)(classes, parts, self.kept + later.kept, self.drawn + later.drawn)

    def whole(self, centroids: NDArray[Any]) -> HeldOutSums:  # (C, k)
        """Convert to sums relative to the class means; every class must have samples."""
        counts, sums, products = self.parts
        step, k = sums / counts[:, None], sums.shape[1]
        rows, columns = np.triu_indices(k)
        scatters = np.empty((len(counts), k, k))
        scatters[:, rows, columns] = scatters[:, columns, rows] = products
        add_outer(scatters, step, -counts)
        return HeldOutSums(ClassMoments(counts, centroids + step, scatters), self.kept, self.drawn)


def first_pass(classes: Labels, model: Any, block: Block, index: int) -> FirstPassSums:
    """Sum the class scatter of a block, and collect layer statistics."""
    found = FirstPassSums()
    chunks = _unless_empty(block.chunks(model, None, found))
    found.scatter = None if chunks is None else class_scatter(chunks, classes)
    return found


def second_pass(
    classes: Labels,
    subspace: Subspace,
    centroids: NDArray[Any],  # (C, k), projected class means
    head: Head,
    sketched: bool,
    before: list[NDArray[np.int64]],  # for every block, samples of each class in earlier blocks
    model: Any,
    block: Block,
    index: int,
) -> SecondSums | None:
    """Sum the held-out moments of a block; None if none of its images can be read."""
    chunks = _unless_empty(block.chunks(model, head, FirstPassSums()))
    if chunks is None:
        return None
    sums = held_out_sums(chunks, classes, subspace, sketched, before[index])
    return SecondSums.of(sums, centroids)


def fit_blocks(
    pool: Pool[Any],
    blocks: Callable[[], Iterable[Block]],
    classes: Labels,
    settings: Settings,
    head_of: HeadOf = lambda columns: None,
    sketch: bool = True,
    total: int = 0,
    progress: Progress = silent,
) -> tuple[Caster, Head, FirstPassSums]:
    """Fit in two passes over blocks, which must be the same in both."""
    counts: dict[int, NDArray[np.int64]] = {}  # samples of each class, by block index

    def summed(step: Step, stage: str, look: Callable[[int, Block, Any], None]) -> Any:
        tree, done = _Tree(), 0
        progress(stage, 0, total)
        for index, block, sums in pool.map(step, blocks()):
            look(index, block, sums)
            if sums is not None:
                tree.add(index, sums)
            done += len(block)
            progress(stage, done, max(total, done))
        return tree.total()

    def count(index: int, block: Block, first: FirstPassSums) -> None:
        counts[index] = np.zeros(len(classes), dtype=np.int64)
        if first.scatter is not None:
            head_of(first.columns)  # raise errors early
            counts[index] += np.asarray(first.scatter.counts, dtype=np.int64)

    def compare(index: int, block: Block, second: SecondSums | None) -> None:
        found = np.zeros(len(classes), dtype=np.int64)
        if second is not None:
            found[second.classes] = second.parts[0]
        if index not in counts or not np.array_equal(found, counts[index]):
            raise CasterError(f"{block} has other samples in the second pass than in the first")

    first: FirstPassSums = summed(partial(first_pass, classes), "pass 1 of 2: subspace", count)
    if first.scatter is None:
        raise CasterError("none of the images can be read")
    subspace, head = Subspace.of(first.scatter, classes, settings), head_of(first.columns)
    warn_of_missing_classes(head, first.columns)
    ends = np.cumsum([counts[index] for index in range(len(counts))], axis=0)
    before = [end - counts[index] for index, end in enumerate(ends)]
    centroids = first.scatter.means @ subspace.basis.U
    step = partial(second_pass, classes, subspace, centroids, head, sketch, before)
    second: SecondSums = summed(step, "pass 2 of 2: moments", compare)
    sums = second.whole(centroids)
    moments, check, drawn = sums.fitted(subspace, classes, settings, partial(_each_fold, pool))
    state = State(moments, classes, settings, source_check=check, sketch=drawn)
    return Caster.from_state(state), head, first


def _each_fold(pool: Pool[Any], function: Callable[[int], Any], n: int) -> list[Any]:
    folds = [f"fold {f + 1} of {n} of the source check" for f in range(n)]
    results = {f: found for f, _, found in pool.map(partial(_apply, function), folds)}
    return [results[f] for f in range(n)]


def _apply(function: Callable[[int], Any], model: Any, block: str, index: int) -> Any:
    return function(index)


def fit_image_blocks(
    pool: Pool[ImageBlock],
    images: Images,
    classes: Labels,
    settings: Settings,
    head_of: HeadOf,
    sketch: bool,
    progress: Progress,
    *,
    store: Path,
    targets: NDArray[np.int64] | None,  # (n,), to measure the layers
    batch_size: int,
    skip_unreadable: bool,
) -> FittedFeatures:
    """Fit image files; every node caches the features of its own blocks in `store`.

    After an interruption, the same command runs the model only on images that are not cached.
    """
    files, total = _files_of(images), len(images)
    rows = block_rows(total)
    blocks = [
        ImageBlock(
            files.part(some),
            None if targets is None else targets[some],
            store.absolute(),
            batch_size,
            skip_unreadable,
        )
        for some in np.split(np.arange(total), range(rows, total, rows))
    ]
    clf, head, first = fit_blocks(
        pool, lambda: blocks, classes, settings, head_of, sketch, total, progress
    )
    return FittedFeatures(clf, head, first.unreadable, first.layers)


def fit_parquet(
    pool: Pool[ParquetBlock],
    source: Path,
    settings: Settings,
    limits: Limits,
    sketch: bool,
    progress: Progress,
) -> Caster:
    """Fit a Parquet file or a folder of them; a block is a few row groups."""
    blocks = parquet_blocks(source, limits)
    labels = dict.fromkeys(chain.from_iterable(r for *_, r in pool.map(_distinct, blocks)))
    classes = distinct_classes(as_labels(list(labels)), source, limits)
    files = [ParquetFile(path, limits) for path in {block.path for block in blocks}]
    if all(has_logits(file, len(classes)) for file in files):
        blocks = [replace(block, names=(*block.names, "logits")) for block in blocks]
    total = sum(map(len, blocks))
    clf, _, _ = fit_blocks(
        pool, lambda: blocks, classes, settings, sketch=sketch, total=total, progress=progress
    )
    return clf


def _distinct(model: Any, block: ParquetBlock, index: int) -> list[Any]:
    labels = ParquetFile(block.path, block.limits, block.groups).read("labels")
    return list(unique_labels(as_labels(labels)).tolist())


def fit_dataset(
    model: FrozenModel,
    dataset: Any,
    classes: Any = None,
    use_head: bool = True,
    layers: LayerChoice = "auto",
    sketch: bool = True,
    settings: Settings | None = None,
) -> Adapter:
    """Fit a Ray Dataset for `caster.fit`; its blocks go to workers, never to the driver."""
    check_frozen(model)
    columns = dataset.columns()
    label = next((name for name in LABELS if name in columns), None)
    if label is None:
        raise CasterError(f"the dataset has none of {', '.join(LABELS)}: it has {columns}")
    measured = "features" not in columns and measures_layers(model, layers, use_head)
    known = unique_labels(as_labels(dataset.unique(label)))
    if len(known) < 2:
        raise CasterError(f"at least 2 classes are needed, the labels name {len(known)} class")

    def head_of(width: int | None) -> Head:
        return None if width is None or not use_head else head_columns(known, width, classes)

    def blocks() -> Iterator[DatasetBlock]:
        for bundle in dataset.iter_internal_ref_bundles():
            for reference, metadata in zip(bundle.block_refs, bundle.metadata, strict=True):
                if metadata.num_rows:
                    yield DatasetBlock(reference, metadata.num_rows, measured, known)

    gpus = runs_on_gpu(model) or (is_torch(model) and has_gpus())
    make: Make = partial(on_gpu, lambda: model) if gpus else lambda: model
    options = dataset.context.execution_options
    was, options.preserve_order = options.preserve_order, True  # both passes in the same order
    try:
        with Pool[Any](make, gpus=gpus, reading=True) as pool:
            clf, head, first = fit_blocks(
                pool, blocks, known, settings or Settings(), head_of, sketch
            )
    finally:
        options.preserve_order = was
    moments = None if first.layers is None else rounded(first.layers, counts=clf.moments_.counts)
    return fitted_adapter(model, clf, head, moments, first.input_range)


# --- predict -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageStream:
    """Images of one stream, and the path of its prediction table."""

    images: FileImages
    output: Path

    def __len__(self) -> int:
        return len(self.images)

    def __str__(self) -> str:
        return f"the stream {self.images.name}"


def _predict(
    state: State,
    adapter_options: dict[str, Any],
    options: dict[str, Any],
    model: Any,
    stream: ImageStream,
    index: int,
) -> Summary:
    adapter = Adapter(model, state, **adapter_options)
    return predict_images(adapter, stream.images, stream.output, **options)


def predict_streams(
    pool: Pool[ImageStream],
    state: State,
    streams: Sequence[Images],
    folder: Path,
    *,
    adapter_options: dict[str, Any],
    progress: Progress = silent,
    **options: Any,
) -> dict[Path, Summary]:
    """Predict many streams, each on one worker in its own order, to FOLDER/STREAM.csv.

    `options` are those of `predict_images`. If a worker dies, its stream continues on another from
    the last snapshot, provided that all nodes share the folder.
    """
    folder.mkdir(exist_ok=True)
    jobs = [
        ImageStream(_files_of(images), folder.absolute() / f"{Path(images.name).stem}.csv")
        for images in streams
    ]
    for name, count in Counter(job.output.name for job in jobs).items():
        if count > 1:
            raise CasterError(f"{count} streams would write {folder / name}: rename their folders")
    total, done = sum(map(len, jobs)), 0
    found: dict[int, Summary] = {}
    progress("adapting", 0, total)
    try:
        for index, stream, summary in pool.map(
            partial(_predict, state, adapter_options, options), jobs
        ):
            found[index] = summary
            done += len(stream)
            progress("adapting", done, total)
    except KeyboardInterrupt:
        complete = f"{len(found)} of {len(jobs)} streams are complete in {folder}"
        raise KeyboardInterrupt(complete) from None
    return {jobs[index].output: found[index] for index in range(len(jobs))}


# --- helpers -------------------------------------------------------------------------------------


def _files_of(images: Images) -> FileImages:
    if isinstance(images, ImageSubset):
        return _files_of(images.whole).part(images.rows)
    if not isinstance(images, FileImages):
        raise CasterError(
            f"a cluster reads image files, but {images.name} is not one: give a folder or a list, "
            "or omit {argument}",
            argument="ray",
        )
    return images


def _unless_empty(chunks: Iterator[Chunk]) -> Iterator[Chunk] | None:
    first = next(chunks, None)
    return None if first is None else chain([first], chunks)
