"""Fit source statistics with a model: from labelled batches, a feature file, or images."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caster import state as states
from caster.adapt.adapter import Adapter, check_frozen
from caster.adapt.estimator import Caster
from caster.adapt.image_features import (
    activation_statistics_for,
    continues_from_cache,
    extract,
)
from caster.adapt.source_moments import pair
from caster.config import CHUNK_ELEMENTS, DEFAULT_LIMITS, Limits, Settings
from caster.core.arrays import to_numpy
from caster.errors import CasterError
from caster.io import Progress, silent
from caster.io.feature_files import FeatureFile, open_features
from caster.io.files import AnyPath, check_writable
from caster.io.image_files import formats
from caster.io.images import Images
from caster.io.labels import LabelIndex, Labels, as_labels, encode, unique_labels
from caster.io.layer_arrays import Layers
from caster.io.signed_tensors import Key, check_name, key_bytes
from caster.io.subset import balanced_rows, check_limit, select_features, select_images
from caster.models.heads import Columns, head_columns
from caster.models.protocol import FrozenModel, has_layers, preprocessing_sha256
from caster.models.site_sums import rounded
from caster.state import State
from caster.state.source_check import SourceCheck

if TYPE_CHECKING:
    from caster.adapt.ray_pool import Pool

log = logging.getLogger("caster")

LayerChoice = bool | Literal["auto"]
Head = tuple[int, ...] | None  # column of the logits for every class; None: no head is used


def fit(
    model: FrozenModel,
    batches: Iterable[Any],
    *,
    classes: Any = None,
    use_head: bool = True,
    layers: LayerChoice = "auto",
    sketch: bool = True,
    **settings: Any,
) -> Adapter:
    """Fit source statistics from labelled batches, in one pass through the model.

    Parameters
    ----------
    batches : pairs (inputs, labels), or dicts with "pixel_values" and "labels"; a Ray Dataset.
    classes : names of the model's outputs, in order. Not needed if labels are column numbers, or
        if the sorted labels are exactly the columns.
    use_head : False if the model was trained on other classes; only its features are used then.
    layers : whether to collect layer statistics, for mixture transport; "auto" does if possible.
    sketch : whether to store some source samples, projected on the state's directions, for the
        monitor: see docs/monitoring.md.
    settings : parameters of `Caster`.

    The features of all batches stay in memory during the fit; `caster fit --model` stores them on
    disk. A Ray Dataset of inputs or `features`, and labels, is fitted on its cluster, where it
    passes through the model twice and no features are stored: see docs/clusters.md.
    """
    if type(batches).__module__.startswith("ray.data"):
        from caster.adapt.ray_jobs import fit_dataset

        constants = Caster(**settings).settings
        return fit_dataset(model, batches, classes, use_head, layers, sketch, constants)
    check_frozen(model)
    measured = measures_layers(model, layers, use_head)
    statistics = activation_statistics_for(model) if measured else None
    chunks, columns = [], None
    index = LabelIndex()
    for number, (images, given) in enumerate(map(pair, batches)):
        labels = as_labels(given)
        targets = index(labels)
        outputs = model(images) if statistics is None else statistics(images, targets)
        logits = None if outputs.logits is None else to_numpy(outputs.logits)
        features = to_numpy(outputs.features)
        broken = np.argwhere(~np.isfinite(features))
        if len(broken):
            raise CasterError(
                f"{model.name} gives NaN or infinity for row {broken[0, 0]} of batch {number}: "
                "check its inputs"
            )
        chunks.append((features, labels, logits))
        columns = outputs.columns
    if not chunks:
        raise CasterError("there are no batches to fit")
    known = index.classes
    head = head_columns(known, columns, classes) if use_head else None
    if head is not None and any(logits is None for _, _, logits in chunks):
        raise CasterError("logits must come with every batch or with none")
    warn_of_missing_classes(head, columns)
    select = Columns(head)
    labelled = [
        (features, labels, *([] if head is None else [select(logits)]))
        for features, labels, logits in chunks
    ]
    clf = Caster(**settings).fit_stream(labelled, known, sketch=sketch)
    if statistics is None:
        return fitted_adapter(model, clf, head)
    moments = statistics.moments(index.of(known), clf.moments_.counts)
    return fitted_adapter(model, clf, head, moments, statistics.input_range)


def fitted_adapter(
    model: FrozenModel,
    clf: Caster,
    head: Head,
    layers: Layers | None = None,
    input_range: tuple[float, float] | None = None,
) -> Adapter:
    """Build the adapter of a fit; without a head, layers are dropped because they need its classes.

    The input range is stored only if the preprocessing does not define it.
    """
    warn_of_poor_head(clf.source_check_)
    if layers is None or head is None:
        return Adapter(model, bound_state(clf, model, head))
    stored = input_range if model.preprocessing is None else None
    return Adapter(model, bound_state(clf, model, head, layers, stored))


def fit_file(
    source: Path,
    output: Path,
    settings: Settings,
    progress: Progress = silent,
    key: Key | None = None,
    limits: Limits = DEFAULT_LIMITS,
    limit: int | None = None,
    sketch: bool = True,
    pool: Pool[Any] | None = None,
) -> Caster:
    """Fit a state from a feature file, read twice in chunks, and save it.

    `limit` fits only so many rows, spread evenly over the classes. With a `pool`, workers read
    parts of a Parquet file, or of a folder of them.
    """
    check_limit(limit)
    _check_output(output, *([] if source.is_dir() else [source]))
    signer = None if key is None else key_bytes(key)
    if pool is not None:
        from caster.adapt.ray_jobs import fit_parquet

        if limit is not None:
            raise CasterError("a cluster reads whole files: omit {argument}", argument="limit")
        clf = fit_parquet(pool, source, settings, limits, sketch, progress)
    else:
        file = open_features(source, "features", "labels", limits=limits)
        labels = as_labels(file.read("labels"))
        classes = distinct_classes(labels, source, limits)
        file = select_features(file, balanced_rows(labels, limit))
        passes = _Passes(file, has_logits(file, len(classes)), None, progress)
        clf = Caster(**vars(settings)).fit_stream(passes, classes, sketch=sketch)
    warn_of_poor_head(clf.source_check_)
    clf.save(output, key=signer)
    return clf


def distinct_classes(labels: Labels, source: Path, limits: Limits) -> Labels:  # (N,) -> (C,)
    """Distinct labels of a file, checked against the limit."""
    classes = unique_labels(labels)
    limits.check("classes", len(classes), f"{source} has {len(classes):,} distinct labels")
    return classes


def warn_of_missing_classes(head: Head, columns: int | None) -> None:
    """Warn if the source lacks some of the model's classes."""
    if head is not None and columns is not None and len(head) < columns:
        log.warning(
            "the source has %d of the model's %d classes: the others are never predicted, not even "
            "in rejected batches",
            len(head),
            columns,
        )


def warn_of_poor_head(check: SourceCheck | None) -> None:
    """Warn if the head is rarely right on the source: its classes are probably permuted."""
    if check is not None and check.head is not None and check.has_poor_head:
        log.warning(
            "the model's head is right on only %.1f%% of the source: check its preprocessing and "
            "the order of its classes, or fit without the head if it has other classes",
            100 * check.head,
        )


class FittedImages(NamedTuple):
    """A fit on images, with what to report about it."""

    clf: Caster
    unreadable: list[str]  # error message of each skipped image
    layers: Layers | None  # their moments


class FittedFeatures(NamedTuple):
    """A fit on features of images, not yet bound to the model."""

    clf: Caster
    head: Head
    unreadable: list[str]
    layers: Layers | None  # sums over the model's layers


@continues_from_cache()
def fit_images(
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
    pool: Pool[Any] | None = None,
) -> FittedImages:
    """Fit a state from labelled images, bound to the model, and save it.

    Arguments are those of `fit`; features are cached in `store`. `limit` fits only so many images,
    spread evenly over the classes. With a `pool`, workers run the model, and each node caches the
    features of its own images.
    """
    check_limit(limit)
    measured = measures_layers(model, layers, use_head)
    _check_output(output, model.name, images.name)
    signer = None if key is None else key_bytes(key)
    if limit is not None and images.labels is not None:
        images = select_images(images, balanced_rows(images.labels, limit))
    classes, targets = _check_classes(images)

    def head_of(columns: int | None) -> Head:
        known = use_head and columns is not None
        return head_columns(classes, columns, named_classes) if known else None

    extracted: dict[str, Any] = {
        "store": store,
        "batch_size": batch_size,
        "skip_unreadable": skip_unreadable,
        "targets": targets if measured else None,
    }
    if pool is not None:
        from caster.adapt.ray_jobs import fit_image_blocks

        fitted = fit_image_blocks(
            pool, images, classes, settings, head_of, sketch, progress, **extracted
        )
    else:
        features = extract(
            model,
            images,
            check=lambda outputs: head_of(outputs.columns),
            progress=progress,
            **extracted,
        )
        head = head_of(features.outputs.columns)
        warn_of_missing_classes(head, features.outputs.columns)
        passes = _Passes(features, head is not None, head, progress)
        clf = Caster(**vars(settings)).fit_stream(passes, classes, sketch=sketch)
        fitted = FittedFeatures(clf, head, features.unreadable, features.layers)
    clf = fitted.clf
    warn_of_poor_head(clf.source_check_)
    sums, found = fitted.layers, None
    if measured:
        if sums is None:
            raise CasterError("layer statistics do not cover all images: fit again")
        found = rounded(sums, counts=clf.moments_.counts)
    states.save(bound_state(clf, model, fitted.head, found), output, signer)
    return FittedImages(clf, fitted.unreadable, found)


def measures_layers(model: FrozenModel, layers: LayerChoice, use_head: bool) -> bool:
    """Whether to collect layer statistics; raise if they are requested and impossible."""
    if layers not in (False, True, "auto"):
        raise CasterError(f"layers are True, False or 'auto', not {layers!r}")
    if layers is False or (layers == "auto" and not (use_head and has_layers(model))):
        return False
    if layers == "auto" and not _sites_are_found(model):
        return False
    if not use_head:
        raise CasterError(
            "aligned layers predict the model's own classes: fit without layers "
            "(`--no-layers`), or with the head"
        )
    activation_statistics_for(model)  # raises if the model has no layers to measure
    return True


def _sites_are_found(model: FrozenModel) -> bool:
    """Whether an ONNX graph has sites; warn if not. Sites of a torch module are found later."""
    try:
        getattr(model, "sites", None)
    except CasterError as error:
        log.warning("layer statistics are not collected: %s", error)
        return False
    return True


def bound_state(
    clf: Caster,
    model: FrozenModel,
    head: Head,
    layers: Layers | None = None,
    input_range: tuple[float, float] | None = None,
) -> State:
    """Build the state of a fitted estimator, bound to the model of its features."""
    return State(
        clf.moments_,
        clf.classes_,
        clf.settings,
        model_sha256=model.sha256,
        preprocessing_sha256=preprocessing_sha256(model),
        head=head,
        layers=layers,
        input_range=input_range,
        source_check=clf.source_check_,
        sketch=clf.sketch_,
    )


def has_logits(file: FeatureFile, n_classes: int) -> bool:
    """Whether the file has a head's logits for these classes, to compare transport with."""
    if "logits" not in file.names:
        return False
    (first,) = next(file.chunks(("logits",), 1))
    if first.shape[1:] == (n_classes,):
        return True
    log.warning(
        "the logits of %s are ignored: there are %s per sample, and the labels name %d classes",
        *(file.path, "x".join(map(str, first.shape[1:])) or "1", n_classes),
    )
    return False


def _check_output(output: Path, *inputs: AnyPath) -> None:
    """Raise for an output that cannot be written, is an input or looks like an image or a model."""
    check_writable(output, *inputs)
    check_name(output)
    if output.suffix.lower() in formats():
        raise CasterError(f"{output} has the name of an image: choose another")


def _check_classes(images: Images) -> tuple[Labels, NDArray[np.int64]]:  # (C,), (N,)
    """Classes, and the class index of every image; checked before any work."""
    if images.labels is None:
        raise CasterError(f"{images.name} has no labels")
    classes = unique_labels(images.labels) if images.classes is None else images.classes
    targets = encode(images.labels, classes)
    counts = np.bincount(targets, minlength=len(classes))
    what = f"{images.name} has {len(classes):,} classes"
    images.limits.check("classes", len(classes), what)
    if len(classes) < 2:
        raise CasterError(f"at least 2 classes are needed, {images.name} has {len(classes)}")
    if counts.min() < 2:
        label = classes.tolist()[counts.argmin()]
        raise CasterError(
            f"the class {label!r} of {images.name} has {counts.min() or 'no'} image, and a "
            "covariance needs 2: add images, or drop the class"
        )
    return classes, targets


class _Passes:
    """Chunks of a file; every iteration starts at the beginning and is one pass of the fit."""

    def __init__(
        self, file: FeatureFile, with_logits: bool, head: Head, progress: Progress
    ) -> None:
        self.file, self.columns, self.progress = file, Columns(head), progress
        self.names = ("features", "labels", *(("logits",) if with_logits else ()))
        self.started = 0

    def __iter__(self) -> Iterator[tuple[NDArray[Any], ...]]:
        self.started += 1
        stage = ("pass 1 of 2: subspace", "pass 2 of 2: moments")[self.started - 1]
        (first,) = next(self.file.chunks(("features",), 1))
        rows = max(1, CHUNK_ELEMENTS // max(1, first.size))
        done = 0
        self.progress(stage, done, self.file.rows)
        for features, labels, *logits in self.file.chunks(self.names, rows):
            yield (features, labels, *(self.columns(part) for part in logits))
            done += len(labels)
            self.progress(stage, done, self.file.rows)
