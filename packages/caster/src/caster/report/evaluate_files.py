"""Evaluate labelled feature files and images, and write the page."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster import state as states
from caster.adapt.adapter import Adapter
from caster.adapt.adapter import Mechanism as MechanismName
from caster.adapt.estimator import Caster
from caster.adapt.image_batches import read_batches, run, stated_preprocessing
from caster.adapt.image_features import extract
from caster.adapt.prediction import (
    answer_images,
    check_batch_size,
    check_outputs,
    feature_classifier,
)
from caster.config import DEFAULT_LIMITS, IMAGES_AT_ONCE, Limits
from caster.errors import CasterError
from caster.io import Progress, silent
from caster.io.feature_files import FeatureFile, open_features
from caster.io.files import check_writable, replacing
from caster.io.images import Images
from caster.io.labels import Labels, as_labels, unique_labels
from caster.io.signed_tensors import Key
from caster.io.subset import Rows, at_random, check_limit, some_features, some_images
from caster.models.heads import class_logits
from caster.models.protocol import preprocessing_sha256
from caster.report import check_can_draw
from caster.report.evaluation import Chunk, evaluate, write_page
from caster.report.evaluation_results import Evaluation
from caster.report.mechanism import TRANSPORT, Mechanism, aligned_layers

log = logging.getLogger("caster")

SHOWN = 5  # classes of the state that a message names


def evaluate_file(
    state: Path,
    target: Path,
    page: Path,
    *,
    batch_size: int,
    seed: int | None,
    tau: float | None = None,
    safeguards: bool = True,
    mechanism: MechanismName = "auto",
    key: Key | None = None,
    limits: Limits = DEFAULT_LIMITS,
    limit: int | None = None,
    known_classes_only: bool = False,
    progress: Progress = silent,
) -> Evaluation:
    """Score a file of labelled features, shuffled by a seed or in its own order.

    `limit` and `known_classes_only` are those of `evaluate_images`.
    """
    check_limit(limit)
    check_batch_size(batch_size)
    _check_outputs(page, state, target)
    loaded = states.load(state, key)
    clf = feature_classifier(loaded, mechanism, tau, safeguards)
    file = open_features(target, "features", "labels", limits=limits)
    labels = as_labels(file.read("labels"))
    rows, left_out = _chosen(labels, clf, str(target), known_classes_only, limit, seed)
    file = some_features(file, rows)
    chunks = _feature_chunks(file, labels[rows], loaded.head, batch_size, seed, progress)
    found = evaluate(clf, chunks, name=str(target), digests={"state": states.digest(loaded)})
    found = replace(found, left_out=left_out, order=_order_in_words(seed))
    _write(found, page)
    return found


def evaluate_images(
    adapter: Adapter,
    images: Images,
    page: Path,
    *,
    store: Path,
    batch_size: int,
    seed: int | None,
    skip_unreadable: bool = False,
    digests: Mapping[str, str] | None = None,
    limit: int | None = None,
    known_classes_only: bool = False,
    progress: Progress = silent,
) -> tuple[Evaluation, list[str]]:
    """Score labelled images; also returns why images were skipped.

    `digests` are those of everything besides the model, its preprocessing and the images. `limit`
    draws that many at random by the seed (0 for data in order); `known_classes_only` leaves out
    images of classes that the state lacks, instead of raising an error, and logs how many. Features
    are cached in `store`; aligned layers need the images again, and read them once.
    """
    check_limit(limit)
    check_batch_size(batch_size)
    _check_outputs(page, Path(adapter.model.name), Path(images.name))
    if images.labels is None:
        raise CasterError(f"{images.name} has no labels")
    clf, name = adapter.clf, images.name
    rows, left_out = _chosen(images.labels, clf, name, known_classes_only, limit, seed)
    images = some_images(images, rows)
    known = {
        "model": adapter.model.sha256 or "",
        "preprocessing": preprocessing_sha256(adapter.model) or "",
        "images": images.sha256,
    }
    unreadable: list[str] = []
    chunks: Iterable[Chunk]
    if adapter.mechanism == "features":
        features = extract(
            adapter.model,
            images,
            store,
            batch_size=min(batch_size, IMAGES_AT_ONCE),
            skip_unreadable=skip_unreadable,
            check=partial(check_outputs, adapter),
            progress=progress,
        )
        unreadable, head = features.unreadable, adapter.state.head
        labels = as_labels(features.read("labels"))
        chunks = _feature_chunks(features, labels, head, batch_size, seed, progress, head is None)
    else:
        chunks = _image_chunks(
            adapter, images, batch_size, seed, skip_unreadable, unreadable, progress
        )
    try:
        found = evaluate(
            clf,
            chunks,
            name=name,
            digests={**(digests or {}), **known},
            mechanism=_mechanism_of(adapter),
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("no output was written") from None
    found = replace(found, left_out=left_out, order=_order_in_words(seed))
    _write(found, page)
    return found, unreadable


def _mechanism_of(adapter: Adapter) -> Mechanism:
    if adapter.mechanism == "features":
        return TRANSPORT
    return aligned_layers(asdict(adapter.settings))


def _order(count: int, seed: int | None) -> NDArray[np.intp]:  # (N,)
    """Rows in the order of evaluation: their own, or shuffled by a seed."""
    order: NDArray[np.intp] = np.arange(count)
    return order if seed is None else np.random.default_rng(seed).permutation(order)


def _order_in_words(seed: int | None) -> str:
    return "in their own order" if seed is None else f"shuffled with seed {seed}"


def _feature_chunks(
    file: FeatureFile,
    labels: Labels,
    head: tuple[int, ...] | None,
    batch_size: int,
    seed: int | None,
    progress: Progress,
    headless: bool = False,
) -> Iterator[Chunk]:
    """Batches of features, with the head's logits if there are any."""
    features = file.read("features")
    logits = file.read("logits") if "logits" in file.names and not headless else None
    order = _order(file.rows, seed)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        own = None if logits is None else class_logits(logits[rows], head)
        yield features[rows], labels[rows], own
        progress("adapting", start + len(rows), len(order))


def _image_chunks(
    adapter: Adapter,
    images: Images,
    batch_size: int,
    seed: int | None,
    skip_unreadable: bool,
    unreadable: list[str],
    progress: Progress,
) -> Iterator[Chunk]:
    """Batches of images with aligned layers; each image is read once."""
    assert images.labels is not None
    stream, order = adapter.new_stream(), _order(len(images), seed)
    reading = read_batches(
        images,
        stated_preprocessing(adapter.model),
        order.tolist(),
        batch_size,
        skip_unreadable=skip_unreadable,
    )
    done = 0
    with closing(reading):
        progress("adapting", 0, len(images))
        for batch in reading:
            unreadable += batch.unreadable.values()
            done += len(batch.rows) + len(batch.unreadable)
            if batch.rows:
                outputs = run(adapter.model, batch, images.names)
                check_outputs(adapter, outputs)
                out = answer_images(stream, batch, images.names, outputs)
                logits = adapter.head_logits(outputs)
                yield outputs.features, images.labels[batch.rows], logits, out
            progress("adapting", done, len(images))


def _chosen(
    labels: Labels,
    clf: Caster,
    name: str,
    known_classes_only: bool,
    limit: int | None,
    seed: int | None,
) -> tuple[Rows, dict[Any, int]]:
    """Rows to evaluate, and counts of the samples left out, by class."""
    classes = clf.classes_.tolist()
    known, present = set(classes), unique_labels(labels).tolist()
    unknown = [label for label in present if label not in known]
    if unknown and (not known_classes_only or len(unknown) == len(present)):
        raise CasterError(_unknown(unknown[0], present, classes, name))
    rows = np.arange(len(labels))
    counts = Counter(label for label in labels.tolist() if label not in known)
    if counts:
        rows = np.flatnonzero([label in known for label in labels.tolist()])
        named = ", ".join(f"{label!r} ({n:,})" for label, n in counts.most_common(SHOWN))
        more = f" and {len(counts) - SHOWN:,} more" if len(counts) > SHOWN else ""
        total = f"{counts.total():,} of {len(labels):,} samples"
        log.warning("left out %s, of classes that the state lacks: %s%s", total, named, more)
    return rows[at_random(len(rows), limit, seed or 0)], dict(counts)


def _unknown(label: Any, present: list[Any], classes: list[Any], name: str) -> str:
    """The error line for a class that the state lacks."""
    shown = ", ".join(map(repr, classes[:SHOWN])) + (" ..." if len(classes) > SHOWN else "")
    remedy = "--known-classes-only leaves out such samples"
    numbers = all(isinstance(value, int | float) for value in present)
    if numbers and all(isinstance(value, str) for value in classes):
        remedy = (
            "its labels are numbers; save names, as by labels=np.array(names)[labels], or add the "
            "names in that order to an .npz of images as `classes`"
        )
    elif not set(present) & set(classes):
        remedy = "none of its classes are the state's"
    return (
        f"the state does not know the class {label!r} of {name}: it was fitted to "
        f"{len(classes):,} classes ({shown}); {remedy}"
    )


def data_file(page: Path) -> Path:
    """The JSON file of a page."""
    return page.with_suffix(".json")


def _check_outputs(page: Path, *inputs: Path) -> None:
    check_can_draw()
    if page.suffix not in (".html", ".htm"):
        raise CasterError(f"{page} must end in .html")
    for path in (page, data_file(page)):
        check_writable(path, *inputs)


def _write(found: Evaluation, page: Path) -> None:
    """Write both files, or neither if drawing fails."""
    with replacing(data_file(page)) as temporary:
        temporary.write_text(json.dumps(found.to_json(), indent=1), encoding="utf-8")
        write_page(found, page)
