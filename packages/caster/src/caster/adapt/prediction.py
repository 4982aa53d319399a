"""Predict on files batch by batch: read, run the model, adapt, write rows; resumable."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from caster import state as states
from caster.adapt.adapter import Adapter, Mechanism, Stream, configured
from caster.adapt.estimator import Caster
from caster.adapt.image_batches import (
    ImageBatch,
    naming_images,
    read_batches,
    require_preprocessing,
    run,
)
from caster.config import DEFAULT_LIMITS, Limits
from caster.core.adaptation import Adaptation
from caster.core.arrays import as_real_array, to_numpy
from caster.core.discriminant import host_probabilities
from caster.core.verdict import Reason
from caster.errors import CasterError, is_disk_full
from caster.io import Progress, signed_tensors, silent
from caster.io.feature_files import open_features
from caster.io.files import check_writable, locked, move_into_place
from caster.io.images import Images
from caster.io.labels import Labels
from caster.io.prediction_table import Columns, CsvTable, Table, check_table, open_table
from caster.io.signed_tensors import Key
from caster.io.subset import check_limit, first_rows, random_rows, select_features, select_images
from caster.models import heads
from caster.models.protocol import Outputs, preprocessing_sha256
from caster.state import State
from caster.state.source_check import SourceCheck

log = logging.getLogger("caster")

DIGITS = 6  # decimals of probabilities in a table
MAX_EXCESS_SHARE = 0.5  # fraction of all rows by which a class may exceed its share in the source
MIN_ROWS_TO_WARN = 64  # rows needed for these two warnings
MANY_CHANGED = 0.3  # fraction of changed answers in adapted batches above which to advise a check
SNAPSHOT_EVERY = 5.0  # seconds of work that a crash may cost
FORMAT = "caster-predict 2"
STAGE = "adapting"

Observe = Callable[[Adaptation, int], None]  # takes a batch and the position of its first sample


class OtherRunError(CasterError):
    """An interrupted run whose rows would be lost."""


@dataclass
class Summary:
    """Outcome of a prediction run."""

    method: str = "caster"  # name of the method for accepted batches
    rows: int = 0
    batches: int = 0
    accepted: int = 0  # batches
    reasons: Counter[Reason] = field(default_factory=Counter)  # batches by verdict
    ratios: list[float] = field(default_factory=list)  # one per compared batch
    changed: int | None = None  # predictions that differ from the frozen head's; None: no head
    adapted: int = 0  # rows with adapted answers, in batches that were compared
    unreadable: list[str] = field(default_factory=list)  # error message of each skipped image
    resumed: int = 0  # rows written by an interrupted run
    answers: Counter[str] = field(default_factory=Counter)  # rows by predicted label
    source_check: SourceCheck | None = None
    source_shares: dict[str, float] = field(default_factory=dict)  # class frequencies, by label
    sites: int | None = None  # aligned sites
    full_maps: int = 0  # sites with full maps among them

    @property
    def median_ratio(self) -> float:
        """Median certificate; infinite if most batches have none."""
        return float(np.median(self.ratios)) if self.ratios else np.inf

    @property
    def lopsided(self) -> tuple[str, float] | None:
        """A label predicted far more often than it occurs in the source, and how often."""
        ((label, count),) = self.answers.most_common(1) or (("", 0),)
        share = count / max(1, self.rows)
        found = share - self.source_shares.get(label, 0.0) > MAX_EXCESS_SHARE
        return (label, share) if found and self.rows >= MIN_ROWS_TO_WARN else None

    @property
    def changed_share(self) -> float | None:
        """Fraction of adapted rows whose answer differs from the frozen head's; None if unknown."""
        return self.changed / self.adapted if self.changed is not None and self.adapted else None

    @property
    def changed_too_many(self) -> bool:
        """Whether more answers changed than two good classifiers would disagree on.

        Two classifiers with the head's error rate on the source disagree on at most twice that
        fraction of samples; `MANY_CHANGED` is allowed in any case.
        """
        check = self.source_check
        error = 0.0 if check is None or check.head is None else 1.0 - check.head
        found = (self.changed_share or 0.0) > max(MANY_CHANGED, 2 * error)
        return found and self.adapted >= MIN_ROWS_TO_WARN


def predict_file(
    state: Path,
    target: Path,
    output: Path,
    *,
    batch_size: int,
    tau: float | None = None,
    safeguards: bool = True,
    gate: bool = True,
    mechanism: Mechanism = "auto",
    key: Key | None = None,
    limits: Limits = DEFAULT_LIMITS,
    spreadsheet_safe: bool = False,
    probabilities: bool = False,
    limit: int | None = None,
    observe: Observe | None = None,
    progress: Progress = silent,
) -> Summary:
    """Adapt to a feature file batch by batch, in file order, and write one row per sample.

    Without the gate, the transported classifier answers every batch except one of a single row,
    which has no transport and gets the fallback. `probabilities` adds a column per class. `limit`
    reads only so many rows, from the start. `observe` is called after every batch.
    """
    check_limit(limit)
    check_batch_size(batch_size)
    check_table(output, spreadsheet_safe, state, target)
    loaded = states.load(state, key)
    clf = feature_classifier(loaded, mechanism, tau, safeguards)
    columns = heads.Columns(loaded.head)
    file = open_features(target, "features", limits=limits)
    file = select_features(file, first_rows(file.rows, limit))
    names = ("features", "logits") if "logits" in file.names else ("features",)
    summary = Summary(source_check=loaded.source_check, source_shares=_source_shares(loaded))
    writer = _Writer(clf.classes_, len(names) > 1, gate, probabilities, summary)
    with open_table(output, spreadsheet_safe) as table:
        for features, *logits in file.chunks(names, batch_size):
            start = summary.rows
            try:
                head_logits = columns(logits[0]) if logits else None
                out = clf.adapt(features, head_logits)
            except CasterError as error:
                where = f"rows {start} to {start + len(features) - 1} of {target}"
                raise CasterError(f"{where}: {error}") from None
            table.write(writer.columns(out, range(start, start + len(features))))
            if observe is not None:
                observe(out, start)
            progress(STAGE, summary.rows, file.rows)
    return summary


def predict_images(
    adapter: Adapter,
    images: Images,
    output: Path,
    *,
    batch_size: int,
    gate: bool = True,
    shuffle: int | None = None,
    skip_unreadable: bool = False,
    spreadsheet_safe: bool = False,
    probabilities: bool = False,
    limit: int | None = None,
    observe: Observe | None = None,
    progress: Progress = silent,
) -> Summary:
    """Adapt to images batch by batch, and write one row per image after each batch.

    Images come in their own order, or shuffled with a seed, since images sorted by class make
    batches of few classes. Rows go to OUTPUT.partial, which becomes OUTPUT at the end; a run that
    writes .csv resumes there after an interruption, with the stream as it was. `probabilities` adds
    a column per class. `limit` reads only so many images, from the start or, if shuffled, at
    random. `observe` is called after every batch.
    """
    check_limit(limit)
    check_batch_size(batch_size)
    model = adapter.model
    check_table(output, spreadsheet_safe, Path(model.name), Path(images.name))
    count = len(images)
    chosen = first_rows(count, limit) if shuffle is None else random_rows(count, limit, shuffle)
    images = select_images(images, chosen)
    rows = np.arange(len(images))
    order = rows if shuffle is None else np.random.default_rng(shuffle).permutation(rows)
    options = _Options(batch_size, gate, skip_unreadable, spreadsheet_safe, probabilities)
    with _resumable(adapter, images, output, order, options) as job:
        summary, has_head = job.summary, adapter.state.head is not None
        writer = _Writer(adapter.classes, has_head, gate, probabilities, summary)
        reading = read_batches(
            images,
            require_preprocessing(model),
            order[job.seen :].tolist(),
            batch_size,
            skip_unreadable=skip_unreadable,
        )
        with closing(reading):  # an error would leave its threads running
            progress(STAGE, job.seen, len(images))
            for batch in reading:
                with job.batch(len(batch.rows) + len(batch.unreadable)):
                    summary.unreadable += batch.unreadable.values()
                    if batch.rows:
                        out = answer_images(job.stream, batch, images.names)
                        names = [images.names[row] for row in batch.rows]
                        job.table.write(writer.columns(out, chosen[batch.rows].tolist(), names))
                        if observe is not None:
                            observe(out, job.stream.samples - len(out.labels))
                progress(STAGE, job.seen, len(images))
        model.verify()
        if summary.rows == 0:
            raise CasterError(f"none of the images of {images.name} can be read")
        summary.sites, summary.full_maps = job.stream.sites, adapter.full_maps
    return summary


def answer_images(
    stream: Stream, batch: ImageBatch, names: Sequence[str], outputs: Outputs | None = None
) -> Adaptation:
    """Run the model on a batch of images, unless its `outputs` are given, and adapt."""
    adapter = stream.adapter
    if adapter.mechanism == "features":  # images of several sizes can share a batch
        outputs = outputs or run(adapter.model, batch, names)
        check_outputs(adapter, outputs)
        return stream(None, outputs)
    if len(batch.groups) > 1:
        one, other = (names[batch.rows[group.positions[0]]] for group in batch.groups[:2])
        raise CasterError(
            f"images of several sizes cannot be aligned together (such as {one} and {other}): "
            "add a `resize` and its `interpolation` to the preprocessing and fit again, or set "
            "{argument} to features if the model takes any size",
            argument="mechanism",
        )
    with naming_images(names[batch.rows[0]], len(batch.rows)):
        return stream(batch.groups[0].prepared, outputs)


def check_outputs(adapter: Adapter, outputs: Outputs) -> None:
    """Raise if the model's features or logits do not fit the state."""
    width, found = adapter.clf.n_features_in_, outputs.features.shape[1]
    if found != width:
        raise CasterError(
            f"the state was fitted to {width:,} features, and {adapter.model.name} gives {found:,}"
        )
    adapter.head_logits(outputs)


def feature_classifier(
    state: State, mechanism: Mechanism, tau: float | None, safeguards: bool
) -> Caster:
    """Build the estimator for a file of features."""
    if mechanism == "layers":
        raise CasterError(
            "features have passed all layers: give images and {argument}", argument="model"
        )
    return configured(Caster.from_state(state), tau, safeguards)


def check_batch_size(batch_size: int) -> None:
    """Raise for a batch size below 1."""
    if batch_size < 1:
        raise CasterError(f"the batch size must be at least 1, not {batch_size}")


class _Writer:
    """Convert adaptations to columns of a table, and count them in the summary."""

    def __init__(
        self,
        classes: Labels,  # (C,)
        has_head: bool,
        gate: bool,
        every_class: bool,  # whether to add a column of probabilities per class
        summary: Summary,
    ) -> None:
        self.classes, self.has_head, self.gate = classes, has_head, gate
        self.every_class, self.summary = every_class, summary
        if has_head and summary.changed is None:
            summary.changed = 0

    def columns(
        self, out: Adaptation, rows: Sequence[int], names: list[str] | None = None
    ) -> Columns:
        """Rows of a batch, with columns in the order of docs/command-line.md."""
        used = out.adapted is not None and (out.verdict.accepted or not self.gate)
        scores = _numbers(out.adapted if used else out.scores)
        method = self._count(out, used, scores)
        count, chosen = len(scores), scores.argmax(axis=1)
        self.summary.answers.update(map(str, self.classes[chosen].tolist()))
        with np.errstate(invalid="ignore"):  # NaN if the largest score is infinite
            probabilities = host_probabilities(scores).round(DIGITS)
        batch = self.summary.batches - 1
        return {
            "row": list(rows),
            **({} if names is None else {"image": names}),
            "batch": [batch] * count,
            "prediction": _values(self.classes[chosen]),
            "confidence": probabilities[np.arange(count), chosen].tolist(),
            **({"frozen": self._frozen_labels(out, count)} if self.has_head else {}),
            "verdict": ["accepted" if out.verdict.accepted else "rejected"] * count,
            "ratio": [out.verdict.ratio] * count,
            "reason": [out.verdict.reason] * count,
            "method": [method] * count,
            **(self._each_class(probabilities) if self.every_class else {}),
        }

    def _each_class(self, probabilities: NDArray[np.float64]) -> Columns:  # (B, C)
        return dict(zip(_column_names(self.classes), probabilities.T.tolist(), strict=True))

    def _count(self, out: Adaptation, used: bool, scores: NDArray[Any]) -> str:
        """Count a batch in the summary; return the method that answered it."""
        summary = self.summary
        summary.rows += len(scores)
        summary.batches += 1
        summary.accepted += out.verdict.accepted
        summary.reasons[out.verdict.reason] += 1
        if not np.isnan(out.verdict.ratio):
            summary.ratios.append(out.verdict.ratio)
        if self.has_head and out.frozen is not None:
            differs = scores.argmax(axis=1) != _numbers(out.frozen).argmax(axis=1)
            summary.changed = (summary.changed or 0) + int(differs.sum())
        if used:
            summary.adapted += 0 if out.frozen is None else len(scores)
            return summary.method
        return "frozen" if self.has_head else "source-gda"

    def _frozen_labels(self, out: Adaptation, count: int) -> list[Any]:
        if out.frozen is None:
            return [None] * count
        return _values(self.classes[_numbers(out.frozen).argmax(axis=1)])


@dataclass(frozen=True)
class _Options:
    """User options that determine the rows of a table."""

    batch_size: int
    gate: bool
    skip_unreadable: bool
    spreadsheet_safe: bool
    probabilities: bool


class _Job:
    """A run in progress: its stream, its table and its position, with snapshots if it has a file.

    A snapshot is possible between batches only, when stream, table and summary agree.
    """

    def __init__(
        self,
        stream: Stream,
        table: Table,
        summary: Summary,
        seen: int = 0,
        text: TextIO | None = None,  # with the rows of the table
        snapshot: Path = Path(),
        identity: str = "",
    ) -> None:
        self.stream, self.table, self.summary, self.seen = stream, table, summary, seen
        self.saved = seen  # images in the last snapshot
        self.between_batches = True
        self._text, self._snapshot, self._identity = text, snapshot, identity
        self._saved_at = time.monotonic()

    @contextmanager
    def batch(self, images: int) -> Iterator[None]:
        """Answer one batch, then flush its rows and take a snapshot every few seconds."""
        self.between_batches = False
        yield
        if self._text is not None:
            self._text.flush()
        self.seen += images
        self.between_batches = True
        if time.monotonic() - self._saved_at > SNAPSHOT_EVERY:
            self.save()

    def save(self) -> None:
        """Take a snapshot; a failure is only a warning, because the run itself can continue."""
        if self._text is None:
            return
        try:
            header = {
                "format": FORMAT,
                "identity": self._identity,
                "seen": str(self.seen),
                "bytes": str(os.fstat(self._text.fileno()).st_size),
                "summary": json.dumps(_plain(self.summary)),
            }
            signed_tensors.write(self.stream.state(), header, self._snapshot)
            self.saved = self.seen
        except (CasterError, OSError) as error:
            log.warning("no snapshot was written: %s", error)
        self._saved_at = time.monotonic()


@contextmanager
def _resumable(
    adapter: Adapter,
    images: Images,
    output: Path,
    order: NDArray[np.intp],
    options: _Options,
) -> Iterator[_Job]:
    """Open a job whose rows go to OUTPUT.partial; resume an equal job that was interrupted."""
    summary = Summary(
        adapter.method,
        source_check=adapter.state.source_check,
        source_shares=_source_shares(adapter.state),
    )
    safe = options.spreadsheet_safe
    if output.suffix != ".csv":  # Parquet cannot be appended to
        with open_table(output, safe) as table:
            try:
                yield _Job(adapter.new_stream(), table, summary)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    "nothing was written: only .csv output can be continued"
                ) from None
        return
    shown, output = f"{output}.partial", output.resolve()  # a link stays a link
    partial, snapshot = (Path(f"{output}.partial{end}") for end in ("", ".stream"))
    check_writable(partial)
    busy = f"another run writes {shown}: wait for it, or give another output"
    with locked(Path(f"{partial}.lock"), busy):
        identity = _identity(adapter, images, order, options)
        found = _interrupted(adapter, snapshot, partial, identity, summary)
        if found is None and partial.exists():
            log.warning("%s cannot be continued: starting again", shown)
        stream, seen, size = found or (adapter.new_stream(), 0, 0)
        if found is None:
            snapshot.unlink(missing_ok=True)  # before the rows that it counts
        with partial.open("ab") as raw:
            raw.truncate(size)
        with partial.open("a", newline="", encoding="utf-8") as text:
            table = CsvTable(text, safe, started=size > 0)
            job = _Job(stream, table, summary, seen, text, snapshot, identity)
            try:
                yield job
            except BaseException as error:
                if isinstance(error, OSError) and is_disk_full(error) and error.filename is None:
                    error.filename = str(partial)  # a failed write does not name its file
                if job.between_batches and job.seen > job.saved:
                    job.save()
                if job.saved == 0:
                    partial.unlink(missing_ok=True)
                    if isinstance(error, KeyboardInterrupt):
                        raise KeyboardInterrupt("no batch was complete yet") from None
                elif isinstance(error, KeyboardInterrupt):
                    done = f"{job.saved:,} of {len(order):,} images are answered in {shown}"
                    raise KeyboardInterrupt(f"{done}: the same command continues there") from None
                raise
        move_into_place(partial, output)
        snapshot.unlink(missing_ok=True)


def _identity(adapter: Adapter, images: Images, order: NDArray[np.intp], options: _Options) -> str:
    """Digest of everything that determines the rows of a table."""
    model: Any = adapter.model
    parts = [
        model.sha256,
        preprocessing_sha256(model),
        [str(getattr(model, name, None)) for name in ("bf16", "channels_last", "device")],
        states.digest(adapter.state),
        images.sha256,
        adapter.mechanism,
    ]
    text = repr((parts, adapter.settings, options))
    return hashlib.sha256(text.encode() + order.astype("<i8").tobytes()).hexdigest()


def _interrupted(
    adapter: Adapter, snapshot: Path, partial: Path, identity: str, summary: Summary
) -> tuple[Stream, int, int] | None:
    """Restore an interrupted run: stream, images seen and bytes written.

    None if there is none or it is damaged; an error for an intact one of another command, which may
    have taken hours.
    """
    if adapter.model.sha256 is None or not (snapshot.is_file() and partial.is_file()):
        return None
    try:
        kind, maker = "a snapshot", "caster predict"
        arrays, metadata = signed_tensors.read_format(snapshot, kind, maker, FORMAT)
        size = int(metadata["bytes"])
        if partial.stat().st_size < size:
            return None
        if metadata.get("identity") != identity:
            raise OtherRunError(
                f"{partial} has the {int(metadata['seen']):,} answers of an interrupted run with "
                "another model, state, images or options: repeat its command to continue it, "
                "remove it, or write to another file"
            )
        stream = adapter.resume(arrays)
        for name, value in json.loads(metadata["summary"]).items():
            setattr(summary, name, Counter(value) if name in ("reasons", "answers") else value)
        summary.resumed = summary.rows
        return stream, int(metadata["seen"]), size
    except OtherRunError:
        raise
    except (CasterError, KeyError, ValueError):
        return None  # damaged: start again


def _source_shares(state: State) -> dict[str, float]:
    counts = state.moments.counts
    return dict(
        zip(map(str, state.classes.tolist()), (counts / counts.sum()).tolist(), strict=True)
    )


def _plain(summary: Summary) -> dict[str, Any]:
    derived = ("method", "source_check", "source_shares", "sites", "full_maps", "resumed")
    return {name: value for name, value in vars(summary).items() if name not in derived}


def _values(labels: Labels) -> list[Any]:
    """Values of a column of labels; labels of mixed types become text."""
    values = labels.tolist()
    return [str(value) for value in values] if labels.dtype.kind == "O" else values


def _column_names(classes: Labels) -> list[str]:
    """`p:` and the label, or its repr if two labels print alike, such as 1 and "1"."""
    labels = classes.tolist()
    names = [f"p:{label}" for label in labels]
    return names if len(set(names)) == len(names) else [f"p:{label!r}" for label in labels]


def _numbers(values: Any) -> NDArray[Any]:
    return to_numpy(as_real_array(values))
