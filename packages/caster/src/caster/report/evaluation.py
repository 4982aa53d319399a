"""Score four classifiers in one pass over a labelled stream."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from caster.adapt.estimator import Caster
from caster.adapt.fitting import DOUBTFUL, warn_of_poor_head
from caster.adapt.prediction import LOPSIDED
from caster.core.adaptation import Adaptation
from caster.core.arrays import as_real_array, to_numpy
from caster.core.verdict import Verdict
from caster.errors import CasterError
from caster.io.labels import as_labels, encode
from caster.models.heads import better_names
from caster.report import check_can_draw, metrics
from caster.report.evaluation_results import Batch, ClassScore, Evaluation, Score
from caster.report.intervals import Interval, bootstrap
from caster.report.mechanism import TRANSPORT, Mechanism
from caster.report.metrics import Flags, Floats

# Features (B, d), labels (B,), logits (B, C) or None; and the adaptation, if it is made already.
Chunk = tuple[Any, Any, Any] | tuple[Any, Any, Any, Adaptation]


@dataclass(frozen=True, eq=False)
class Answers:
    """One classifier on some samples, in one number per sample and metric."""

    answer: NDArray[np.int64]  # (n,)
    right: Flags  # (n,)
    log_likelihood: Floats  # (n,), of the true class
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

    Frozen head, Source-GDA, and transport without and with the gate are compared. Without
    logits Source-GDA, then the fallback, takes the frozen head's place. `name` says what was
    evaluated, and `digests` the SHA-256 of what took part; both are only passed on. A chunk may
    bring its `Adaptation` along, by the mechanism named.

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
        raise CasterError("there is nothing to evaluate: not a single batch")
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
    """The class that far too many answers name, in words."""
    counts = np.bincount(gated.answer, minlength=len(clf.classes_))
    top = int(counts.argmax())
    answered, true, n = int(counts[top]), int(np.sum(truth == top)), len(truth)
    if answered - true <= LOPSIDED * n:
        return None
    label = str(clf.classes_[top])
    return f"{answered:,} of {n:,} answers are {label!r}, and {true:,} of the samples"


def _is_right_on_source(clf: Caster) -> bool:
    """Whether the order of the outputs is beyond doubt, whatever a shift makes of the answers."""
    check = clf.source_check_
    return check is not None and check.head is not None and check.head >= DOUBTFUL


def _turned_off(clf: Caster) -> str | None:
    """Why the source check turns transport off, if it does."""
    check = clf.source_check_
    if check is None or check.supported or not clf.settings.safeguards:
        return None
    return check.sentences()[0]


def _answer(
    clf: Caster, features: Any, labels: Any, logits: Any, made: Adaptation | None = None
) -> tuple[NDArray[np.int64], dict[str, Answers], Verdict]:
    """True classes of a batch, every classifier's answers to it, and the verdict on it."""
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
    """Intervals of all accuracies, and of the gain of gated adaptation over the baseline."""
    counts = np.array([[batch.right[c] for c in classifiers] for batch in batches])
    gained = counts[:, -1] - counts[:, 0]  # the gated one is last, the baseline first
    sizes = np.array([batch.size for batch in batches])
    found = bootstrap(np.column_stack([counts, gained]), sizes)
    return dict(zip([*classifiers, "gain"], found, strict=True))


def _by_class(
    clf: Caster, truth: NDArray[np.int64], baseline: Answers, gated: Answers
) -> Iterator[ClassScore]:
    """Scores of the classes present, in the order of `clf.classes_`."""
    columns = (truth, truth[baseline.right], truth[gated.right])
    counts = (np.bincount(column, minlength=len(clf.classes_)).tolist() for column in columns)
    for label, n, *right in zip(clf.classes_.tolist(), *counts, strict=True):
        if n:
            yield ClassScore(label, n, *right)


def write_page(evaluation: Evaluation, path: str | os.PathLike[str]) -> None:
    """Write one self-contained HTML page: scores, figures, verdicts, and how to read them."""
    check_can_draw()
    from caster.report.evaluation_page import write  # only now: `evaluate` works without matplotlib

    write(evaluation, path)
