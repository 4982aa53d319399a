"""Target features or images in, a table of adapted predictions out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from caster import state as states
from caster.adapt.adapter import Adapter
from caster.adapt.deployed import Batch, batches, check_batch_size, configured, extract_for
from caster.adapt.estimator import Caster
from caster.adapt.extract import forget
from caster.config import DEFAULT_LIMITS, Limits
from caster.core.types import Reason
from caster.errors import CasterError
from caster.io.feature_files import open_features
from caster.io.images import Images
from caster.io.prediction_table import Table, check_table, open_table
from caster.io.progress import Progress, silent
from caster.io.sealed import Key
from caster.io.subset import at_random, check_limit, first, some_features, some_images
from caster.models.heads import of_classes
from caster.models.protocol import Outputs
from caster.report.answer import Answer
from caster.report.evaluation import Tried
from caster.report.layer_stream import (
    LayerStream,
    refuse_layers_of_features,
    telling_what_is_lost,
    wants_layers,
)
from caster.report.mechanism import TRANSPORT, Mechanism
from caster.state.source_check import SourceCheck

MANY_CHANGED = 0.3  # of the answers in adapted batches; more need a look at labelled data


@dataclass
class Summary:
    """What a prediction run did."""

    rows: int = 0
    reasons: Counter[Reason] = field(default_factory=Counter)  # batches by verdict
    ratios: list[float] = field(default_factory=list)  # one a batch
    changed: int | None = None  # predictions that differ from the frozen head's, where it answers
    adapted: int = 0  # rows that the adapted classifier answered
    source_check: SourceCheck | None = None  # of the state
    unreadable: list[str] = field(default_factory=list)  # images skipped, and why
    mechanism: Mechanism = TRANSPORT  # what adapted
    sites: int | None = None  # that layer transport aligned
    full_maps: int = 0  # of these, how many by full maps, where a batch supports them

    @property
    def batches(self) -> int:
        """Batches in all."""
        return len(self.ratios)

    @property
    def median_ratio(self) -> float:
        """Median certificate; infinite where most batches have none."""
        return float(np.median(self.ratios))

    @property
    def changed_share(self) -> float | None:
        """Share of the adapted rows whose answer is not the frozen head's, where both are known.

        All other rows have the frozen head's answer.
        """
        return self.changed / self.adapted if self.changed is not None and self.adapted else None

    @property
    def changed_too_many(self) -> bool:
        """Whether more answers changed than two good classifiers would differ in.

        Two that err as often as the head does on the source differ in at most twice that share;
        `MANY_CHANGED` is allowed in any case.
        """
        check = self.source_check
        error = 0.0 if check is None or check.head is None else 1.0 - check.head
        return (self.changed_share or 0.0) > max(MANY_CHANGED, 2 * error)


_Row = tuple[Sequence[int], list[str] | None, Answer]  # rows, names of images, the answer


def predict_file(
    state: Path,
    target: Path,
    output: Path,
    *,
    batch_size: int,
    tau: float | None = None,
    safeguards: bool = True,
    gate: bool = True,
    layers: bool | None = None,
    key: Key | None = None,
    limits: Limits = DEFAULT_LIMITS,
    spreadsheet_safe: bool = False,
    probabilities: bool = False,
    limit: int | None = None,
    progress: Progress = silent,
) -> Summary:
    """Adapt a feature file batch by batch, in its own order, and write one row a sample.

    Without the gate the transported classifier answers every batch that has one; a batch of a
    single row has none and gets the fallback. A state with layers is refused, unless `layers` is
    False: features have passed them. `probabilities` adds a column a class, `limit` takes that many
    rows from the start.
    """
    check_limit(limit)
    check_batch_size(batch_size)
    check_table(output, spreadsheet_safe, state, target)
    held = states.load(state, key)
    refuse_layers_of_features(held, layers)
    clf = configured(Caster.from_state(held), tau, safeguards)
    file = open_features(target, "features", limits=limits)
    file = some_features(file, first(file.rows, limit))
    names = ("features", "logits") if "logits" in file.names else ("features",)

    def answers() -> Iterator[_Row]:
        row = 0
        for features, *logits in file.chunks(names, batch_size):
            try:
                head_logits = of_classes(logits[0], held.head) if logits else None
                answer = Answer.of(clf, features, head_logits)
            except CasterError as error:
                where = f"rows {row} to {row + len(features) - 1} of {target}"
                raise CasterError(f"{where}: {error}") from None
            yield range(row, row + len(features)), None, answer
            row += len(features)
            progress("adapting", row, file.rows)

    with open_table(output, spreadsheet_safe) as table:
        summary = Summary(source_check=held.source_check)
        return _written(answers(), table, summary, gate, probabilities)


def predict_images(
    adapter: Adapter,
    images: Images,
    output: Path,
    *,
    batch_size: int,
    tau: float | None = None,
    safeguards: bool = True,
    gate: bool = True,
    layers: bool | None = None,
    shuffle: int | None = None,
    skip_unreadable: bool = False,
    store: Path | None = None,
    spreadsheet_safe: bool = False,
    probabilities: bool = False,
    limit: int | None = None,
    progress: Progress = silent,
) -> Summary:
    """Adapt to images batch by batch, and write one row an image.

    They come in their own order, or shuffled by a seed: a batch's answer depends on what is in
    it, and images sorted by class make batches of few classes. Features are in the store until
    a run is done, for one that was interrupted to go on from, and stay only if a fit or an
    evaluation keeps them.
    A state with layers is answered by layer transport, unless `layers` is False. `probabilities`
    adds a column a class, `limit` takes that many images from the start, or drawn at random where
    they are shuffled.
    """
    check_limit(limit)
    check_batch_size(batch_size)
    check_table(output, spreadsheet_safe, Path(adapter.model.name), Path(images.name))
    count = len(images)
    chosen = first(count, limit) if shuffle is None else at_random(count, limit, shuffle)
    images = some_images(images, chosen)
    aligned = LayerStream(adapter, tau) if wants_layers(adapter.state, layers) else None
    clf = adapter.clf if aligned else configured(adapter.clf, tau, safeguards)
    if aligned is not None:
        aligned.check_sizes(images)
    with ExitStack() as stack:
        if store is None:
            temporary = TemporaryDirectory(prefix="caster-", ignore_cleanup_errors=True)
            store = Path(stack.enter_context(temporary))
        features = extract_for(
            adapter,
            images,
            store,
            batch_size=batch_size,
            skip_unreadable=skip_unreadable,
            progress=progress,
            passing=True,
        )

        def answers() -> Iterator[_Row]:
            plan = (features, batch_size, shuffle, progress)
            stream: Iterable[tuple[Batch, Tried | None]] = (
                ((batch, None) for batch in batches(*plan))
                if aligned is None
                else aligned.tried(images, *plan)
            )
            for batch, tried in stream:
                rows = features.places[batch.rows].tolist()
                names = [images.names[row] for row in rows]
                logits = adapter.head_logits(Outputs(batch.features, batch.logits))
                if tried is None:
                    yield chosen[rows].tolist(), names, Answer.of(clf, batch.features, logits)
                else:
                    yield chosen[rows].tolist(), names, Answer.tried(clf, tried, logits)

        check = adapter.state.source_check
        summary = Summary(source_check=check, unreadable=features.unreadable)
        if aligned is not None:
            summary.mechanism = aligned.mechanism
        with telling_what_is_lost(aligned), open_table(output, spreadsheet_safe) as table:
            _written(answers(), table, summary, gate, probabilities)
        if aligned is not None:
            summary.sites, summary.full_maps = aligned.sites, aligned.full_maps
        forget(features, adapter.model, store)
    return summary


def _written(
    answers: Iterable[_Row], table: Table, summary: Summary, gate: bool, probabilities: bool
) -> Summary:
    for rows, names, answer in answers:
        scores, giver = answer.given(summary.mechanism.name, gate)
        table.write(answer.columns(rows, names, scores, giver, summary.batches, probabilities))
        summary.rows += len(scores)
        summary.adapted += len(scores) if giver == summary.mechanism.name else 0
        summary.reasons[answer.verdict.reason] += 1
        summary.ratios.append(answer.verdict.ratio)
        changed = answer.changed(scores)
        if changed is not None:
            summary.changed = (summary.changed or 0) + changed
    return summary
