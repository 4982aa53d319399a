"""Score four classifiers on a labelled stream of features or images."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from caster import state as states
from caster.adapt.adapter import Adapter
from caster.adapt.adapter import Mechanism as MechanismName
from caster.adapt.estimator import Caster
from caster.adapt.fitting import warn_of_poor_head
from caster.adapt.image_batches import read_batches, require_preprocessing, run
from caster.adapt.image_features import extract
from caster.adapt.prediction import (
    MAX_EXCESS_SHARE,
    answer_images,
    check_batch_size,
    check_outputs,
    feature_classifier,
)
from caster.config import DEFAULT_LIMITS, IMAGES_AT_ONCE, Limits
from caster.core.adaptation import Adaptation
from caster.core.arrays import as_real_array, to_numpy
from caster.core.verdict import Verdict
from caster.errors import CasterError, first_few
from caster.io import Progress, silent
from caster.io.feature_files import FeatureFile, open_features
from caster.io.files import check_writable, replacing
from caster.io.images import Images
from caster.io.labels import Labels, as_labels, encode, unique_labels
from caster.io.signed_tensors import Key
from caster.io.subset import Rows, check_limit, random_rows, select_features, select_images
from caster.models.heads import Columns, better_names
from caster.models.protocol import preprocessing_sha256
from caster.report import check_can_draw, metrics
from caster.report.evaluation_results import MIN_BATCHES, Batch, ClassScore, Evaluation, Score
from caster.report.intervals import Interval, bootstrap
from caster.report.mechanism import TRANSPORT, Mechanism, aligned_layers
from caster.report.metrics import Flags, Floats

log = logging.getLogger("caster")

MAX_NAMED = 5  # classes of the state that a message names
# Features (B, d), labels (B,), logits (B, C) or None, and the adaptation if it is already made.
Chunk = tuple[Any, Any, Any] | tuple[Any, Any, Any, Adaptation]


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

    `limit` and `known_classes_only` work as in `evaluate_images`.
    """
    check_limit(limit)
    check_batch_size(batch_size)
    _check_outputs(page, state, target)
    loaded = states.load(state, key)
    clf = feature_classifier(loaded, mechanism, tau, safeguards)
    file = open_features(target, "features", "labels", limits=limits)
    labels = as_labels(file.read("labels"))
    rows, left_out = _chosen(labels, clf, str(target), known_classes_only, limit, seed)
    file = select_features(file, rows)
    chunks = _feature_chunks(file, labels[rows], loaded.head, batch_size, seed, progress)
    found = evaluate(clf, chunks, name=str(target), digests={"state": states.digest(loaded)})
    found = replace(found, left_out=left_out, order=_describe_order(seed))
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
    limit: int | None = None,
    known_classes_only: bool = False,
    progress: Progress = silent,
) -> tuple[Evaluation, list[str]]:
    """Score labelled images; also return why images were skipped.

    `limit` draws that many images at random by the seed (0 for data in order). `known_classes_only`
    skips images of classes that the state lacks, instead of raising an error, and logs how many.
    Features are cached in `store`; aligned layers need the images themselves, and read each of them
    once.
    """
    check_limit(limit)
    check_batch_size(batch_size)
    _check_outputs(page, Path(adapter.model.name), Path(images.name))
    if images.labels is None:
        raise CasterError(f"{images.name} has no labels")
    clf, name = adapter.clf, images.name
    rows, left_out = _chosen(images.labels, clf, name, known_classes_only, limit, seed)
    images = select_images(images, rows)
    digests = {
        "state": states.digest(adapter.state),
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
        found = evaluate(clf, chunks, name=name, digests=digests, mechanism=_mechanism_of(adapter))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("no output was written") from None
    found = replace(found, left_out=left_out, order=_describe_order(seed))
    _write(found, page)
    return found, unreadable


def _mechanism_of(adapter: Adapter) -> Mechanism:
    if adapter.mechanism == "features":
        return TRANSPORT
    return aligned_layers(asdict(adapter.settings))


def _order(count: int, seed: int | None) -> NDArray[np.intp]:  # (N,)
    """Order of the rows: their own, or shuffled by a seed."""
    order: NDArray[np.intp] = np.arange(count)
    return order if seed is None else np.random.default_rng(seed).permutation(order)


def _describe_order(seed: int | None) -> str:
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
    """Yield batches of features, with the head's logits if there are any."""
    features = file.read("features")
    logits = file.read("logits") if "logits" in file.names and not headless else None
    order, columns = _order(file.rows, seed), Columns(head)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        own = None if logits is None else columns(logits[rows])
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
    """Yield batches of images, adapted with aligned layers; each image is read once."""
    assert images.labels is not None
    stream, order = adapter.new_stream(), _order(len(images), seed)
    reading = read_batches(
        images,
        require_preprocessing(adapter.model),
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
    """Choose the rows to evaluate; also count the skipped samples by class."""
    classes = clf.classes_.tolist()
    known, present = set(classes), unique_labels(labels).tolist()
    unknown = [label for label in present if label not in known]
    if unknown and (not known_classes_only or len(unknown) == len(present)):
        raise CasterError(_unknown(unknown[0], present, classes, name))
    rows = np.arange(len(labels))
    counts = Counter(label for label in labels.tolist() if label not in known)
    if counts:
        rows = np.flatnonzero([label in known for label in labels.tolist()])
        named = ", ".join(f"{label!r} ({n:,})" for label, n in counts.most_common(MAX_NAMED))
        more = f" and {len(counts) - MAX_NAMED:,} more" if len(counts) > MAX_NAMED else ""
        total = f"{counts.total():,} of {len(labels):,} samples"
        log.warning("left out %s, of classes that the state lacks: %s%s", total, named, more)
    return rows[random_rows(len(rows), limit, seed or 0)], dict(counts)


def _unknown(label: Any, present: list[Any], classes: list[Any], name: str) -> str:
    """Error message for a class that the state lacks."""
    shown = first_few(map(repr, classes))
    remedy = "skip such samples with --known-classes-only"
    numbers = all(isinstance(value, int | float) for value in present)
    if numbers and all(isinstance(value, str) for value in classes):
        remedy = (
            "its labels are numbers: save names instead (labels=np.array(names)[labels]) or, in an "
            ".npz of images, add the names in that order as `classes`"
        )
    elif not set(present) & set(classes):
        remedy = f"{name} has none of them"
    return (
        f"the state does not know the class {label!r} of {name}: it was fitted to "
        f"{len(classes):,} classes ({shown}); {remedy}"
    )


def data_file(page: Path) -> Path:
    """The JSON file beside a page."""
    return page.with_suffix(".json")


def _check_outputs(page: Path, *inputs: Path) -> None:
    check_can_draw()
    if page.suffix not in (".html", ".htm"):
        raise CasterError(f"{page} must end in .html")
    for path in (page, data_file(page)):
        check_writable(path, *inputs)


def _write(found: Evaluation, page: Path) -> None:
    """Write the page and its JSON file, or neither if drawing fails."""
    with replacing(data_file(page)) as temporary:
        temporary.write_text(json.dumps(found.to_json(), indent=1), encoding="utf-8")
        write_page(found, page)


# --- a stream of batches ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Answers:
    """Answers of one classifier, as one number per sample and metric."""

    answer: NDArray[np.int64]  # (n,)
    right: Flags  # (n,)
    log_likelihood: Floats  # (n,), log probability of the true class
    confidence: Floats  # (n,), probability of the answer

    @classmethod
    def of(cls, scores: Any, truth: NDArray[np.int64]) -> Self:  # (B, C), (B,)
        """Evaluate the scores of a batch."""
        scores = to_numpy(as_real_array(scores))
        log_probabilities = metrics.log_softmax(scores)
        rows, answer = np.arange(len(truth)), scores.argmax(axis=1)
        return cls(
            answer,
            answer == truth,
            log_probabilities[rows, truth],
            np.exp(log_probabilities[rows, answer]),
        )

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """Join batches."""
        parts = list(parts)
        names = ("answer", "right", "log_likelihood", "confidence")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def evaluate(
    clf: Caster,
    chunks: Iterable[Chunk],
    *,
    name: str = "target",
    digests: Mapping[str, str] | None = None,
    mechanism: Mechanism = TRANSPORT,
) -> Evaluation:
    """Adapt to every chunk as one batch, in order, and score the answers.

    Compare the frozen head, Source-GDA, and transport without and with the gate. Without logits,
    Source-GDA takes the frozen head's place and answers rejected batches. `name` says what was
    evaluated, and `digests` are the SHA-256 digests of what was used; both are only passed on. A
    chunk may include its `Adaptation`, made by `mechanism`.

    >>> rng = np.random.default_rng(0)
    >>> labels = rng.integers(8, size=1200)
    >>> features = rng.normal(size=(1200, 8)) + 6 * np.eye(8)[labels]
    >>> clf = Caster().fit(features, labels)
    >>> shifted = 1.5 * features + 2.0
    >>> found = evaluate(clf, [(shifted[i : i + 60], labels[i : i + 60], features[i : i + 60])
    ...                        for i in range(0, 300, 60)])
    >>> found.scores["frozen"].accuracy, found.scores["gated"].accuracy, found.acceptance
    (1.0, 1.0, 1.0)
    """
    warn_of_poor_head(clf.source_check_)
    truths: list[NDArray[np.int64]] = []
    answers: list[dict[str, Answers]] = []
    batches: list[Batch] = []
    row = 0
    for features, labels, logits, *made in chunks:
        try:
            truth, given, verdict = _answer(clf, features, labels, logits, *made)
            if answers and given.keys() != answers[0].keys():
                raise CasterError("logits must come with every batch or with none")
        except CasterError as error:
            raise CasterError(f"rows {row} to {row + len(features) - 1}: {error}") from None
        right = {classifier: int(given[classifier].right.sum()) for classifier in given}
        truths.append(truth)
        answers.append(given)
        batches.append(Batch(len(truth), len(np.unique(truth)), right, verdict))
        row += len(truth)
    if not batches:
        raise CasterError("there is nothing to evaluate: the data have no samples")
    whole = {c: Answers.joined(given[c] for given in answers) for c in answers[0]}
    intervals = _intervals(batches, list(whole))
    baseline, truth = whole[next(iter(whole))], np.concatenate(truths)
    names = None
    if "frozen" in whole and not _is_right_on_source(clf):
        names = better_names(baseline.answer, truth, len(clf.classes_))
    return Evaluation(
        name=name,
        settings=clf.settings,
        digests=dict(digests or {}),
        scores={c: _score(whole[c], baseline, intervals[c]) for c in whole},
        gain_interval=intervals["gain"],
        batches=tuple(batches),
        classes=tuple(_by_class(clf, truth, baseline, whole["gated"])),
        mechanism=mechanism,
        source_check=_turned_off(clf) if mechanism is TRANSPORT else None,
        better_names=None if names is None else names.message(clf.classes_),
        collapse=_collapse(clf, truth, whole["gated"]),
    )


def _collapse(clf: Caster, truth: NDArray[np.int64], gated: Answers) -> str | None:
    """Describe a collapse: one class has far more answers than samples."""
    counts = np.bincount(gated.answer, minlength=len(clf.classes_))
    top = int(counts.argmax())
    answered, true, n = int(counts[top]), int(np.sum(truth == top)), len(truth)
    if answered - true <= MAX_EXCESS_SHARE * n:
        return None
    label = str(clf.classes_[top])
    return f"{answered:,} of {n:,} answers are {label!r}, but only {true:,} of the samples"


def _is_right_on_source(clf: Caster) -> bool:
    """Whether the head was right on the source, so that a shift explains wrong answers."""
    check = clf.source_check_
    return check is not None and check.head is not None and not check.has_poor_head


def _turned_off(clf: Caster) -> str | None:
    """Say why the source check turns transport off, if it does."""
    check = clf.source_check_
    if check is None or check.supported or not clf.settings.safeguards:
        return None
    return check.sentences()[0]


def _answer(
    clf: Caster, features: Any, labels: Any, logits: Any, made: Adaptation | None = None
) -> tuple[NDArray[np.int64], dict[str, Answers], Verdict]:
    """Answer a batch: its true classes, every classifier's answers, and the verdict."""
    truth = encode(as_labels(labels), clf.classes_)
    if len(truth) != len(features):
        raise CasterError(f"{len(features)} samples have {len(truth)} labels")
    out = made or clf.adapt(features, head_logits=logits)
    answers = {} if logits is None else {"frozen": Answers.of(logits, truth)}
    answers["source_gda"] = Answers.of(clf.source_scores(features), truth)
    fallback = answers[next(iter(answers))]
    answers["ungated"] = fallback if out.adapted is None else Answers.of(out.adapted, truth)
    answers["gated"] = answers["ungated"] if out.verdict.accepted else fallback
    return truth, answers, out.verdict


def _score(answers: Answers, baseline: Answers, interval: Interval | None) -> Score:
    return Score(
        accuracy=metrics.accuracy(answers.right),
        interval=interval,
        harm=metrics.harm(baseline.right, answers.right),
        help=metrics.help(baseline.right, answers.right),
        nll=metrics.nll(answers.log_likelihood),
        calibration_error=metrics.calibration_error(answers.confidence, answers.right),
        reliability=metrics.reliability(answers.confidence, answers.right),
    )


def _intervals(batches: list[Batch], classifiers: list[str]) -> dict[str, Interval | None]:
    """Intervals of all accuracies, and of the gain of gated adaptation over the baseline.

    None for fewer than `MIN_BATCHES`: resampling so few gives intervals that are far too narrow.
    """
    names = [*classifiers, "gain"]
    if len(batches) < MIN_BATCHES:
        return dict.fromkeys(names)
    counts = np.array([[batch.right[c] for c in classifiers] for batch in batches])
    gained = counts[:, -1] - counts[:, 0]  # the baseline comes first, the gated classifier last
    sizes = np.array([batch.size for batch in batches])
    found = bootstrap(np.column_stack([counts, gained]), sizes)
    return dict(zip(names, found, strict=True))


def _by_class(
    clf: Caster, truth: NDArray[np.int64], baseline: Answers, gated: Answers
) -> Iterator[ClassScore]:
    """Yield scores of the classes present, in the order of `clf.classes_`."""
    columns = (truth, truth[baseline.right], truth[gated.right])
    counts = (np.bincount(column, minlength=len(clf.classes_)).tolist() for column in columns)
    for label, n, *right in zip(clf.classes_.tolist(), *counts, strict=True):
        if n:
            yield ClassScore(label, n, *right)


def write_page(evaluation: Evaluation, path: str | os.PathLike[str]) -> None:
    """Write one self-contained HTML page: scores, figures, verdicts, and how to read them."""
    check_can_draw()
    from caster.report import evaluation_page, html  # `evaluate` itself needs no matplotlib

    html.write(evaluation_page.render(evaluation), path)
