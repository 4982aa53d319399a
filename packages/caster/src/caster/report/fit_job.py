"""Labelled features or images in, a state file out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caster import state as states
from caster.adapt.adapter import activation_statistics_for, bound_state
from caster.adapt.estimator import Caster
from caster.adapt.extract import extract
from caster.adapt.features import ImageArrayFeatures
from caster.config import CHUNK_ELEMENTS, DEFAULT_LIMITS, Limits, Settings
from caster.errors import CasterError
from caster.io.decode import formats
from caster.io.feature_files import FeatureFile, open_features
from caster.io.files import check_writable
from caster.io.images import Images
from caster.io.labels import Labels, as_labels, encode, unique_labels
from caster.io.progress import Progress, silent
from caster.io.sealed import Key, key_bytes
from caster.io.subset import check_limit, over_classes, some_features, some_images
from caster.models.heads import head_columns, of_classes
from caster.models.protocol import FrozenModel, Outputs
from caster.state import Layers


def fit_file(
    source: Path,
    output: Path,
    settings: Settings,
    progress: Progress = silent,
    key: Key | None = None,
    limits: Limits = DEFAULT_LIMITS,
    limit: int | None = None,
) -> Caster:
    """Fit a state from a feature file, reading it twice and never whole, and save it.

    `limit` takes that many rows, evenly over the classes.
    """
    check_limit(limit)
    check_writable(output, source)
    signer = None if key is None else key_bytes(key)
    file = open_features(source, "features", "labels", limits=limits)
    labels = as_labels(file.read("labels"))
    classes = unique_labels(labels)
    limits.check("classes", len(classes), f"{source} has {len(classes):,} distinct labels")
    file = some_features(file, over_classes(labels, limit))
    clf = _fit(file, classes, settings, _has_logits(file, len(classes)), None, progress)
    clf.save(output, key=signer)
    return clf


def _has_logits(file: FeatureFile, n_classes: int) -> bool:
    """Whether the file has a head's logits of these classes, to hold transport against."""
    if "logits" not in file.names:
        return False
    (first,) = next(file.chunks(("logits",), 1))
    return tuple(first.shape[1:]) == (n_classes,)


class FittedImages(NamedTuple):
    """A fit on images, and what there is to say of it."""

    clf: Caster
    unreadable: list[str]  # what was wrong with each image that was skipped
    layers: Layers | None  # those measured; None where nobody asked


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
    layers: bool | Literal["full"] | None = False,
    skip_unreadable: bool = False,
    progress: Progress = silent,
    key: Key | None = None,
    limit: int | None = None,
) -> FittedImages:
    """Fit a state from labelled images, bound to the model, and save it.

    `named_classes` are the model's outputs in their order; without `use_head` they are other
    classes than the data's. With `layers` the state also gets the moments of every site of a torch
    module, for layer transport; "full" adds the covariances of sites with few channels, and None
    is where the model has layers. `limit` takes that many images, evenly over the classes.
    """
    check_limit(limit)
    if layers is None:
        layers = use_head and _has_layers(model)
    if layers:
        _check_layers(model, use_head)
    _check_output(output, model, images)
    signer = None if key is None else key_bytes(key)
    if limit is not None and images.labels is not None:
        images = some_images(images, over_classes(images.labels, limit))
    classes = _check_classes(images)

    def head(outputs: Outputs) -> tuple[int, ...] | None:
        if not use_head or outputs.logits is None:
            return None
        return head_columns(classes, int(outputs.logits.shape[1]), named_classes)

    features = extract(
        model,
        images,
        store,
        batch_size=batch_size,
        skip_unreadable=skip_unreadable,
        check=head,
        layers=layers,
        progress=progress,
    )
    columns = head(features.outputs)
    clf = _fit(features, classes, settings, columns is not None, columns, progress)
    measured = _measured(features, layers == "full") if layers else None
    states.save(bound_state(clf, model, columns, measured), output, signer)
    return FittedImages(clf, features.unreadable, measured)


def _has_layers(model: FrozenModel) -> bool:
    try:
        activation_statistics_for(model)
    except CasterError:
        return False
    return True


def _check_layers(model: FrozenModel, use_head: bool) -> None:
    """Refuse layers that cannot be measured, or would be of no use, before the model runs."""
    activation_statistics_for(model)
    if not use_head:
        raise CasterError(
            "layer transport answers with the model's own classes: give --layers or --no-head, "
            "not both"
        )


def _measured(features: ImageArrayFeatures, full: bool) -> Layers:
    from caster.models.activation_statistics import rounded

    if features.layers is None:
        raise CasterError("the layers were not measured on all images: fit again")
    found = rounded(features.layers)
    if full:
        return found
    return {site: replace(moments, covariance=None) for site, moments in found.items()}


def _check_output(output: Path, model: FrozenModel, images: Images) -> None:
    check_writable(output, model.name, images.name)
    if output.suffix.lower() in formats():
        raise CasterError(f"{output} has the name of an image: give the state another one")


def _check_classes(images: Images) -> Labels:
    """The classes, refused where they cannot be fitted: before the work that would be lost."""
    if images.labels is None:
        raise CasterError(f"{images.name} has no labels")
    classes = unique_labels(images.labels) if images.classes is None else images.classes
    counts = np.bincount(encode(images.labels, classes), minlength=len(classes))
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
    return classes


def _fit(
    file: FeatureFile,
    classes: Labels,
    settings: Settings,
    with_logits: bool,
    head: tuple[int, ...] | None,
    progress: Progress,
) -> Caster:
    passes = _Passes(file, with_logits, head, progress)
    return Caster(**vars(settings)).fit_stream(passes, classes)


class _Passes:
    """Iterate over the file's chunks from its start, each time they are asked for."""

    def __init__(
        self, file: FeatureFile, with_logits: bool, head: tuple[int, ...] | None, progress: Progress
    ) -> None:
        self.file, self.head, self.progress = file, head, progress
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
            yield (features, labels, *(of_classes(given, self.head) for given in logits))
            done += len(labels)
            self.progress(stage, done, self.file.rows)
