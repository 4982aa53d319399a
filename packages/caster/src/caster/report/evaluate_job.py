"""Labelled target features or images in, the score of four classifiers out."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from caster import state as states
from caster.adapt.adapter import Adapter
from caster.adapt.deployed import Batch, batches, check_batch_size, configured, extract_for
from caster.adapt.estimator import Caster
from caster.config import DEFAULT_LIMITS, Limits
from caster.errors import CasterError
from caster.io.feature_files import open_features
from caster.io.files import check_writable, replacing
from caster.io.images import Images
from caster.io.labels import Labels, as_labels, unique_labels
from caster.io.progress import Progress, silent
from caster.io.sealed import Key
from caster.io.subset import Rows, at_random, check_limit, some_features, some_images
from caster.models.heads import of_classes
from caster.models.protocol import preprocessing_sha256
from caster.report import check_can_draw
from caster.report.evaluation import Chunk, evaluate, write_page
from caster.report.evaluation_results import Evaluation
from caster.report.layer_stream import (
    LayerStream,
    refuse_layers_of_features,
    telling_what_is_lost,
    wants_layers,
)
from caster.report.mechanism import TRANSPORT

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
    layers: bool | None = None,
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
    held = states.load(state, key)
    refuse_layers_of_features(held, layers)
    clf = configured(Caster.from_state(held), tau, safeguards)
    file = open_features(target, "features", "labels", limits=limits)
    labels = as_labels(file.read("labels"))
    rows, left_out = _chosen(labels, clf, str(target), known_classes_only, limit, seed)
    stream = batches(some_features(file, rows), batch_size, seed, progress)
    chunks = _labelled(stream, labels[rows], held.head)
    found = evaluate(clf, chunks, name=str(target), digests={"state": states.digest(held)})
    found = replace(found, left_out=left_out)
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
    tau: float | None = None,
    safeguards: bool = True,
    layers: bool | None = None,
    skip_unreadable: bool = False,
    digests: Mapping[str, str] | None = None,
    limit: int | None = None,
    known_classes_only: bool = False,
    progress: Progress = silent,
) -> tuple[Evaluation, list[str]]:
    """Score labelled images; also returns what was wrong with every image skipped.

    `digests` are those of what took part beside the model, its preprocessing and the images. A
    state with layers is scored by layer transport, unless `layers` is False. `limit` draws that
    many at random by the seed (0 for data in order); `known_classes_only` leaves out images of
    classes that the state lacks, instead of raising an error, and logs how many.
    """
    check_limit(limit)
    check_batch_size(batch_size)
    _check_outputs(page, Path(adapter.model.name), Path(images.name))
    aligned = LayerStream(adapter, tau) if wants_layers(adapter.state, layers) else None
    clf = adapter.clf if aligned else configured(adapter.clf, tau, safeguards)
    if images.labels is None:
        raise CasterError(f"{images.name} has no labels")
    rows, left_out = _chosen(images.labels, clf, images.name, known_classes_only, limit, seed)
    images = some_images(images, rows)
    if aligned is not None:
        aligned.check_sizes(images)
    features = extract_for(
        adapter,
        images,
        store,
        batch_size=batch_size,
        skip_unreadable=skip_unreadable,
        progress=progress,
    )
    known = {
        "model": adapter.model.sha256 or "",
        "preprocessing": preprocessing_sha256(adapter.model) or "",
        "images": images.sha256,
    }
    labels, plan = features.read("labels"), (features, batch_size, seed, progress)
    chunks: Iterable[Chunk]
    if aligned is None:
        chunks = _labelled(batches(*plan), labels, adapter.head, use_head=adapter.head is not None)
    else:
        tried = aligned.tried(images, *plan)
        chunks = ((*_chunk(batch, labels, adapter.head), found) for batch, found in tried)
    with telling_what_is_lost(aligned):
        found = evaluate(
            clf,
            chunks,
            name=images.name,
            digests={**(digests or {}), **known},
            mechanism=TRANSPORT if aligned is None else aligned.mechanism,
        )
        found = replace(found, left_out=left_out)
        _write(found, page)
    return found, features.unreadable


def _labelled(
    stream: Iterable[Batch], labels: Labels, head: tuple[int, ...] | None, use_head: bool = True
) -> Iterator[Chunk]:
    for batch in stream:
        yield _chunk(batch, labels, head, use_head)


def _chunk(
    batch: Batch, labels: Labels, head: tuple[int, ...] | None, use_head: bool = True
) -> tuple[Any, Any, Any]:
    known = use_head and batch.logits is not None
    logits = of_classes(batch.logits, head) if known else None
    return batch.features, labels[batch.rows], logits


def _chosen(
    labels: Labels,
    clf: Caster,
    name: str,
    known_classes_only: bool,
    limit: int | None,
    seed: int | None,
) -> tuple[Rows, dict[Any, int]]:
    """Rows to evaluate, and samples left out by class; checked before any work is lost."""
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
    """Where the numbers of a page go: beside it, as JSON."""
    return page.with_suffix(".json")


def _check_outputs(page: Path, *inputs: Path) -> None:
    check_can_draw()
    if page.suffix not in (".html", ".htm"):
        raise CasterError(f"{page} must end in .html")
    for path in (page, data_file(page)):
        check_writable(path, *inputs)


def _write(found: Evaluation, page: Path) -> None:
    """Both files or, where drawing fails or is interrupted, neither."""
    with replacing(data_file(page)) as temporary:
        temporary.write_text(json.dumps(found.to_json(), indent=1), encoding="utf-8")
        write_page(found, page)
