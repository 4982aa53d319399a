"""Blocks of a source, read by workers of a cluster: image files, Parquet files, a Ray Dataset.

The size of a block depends only on the source, so sums do not depend on the number of workers. All
nodes must see the files at the same paths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from caster.adapt.fitting import Head
from caster.adapt.image_features import activation_statistics_for, extract
from caster.adapt.source_moments import LABELS, pair
from caster.config import CHUNK_ELEMENTS, DEFAULT_LIMITS, IMAGES_AT_ONCE, Limits
from caster.core.arrays import to_numpy
from caster.core.moments import ClassScatter
from caster.errors import CasterError
from caster.io.feature_files import ParquetFile
from caster.io.image_files import FileImages
from caster.io.labels import Labels, as_labels, encode
from caster.io.layer_arrays import Layers
from caster.models.batches import named
from caster.models.heads import Columns

BLOCKS, FEWEST_ROWS, MOST_ROWS = 64, 1024, 65536  # blocks of a source; bounds on rows of a block

Chunk = tuple[NDArray[Any], ...]  # features, labels and, with a head, logits


@dataclass(eq=False)
class FirstPassSums:
    """Results of the first pass over some blocks; `Block.chunks` sets all but the scatter."""

    scatter: ClassScatter | None = None  # None: no image can be read
    columns: int | None = None  # of the logits
    layers: Layers | None = None
    input_range: tuple[float, float] | None = None  # if layers are measured
    unreadable: list[str] = field(default_factory=list)

    def __add__(self, later: FirstPassSums) -> FirstPassSums:
        if self.scatter is None or later.scatter is None:
            found = later if self.scatter is None else self
            return replace(found, unreadable=self.unreadable + later.unreadable)
        layers, ours, theirs = self.layers, self.input_range, later.input_range
        if layers is not None and later.layers is not None:
            layers = {site: sums + later.layers[site] for site, sums in layers.items()}
        if ours is not None and theirs is not None:
            ours = min(ours[0], theirs[0]), max(ours[1], theirs[1])
        unreadable = self.unreadable + later.unreadable
        return FirstPassSums(self.scatter + later.scatter, self.columns, layers, ours, unreadable)


class Block(Protocol):
    """Part of a source, read by one worker."""

    def __len__(self) -> int: ...

    def chunks(self, model: Any, head: Head, found: FirstPassSums) -> Iterator[Chunk]:
        """Read rows in order; with `head`, chunks include the logits in those columns."""


@dataclass(frozen=True)
class ImageBlock:
    """Image files, whose features the node caches so that the model runs once."""

    images: FileImages
    targets: NDArray[np.int64] | None  # (n,), to measure the layers
    store: Path
    batch_size: int
    skip_unreadable: bool

    def __len__(self) -> int:
        return len(self.images)

    def __str__(self) -> str:
        return f"the block of images from {self.images.names[0]} to {self.images.names[-1]}"

    def chunks(self, model: Any, head: Head, found: FirstPassSums) -> Iterator[Chunk]:
        """Read features from the cache, or compute them."""
        features = extract(
            model,
            self.images,
            self.store,
            batch_size=self.batch_size,
            skip_unreadable=self.skip_unreadable,
            targets=self.targets,
            allow_empty=True,
        )
        found.unreadable = features.unreadable
        if not features.rows:
            return
        found.layers = features.layers
        found.columns = features.outputs.columns
        names = ("features", "labels", *(() if head is None else ("logits",)))
        rows = max(1, CHUNK_ELEMENTS // features.outputs.features.shape[1])
        for values, labels, *logits in features.chunks(names, rows):
            yield (values, labels, *(Columns(head)(part) for part in logits))


@dataclass(frozen=True)
class ParquetBlock:
    """Row groups of a Parquet file with `features`, `labels` and perhaps `logits`."""

    path: Path
    groups: tuple[int, ...]
    rows: int
    limits: Limits = DEFAULT_LIMITS
    names: tuple[str, ...] = ("features", "labels")

    def __len__(self) -> int:
        return self.rows

    def __str__(self) -> str:
        return f"the block of row groups {self.groups[0]} to {self.groups[-1]} of {self.path}"

    def chunks(self, model: Any, head: Head, found: FirstPassSums) -> Iterator[Chunk]:
        """Read in chunks; a block need not fit into memory."""
        file = ParquetFile(self.path, self.limits, self.groups)
        rows = max(1, CHUNK_ELEMENTS // file.width("features"))
        yield from file.chunks(self.names, rows)


@dataclass(frozen=True)
class DatasetBlock:
    """A block of a Ray Dataset, with features or with inputs of the model."""

    reference: Any
    rows: int
    measured: bool  # whether to measure the layers
    classes: Labels  # (C,)

    def __len__(self) -> int:
        return self.rows

    def __str__(self) -> str:
        return f"a block of {self.rows:,} rows of the dataset"

    def chunks(self, model: Any, head: Head, found: FirstPassSums) -> Iterator[Chunk]:
        """Run the model, unless the block has a column `features`."""
        import ray
        from ray.data.block import BlockAccessor

        batch = BlockAccessor.for_block(ray.get(self.reference)).to_batch_format("numpy")
        if "features" in batch:
            labels = named(batch, LABELS)
            logits = batch.get("logits")
            found.columns = None if logits is None else int(logits.shape[1])
            more = () if head is None else (Columns(head)(logits),)
            yield (batch["features"], labels, *more)
            return
        inputs, labels = pair(batch)
        # Layers are measured in the first pass only, when the head is not known yet.
        statistics = activation_statistics_for(model) if self.measured and head is None else None
        for start in range(0, len(labels), IMAGES_AT_ONCE):
            some = slice(start, start + IMAGES_AT_ONCE)
            if statistics is None:
                outputs = model(inputs[some])
            else:
                outputs = statistics(inputs[some], encode(as_labels(labels[some]), self.classes))
            found.columns = outputs.columns
            more = () if head is None else (Columns(head)(to_numpy(outputs.logits)),)
            yield (to_numpy(outputs.features), labels[some], *more)
        if statistics is not None:
            found.layers = {site: sums.map(to_numpy) for site, sums in statistics.sums.items()}
            found.input_range = statistics.input_range


def block_rows(total: int) -> int:
    """Rows per block, from the size of the source alone: sums must not depend on the workers.

    >>> block_rows(50_000), block_rows(1_281_167), block_rows(10**9)
    (1024, 20019, 65536)
    """
    return min(MOST_ROWS, max(FEWEST_ROWS, -(-total // BLOCKS)))


def parquet_blocks(source: Path, limits: Limits = DEFAULT_LIMITS) -> list[ParquetBlock]:
    """Blocks of a Parquet file, or of a folder of them in the order of their names."""
    paths = sorted(source.glob("*.parquet")) if source.is_dir() else [source]
    if not paths or source.suffix == ".npz":
        raise CasterError(
            f"{source} is not a Parquet file or a folder of them, which a cluster can read in "
            "parts: write one, or fit without {argument}",
            argument="ray",
        )
    files = [ParquetFile(path, limits) for path in paths]
    rows, blocks = block_rows(sum(file.rows for file in files)), []
    for file in files:
        for name in ("features", "labels"):
            if name not in file.names:
                raise CasterError(f"{file.path} has no `{name}` (it has {', '.join(file.names)})")
        groups: list[int] = []
        for group in range(len(file.group_rows)):
            groups.append(group)
            held = sum(file.group_rows[g] for g in groups)
            if held >= rows or group == len(file.group_rows) - 1:
                blocks.append(ParquetBlock(file.path, tuple(groups), held, limits))
                groups = []
    return blocks
