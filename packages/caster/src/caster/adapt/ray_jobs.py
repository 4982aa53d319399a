"""Fit and predict on a Ray cluster: workers read blocks of data, and only statistics travel.

A worker sums a block in the order of its rows, and the driver merges the sums of blocks in a fixed
tree: the result does not depend on which worker did what, or when. A worker that dies costs the
block it was working on.
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

from caster import state as states
from caster.adapt.adapter import Adapter, check_frozen
from caster.adapt.estimator import Caster
from caster.adapt.fitting import (
    FittedImages,
    LayerChoice,
    bound_state,
    check_classes,
    check_output,
    has_logits,
    layer_moments,
    measures_layers,
    warn_of_poor_head,
)
from caster.adapt.prediction import Summary, predict_images
from caster.adapt.ray_blocks import (
    Block,
    Chunk,
    DatasetBlock,
    Findings,
    Head,
    ImageBlock,
    ParquetBlock,
    block_rows,
    parquet_blocks,
)
from caster.adapt.ray_pool import Pool
from caster.adapt.source_moments import LABELS, HeldOutSums, Subspace, class_scatter, held_out_sums
from caster.config import DEFAULT_LIMITS, Limits, Settings
from caster.core.moments import ClassMoments, ClassScatter, update_rows
from caster.errors import CasterError
from caster.io import Progress, silent
from caster.io.feature_files import ParquetFile
from caster.io.files import check_writable
from caster.io.image_files import FileImages
from caster.io.images import Images
from caster.io.labels import Labels, as_labels, unique_labels
from caster.io.layer_arrays import Layers
from caster.io.signed_tensors import Key, key_bytes
from caster.io.subset import check_limit, over_classes
from caster.models.heads import head_columns
from caster.models.protocol import FrozenModel, runs_on_gpu
from caster.models.site_sums import rounded
from caster.state import State

HeadOf = Callable[[int | None], Head]  # from the number of the model's outputs


class _Tree:
    """Sums of blocks, merged in pairs of neighbours: the order of arrival changes nothing."""

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
        """The sums of all blocks, which must have arrived."""
        order = sorted(self._nodes, key=lambda node: node[1] << node[0])
        return reduce(add, (self._nodes[node] for node in order))


@dataclass(frozen=True, eq=False)
class _First:
    """Sums of the first pass over some blocks."""

    scatter: ClassScatter | None  # None of no readable image
    layers: Layers | None
    ends: tuple[float, float] | None
    unreadable: list[str]
    columns: int | None

    def __add__(self, later: Self) -> Self:
        layers = _either(
            self.layers, later.layers, lambda a, b: {site: a[site] + b[site] for site in a}
        )
        return type(self)(
            _either(self.scatter, later.scatter, add),
            layers,
            _either(self.ends, later.ends, lambda a, b: (min(a[0], b[0]), max(a[1], b[1]))),
            self.unreadable + later.unreadable,
            later.columns if self.columns is None else self.columns,
        )


@dataclass(frozen=True, eq=False)
class _Second:
    """Sums of the second pass over some blocks, of the classes they have: images come sorted."""

    classes: NDArray[np.int64]  # (U,), indices
    sums: HeldOutSums

    @classmethod
    def of(cls, sums: HeldOutSums) -> Self:
        """Drop the classes without samples."""
        classes = np.flatnonzero(sums.moments.counts)
        return cls(classes, replace(sums, moments=_rows(sums.moments, classes)))

    def __add__(self, later: Self) -> Self:
        classes = np.union1d(self.classes, later.classes)
        mine, other = self.spread(classes), later.spread(classes)
        kept, drawn = self.sums.kept + later.sums.kept, self.sums.drawn + later.sums.drawn
        return type(self)(classes, HeldOutSums(mine + other, kept, drawn))

    def spread(self, classes: NDArray[np.int64]) -> ClassMoments:  # (V,)
        """Moments with a row for each of these classes."""
        held = self.sums.moments
        if len(classes) == len(self.classes):
            return held
        parts = [held.counts, held.means, held.scatters]
        spread = ClassMoments(*(np.zeros((len(classes), *part.shape[1:])) for part in parts))
        update_rows(spread, np.searchsorted(classes, self.classes), held)
        return spread


@dataclass(frozen=True, eq=False)
class _FirstPass:
    classes: Labels  # (C,)

    def __call__(self, model: Any, block: Block, index: int) -> _First:
        found = Findings()
        chunks = _unless_empty(block.chunks(model, None, found))
        scatter = None if chunks is None else class_scatter(chunks, self.classes)
        return _First(scatter, found.layers, found.ends, found.unreadable, found.columns)


@dataclass(frozen=True, eq=False)
class _SecondPass:
    classes: Labels  # (C,)
    subspace: Subspace
    head: Head
    sketched: bool
    before: list[NDArray[np.int64]]  # for every block, samples of each class in earlier blocks

    def __call__(self, model: Any, block: Block, index: int) -> _Second | None:
        chunks = _unless_empty(block.chunks(model, self.head, Findings()))
        if chunks is None:
            return None
        before = self.before[index]
        return _Second.of(held_out_sums(chunks, self.classes, self.subspace, self.sketched, before))


def fit_blocks(
    pool: Pool[Any],
    blocks: Callable[[], Iterable[Block]],
    classes: Labels,
    settings: Settings,
    head_of: HeadOf = lambda columns: None,
    sketch: bool = True,
    total: int = 0,
    progress: Progress = silent,
) -> tuple[Caster, Head, _First]:
    """Fit in two passes over blocks, which must be the same in both."""
    tree, counts, done = _Tree(), {}, 0
    stage = "pass 1 of 2: subspace"
    progress(stage, 0, total)
    for index, block, first in pool.map(_FirstPass(classes), blocks()):
        if first.scatter is not None:
            head_of(first.columns)  # an error is better early
        seen = 0 if first.scatter is None else first.scatter.counts
        counts[index] = np.zeros(len(classes), dtype=np.int64) + np.asarray(seen, dtype=np.int64)
        tree.add(index, first)
        done += len(block)
        progress(stage, done, max(total, done))
    if not counts:
        raise CasterError("there are no samples to fit")
    first = tree.total()
    if first.scatter is None:
        raise CasterError("none of the images can be read")
    subspace = Subspace.of(first.scatter, classes, settings)
    head = head_of(first.columns)
    ends = np.cumsum([counts[index] for index in range(len(counts))], axis=0)
    before = [end - counts[index] for index, end in enumerate(ends)]
    step = _SecondPass(classes, subspace, head, sketch, before)
    tree, stage, done = _Tree(), "pass 2 of 2: moments", 0
    progress(stage, 0, total)
    for index, block, second in pool.map(step, blocks()):
        found = np.zeros(len(classes), dtype=np.int64)
        if second is not None:
            found[second.classes] = second.sums.moments.counts
            tree.add(index, second)
        if index not in counts or not np.array_equal(found, counts[index]):
            raise CasterError(f"{block} has other samples in the second pass than in the first")
        done += len(block)
        progress(stage, done, max(total, done))
    second = tree.total()
    sums = replace(second.sums, moments=second.spread(np.arange(len(classes))))
    moments, check, drawn = sums.fitted(subspace, settings)
    state = State(moments, classes, settings, source_check=check, sketch=drawn)
    clf = Caster.from_state(state)
    warn_of_poor_head(clf.source_check_)
    return clf, head, first


def fit_images_on_ray(
    pool: Pool[ImageBlock],
    model: FrozenModel,
    images: Images,
    output: Path,
    settings: Settings,
    *,
    store: Path,
    batch_size: int,
    named_classes: list[str] | None = None,
    use_head: bool = True,
    layers: LayerChoice = "auto",
    skip_unreadable: bool = False,
    progress: Progress = silent,
    key: Key | None = None,
    limit: int | None = None,
    sketch: bool = True,
) -> FittedImages:
    """`fit_images` on a cluster; every node caches the features of its own blocks in `store`.

    The same command after an interruption runs the model on what the caches lack.
    """
    check_limit(limit)
    measured = measures_layers(model, layers, use_head)
    check_output(output, model, images)
    signer = None if key is None else key_bytes(key)
    files = _files_of(images)
    if limit is not None and files.labels is not None:
        files = files.part(over_classes(files.labels, limit))
    classes, targets = check_classes(files)

    def head_of(columns: int | None) -> Head:
        known = columns is not None and use_head
        return head_columns(classes, columns, named_classes) if known else None

    rows = block_rows(len(files))
    blocks = [
        ImageBlock(
            files.part(some),
            targets[some] if measured else None,
            store.absolute(),
            batch_size,
            skip_unreadable,
        )
        for some in np.split(np.arange(len(files)), range(rows, len(files), rows))
    ]
    clf, head, first = fit_blocks(
        pool, lambda: blocks, classes, settings, head_of, sketch, len(files), progress
    )
    found = layer_moments(first.layers, clf) if measured else None
    states.save(bound_state(clf, model, head, found), output, signer)
    return FittedImages(clf, first.unreadable, found)


def fit_parquet(
    pool: Pool[ParquetBlock],
    source: Path,
    output: Path,
    settings: Settings,
    progress: Progress = silent,
    key: Key | None = None,
    limits: Limits = DEFAULT_LIMITS,
    sketch: bool = True,
) -> Caster:
    """`fit_file` on a cluster, for a Parquet file or a folder of them; a block is row groups."""
    check_writable(output, *([] if source.is_dir() else [source]))
    signer = None if key is None else key_bytes(key)
    blocks = parquet_blocks(source, limits)
    labels = dict.fromkeys(chain.from_iterable(r for *_, r in pool.map(_distinct, blocks)))
    classes = unique_labels(as_labels(list(labels)))
    limits.check("classes", len(classes), f"{source} has {len(classes):,} distinct labels")
    files = [ParquetFile(path, limits) for path in {block.path for block in blocks}]
    if all(has_logits(file, len(classes)) for file in files):
        blocks = [replace(block, names=(*block.names, "logits")) for block in blocks]
    total = sum(map(len, blocks))
    clf, _, _ = fit_blocks(
        pool, lambda: blocks, classes, settings, sketch=sketch, total=total, progress=progress
    )
    clf.save(output, key=signer)
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
    workers: int | None = None,
) -> Adapter:
    """`caster.fit` on a Ray Dataset, whose blocks go to workers and not to the driver."""
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

    gpus = runs_on_gpu(model)
    options = dataset.context.execution_options
    was, options.preserve_order = options.preserve_order, True  # both passes in the same order
    try:
        with Pool[Any](partial(_same, model), workers, gpus, reading=True) as pool:
            clf, head, first = fit_blocks(
                pool, blocks, known, settings or Settings(), head_of, sketch
            )
    finally:
        options.preserve_order = was
    if first.layers is None or head is None:
        return Adapter(model, bound_state(clf, model, head))
    ends = first.ends if model.preprocessing is None else None
    return Adapter(
        model,
        bound_state(clf, model, head, rounded(first.layers, counts=clf.moments_.counts), ends),
    )


def _same(model: FrozenModel) -> FrozenModel:
    return model


# --- predict -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageStream:
    """Images in their order, and the table of their predictions."""

    images: FileImages
    output: Path

    def __len__(self) -> int:
        return len(self.images)

    def __str__(self) -> str:
        return f"the stream {self.images.name}"


@dataclass(frozen=True, eq=False)
class _Predict:
    state: State
    adapter_options: dict[str, Any]
    options: dict[str, Any]

    def __call__(self, model: Any, stream: ImageStream, index: int) -> Summary:
        adapter = Adapter(model, self.state, **self.adapter_options)
        return predict_images(adapter, stream.images, stream.output, **self.options)


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

    `options` are those of `predict_images`. A stream whose worker dies continues on another from
    its last snapshot, if the folder is one that all nodes share.
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
    for index, stream, summary in pool.map(_Predict(state, adapter_options, options), jobs):
        found[index] = summary
        done += len(stream)
        progress("adapting", done, total)
    return {jobs[index].output: found[index] for index in range(len(jobs))}


# --- helpers -------------------------------------------------------------------------------------


def _files_of(images: Images) -> FileImages:
    if not isinstance(images, FileImages):
        raise CasterError(
            f"a cluster reads image files, and {images.name} is none: give a folder or a list, or "
            "omit {argument}",
            argument="ray",
        )
    return images


def _either(a: Any, b: Any, merge: Callable[[Any, Any], Any]) -> Any:
    """Merge two sums, or return the one there is."""
    if a is None or b is None:
        return b if a is None else a
    return merge(a, b)


def _rows(moments: ClassMoments, classes: NDArray[np.int64]) -> ClassMoments:
    parts = (moments.counts, moments.means, moments.scatters)
    return ClassMoments(*(part[classes] for part in parts))


def _unless_empty(chunks: Iterator[Chunk]) -> Iterator[Chunk] | None:
    first = next(chunks, None)
    return None if first is None else chain([first], chunks)
