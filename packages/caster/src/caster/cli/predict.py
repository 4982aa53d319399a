"""The predict command."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from caster.cli.console import errors, new_table, output, progress_bar, say
from caster.cli.inspect import KeyFile, StateFile, describe_mechanism, say_poor_head
from caster.cli.options import (
    AdapterOptions,
    BatchSize,
    DataRoot,
    Every,
    MaxOption,
    RayOption,
    SkipUnreadable,
    Workers,
    features_path,
    image_option,
    limit_option,
    limits_of,
    load_adapter,
    opened,
    panel,
    ray_pool,
    say_skipped,
    with_model,
)
from caster.errors import CasterError, counted

if TYPE_CHECKING:
    from rich.table import Table

    from caster.adapt.adapter import Adapter
    from caster.adapt.prediction import Observe, Summary
    from caster.cli.options import MakeModel
    from caster.io.images import Images
    from caster.models.protocol import FrozenModel
    from caster.state import State

of_table = panel("Output table")


@dataclass(frozen=True)
class StreamOptions:
    """How inputs are batched, and answers written as rows."""

    batch_size: BatchSize = 64
    gate: Annotated[
        bool,
        typer.Option(
            "--gate/--no-gate",
            help="Answer rejected batches with the frozen model (--gate), or adapt to them anyway.",
        ),
    ] = True
    shuffle: Annotated[
        int | None,
        image_option("Shuffle the images with this seed.", metavar="SEED", min=0),
    ] = None
    skip_unreadable: SkipUnreadable = False
    limit: Annotated[int | None, limit_option("the first or, with --shuffle, random ones")] = None
    spreadsheet_safe: Annotated[
        bool,
        of_table(
            "Put ' before .csv text that a spreadsheet would run as a formula (=, +, -, @). By "
            "default text is written unchanged.",
            "--spreadsheet-safe",
        ),
    ] = False
    probabilities: Annotated[
        bool, of_table("Add a probability column p:LABEL for every class.", "--probabilities")
    ] = False


@with_model(output="table")
def predict(
    state: StateFile,
    target: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUTS",
            help="With --model, images: a folder, image files, a .txt list of them, an .npz with "
            "`images`, or a published dataset. Without, features: one .npz or .parquet with "
            "`features` and, for the frozen answer, `logits`. With --ray, each input is a stream: "
            "a folder or a .txt list.",
        ),
    ],
    table: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT",
            help="Table to write, .csv or .parquet; with --ray a folder, for a .csv per stream.",
        ),
    ],
    model: FrozenModel | None,
    make_model: MakeModel | None,
    how: AdapterOptions,
    reading: StreamOptions,
    key: KeyFile = None,
    every: Every = None,
    data_root: DataRoot = None,
    larger: MaxOption = None,
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Log every batch in this folder, for `caster monitor`."
        ),
    ] = None,
    stream: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Name of the stream in the log. [default: OUT without its suffix]"
        ),
    ] = None,
    ray: RayOption = None,
    workers: Workers = None,
) -> None:
    """Predict with adaptation, batch by batch in the order of the inputs.

    Each row has the prediction, its probability (`confidence`), the verdict on its batch with ratio
    and reason, and the method that answered. A rejected batch gets the frozen head's answer, or
    Source-GDA's if there are no logits for the state's classes. Rows of images are written to
    OUT.partial as they are answered, and the same command continues an interrupted .csv. Unlike
    this command, `caster evaluate` shuffles its data, except with --in-order.
    """
    limits = limits_of(larger)
    if log is not None and not reading.gate:
        raise CasterError("--log records gated answers: drop --no-gate or --log")
    if stream is not None and log is None:
        raise CasterError("--stream requires --log")
    if workers is not None and ray is None:
        raise CasterError("--workers requires --ray")
    if ray is not None:
        if model is None or log is not None:
            raise CasterError("--ray requires images and --model, and does not support --log")
        adapter = load_adapter(model, state, key, how, every)
        say_poor_head(adapter.state.source_check)
        streams = [opened(path, data_root, limits, labelled=False) for path in target]
        from caster.adapt.ray_jobs import predict_streams

        with ray_pool(ray, workers, make_model, model) as pool, progress_bar() as progress:
            found = predict_streams(
                pool,
                adapter.state,
                streams,
                table,
                adapter_options=how.arguments(every),
                progress=progress,
                **vars(reading),
            )
        say_skipped([line for summary in found.values() for line in summary.unreadable])
        output.print(_streams_table(found))
        say(f"Written: {table}")
        return
    stream = table.stem if stream is None else stream
    with progress_bar() as progress:
        if model is None:
            if len(target) > 1:
                raise CasterError("pass a single feature file, or images with --model")
            from caster import state as states
            from caster.adapt.prediction import predict_file

            image_only = ("shuffle", "skip_unreadable")
            summary = predict_file(
                state,
                features_path(target[0]),
                table,
                key=key,
                tau=how.tau,
                safeguards=not how.no_safeguards,
                mechanism=how.mechanism,
                limits=limits,
                observe=None if log is None else _logger(log, stream, states.load(state, key)),
                progress=progress,
                **{name: x for name, x in vars(reading).items() if name not in image_only},
            )
        else:
            from caster.adapt.prediction import predict_images
            from caster.io.prediction_table import check_table

            check_table(table, reading.spreadsheet_safe)  # before warnings about the images
            adapter = load_adapter(model, state, key, how, every)
            if every is not None and adapter.mechanism == "features":
                raise CasterError(
                    "{argument} is for layers, and this adapter transports features: omit it",
                    argument="every",
                )
            several = [Path(path) for path in target]
            images = opened(
                target[0] if len(target) == 1 else several, data_root, limits, labelled=False
            )
            if reading.shuffle is None:
                size = reading.batch_size
                _warn_of_order(images, min(size, reading.limit or size), adapter)
            observe = None if log is None else _logger(log, stream, adapter.state)
            summary = predict_images(
                adapter, images, table, observe=observe, progress=progress, **vars(reading)
            )
    say_skipped(summary.unreadable)
    say_poor_head(summary.source_check)
    output.print(_summary_table(summary))
    _say_outcome(summary, table, reading.gate, reading.shuffle)


def _logger(folder: Path, stream: str, state: State) -> Observe:
    """Make a function that logs a batch after its answer."""
    from caster.monitor.log import StreamLog

    log = StreamLog(folder, stream, state)
    return lambda out, position: log.append(out, position=position, time=time.time())


def _warn_of_order(images: Images, batch_size: int, adapter: Adapter) -> None:
    if images.by_class and len(images) > batch_size:
        if adapter.method == "mixture-transport":
            effect = (
                "and aligned layers use that order, so accuracy can be higher than on a shuffled "
                "stream; pass --shuffle 0 to shuffle"
            )
        else:
            transport = f"{adapter.mechanism.removesuffix('s')} transport"
            effect = f"and batches with few classes mislead {transport}: shuffle with --shuffle 0"
        say(f"caster: {images.name} is sorted by class, {effect}", errors)


def _say_outcome(summary: Summary, table: Path, gate: bool, shuffle: int | None) -> None:
    order = "that of the inputs; answers depend on it (`caster evaluate --in-order` keeps it too)"
    say(f"Mechanism: {_mechanism(summary)}.")
    say(f"Order: {order if shuffle is None else f'shuffled with seed {shuffle}'}.")
    if not gate:
        say("Gate off: rejected batches were adapted too.")
    if summary.resumed:
        say(f"Continued an interrupted run, after {counted(summary.resumed, 'row')}.")
    changed = "no frozen head: rejected batches got Source-GDA's answer"
    batches = "compared and accepted batches" if gate else "adapted batches"
    if summary.changed is not None:
        verb = "differs" if summary.changed == 1 else "differ"
        of = f" of {summary.adapted:,}" if summary.changed_share is not None else ""
        predictions = counted(summary.changed, "prediction")
        changed = f"{predictions}{of} in {batches} {verb} from the frozen head's"
    if summary.changed_share is not None:
        changed += f" ({summary.changed_share:.1%})"
    say(f"Median ratio {summary.median_ratio:.3g}; {changed}.")
    if summary.changed_too_many:
        say(
            f"caster: {summary.changed_share:.0%} of the answers in {batches} differ from the "
            "frozen head's: check on labelled data with `caster evaluate` before you use them",
            errors,
        )
    if summary.lopsided is not None:
        label, share = summary.lopsided
        say(
            f"caster: {share:.0%} of the answers are {label!r}: unless the data are, the answers "
            "collapsed to one class; check on labelled data with `caster evaluate`",
            errors,
        )
    say(f"Written: {table}")


def _mechanism(summary: Summary) -> str:
    if summary.sites is None:
        return describe_mechanism("features")
    full = f", {summary.full_maps:,} with full maps" if summary.full_maps else ""
    return describe_mechanism("layers", summary.sites) + full


def _streams_table(found: dict[Path, Summary]) -> Table:
    numbers = ("rows", "batches", "accepted", "median ratio")
    table = new_table("stream", *numbers, numbers=numbers, title=counted(len(found), "stream"))
    for path, summary in found.items():
        share = f"{summary.accepted / summary.batches:.1%}"
        cells = (f"{summary.rows:,}", f"{summary.batches:,}", share)
        table.add_row(path.stem, *cells, f"{summary.median_ratio:.3g}")
    return table


def _summary_table(summary: Summary) -> Table:
    title = f"{counted(summary.rows, 'row')} in {counted(summary.batches, 'batch')}"
    numbers = ("batches", "share")
    table = new_table("verdict", *numbers, numbers=numbers, title=title)
    for reason, count in summary.reasons.most_common():
        name = reason if reason in ("accepted", "rest") else f"rejected: {reason}"
        table.add_row(name, f"{count:,}", f"{count / summary.batches:.1%}")
    return table
