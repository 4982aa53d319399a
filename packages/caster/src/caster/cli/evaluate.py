"""The evaluate command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from caster.cli.console import errors, new_table, output, progress_bar, say
from caster.cli.inspect import KeyFile, StateFile
from caster.cli.options import (
    AdapterOptions,
    BatchSize,
    CacheFolder,
    DataRoot,
    MaxOption,
    SkipUnreadable,
    features_path,
    limit_option,
    limits_of,
    load_adapter,
    opened,
    sample_option,
    say_skipped,
    with_model,
)
from caster.errors import counted

if TYPE_CHECKING:
    from rich.table import Table

    from caster.models.protocol import FrozenModel
    from caster.report.evaluation_results import Evaluation


@with_model(output="page", beside=".json")
def evaluate(
    state: StateFile,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="Labelled target data: with --model images, without it features, in the formats "
            "of `caster fit`.",
        ),
    ],
    model: FrozenModel | None,
    how: AdapterOptions,
    page: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="PAGE",
            show_default=False,
            help="HTML page to write; the numbers go to a .json file beside it. "
            "[default: caster-evaluation.html]",
        ),
    ] = Path("caster-evaluation.html"),
    key: KeyFile = None,
    batch_size: BatchSize = 64,
    seed: Annotated[int, typer.Option(min=0, help="Seed for shuffling.")] = 0,
    in_order: Annotated[
        bool,
        typer.Option("--in-order", help="Keep the order of the data, as `caster predict` does."),
    ] = False,
    skip_unreadable: SkipUnreadable = False,
    data_root: DataRoot = None,
    store: CacheFolder = None,
    limit: Annotated[int | None, limit_option("random ones, by --seed")] = None,
    larger: MaxOption = None,
    known_classes_only: Annotated[
        bool,
        sample_option(
            "Skip samples of classes that the state lacks, and report how many.",
            "--known-classes-only",
        ),
    ] = False,
) -> None:
    """Measure on labelled data whether adaptation helps.

    Compares the frozen head, Source-GDA, and adaptation with and without the gate by accuracy, harm
    (samples that the frozen head gets right and adaptation wrong), log-likelihood and calibration.
    Writes a page with figures, and the numbers as JSON. The data are shuffled, whereas `caster
    predict` keeps their order and rests on long streams: --in-order here and --every 1 there give
    the same answers.
    """
    from caster.report.evaluation import data_file, evaluate_file, evaluate_images

    order, limits = None if in_order else seed, limits_of(larger)
    skipped: list[str] = []
    with progress_bar() as progress:
        if model is None:
            found = evaluate_file(
                state,
                features_path(data),
                page,
                key=key,
                batch_size=batch_size,
                seed=order,
                tau=how.tau,
                safeguards=not how.no_safeguards,
                mechanism=how.mechanism,
                limits=limits,
                limit=limit,
                known_classes_only=known_classes_only,
                progress=progress,
            )
        else:
            from caster.io.feature_cache import default_store

            # A page shows the ratio of every batch.
            adapter = load_adapter(model, state, key, how, every=1)
            found, skipped = evaluate_images(
                adapter,
                opened(data, data_root, limits),
                page,
                store=store or default_store(),
                batch_size=batch_size,
                seed=order,
                skip_unreadable=skip_unreadable,
                limit=limit,
                known_classes_only=known_classes_only,
                progress=progress,
            )
    say_skipped(skipped)
    if found.warning:
        say(f"caster: {found.warning}", errors)
    say(found.conclusion)
    if found.source_check:
        say(found.source_check)
    output.print(_table(found))
    say(found.summary)
    verdicts = ", ".join(
        f"{count:,} accepted" if reason == "accepted" else f"{count:,} rejected ({reason})"
        for reason, count in found.reasons.items()
    )
    say(f"Verdicts: {verdicts}; median ratio {found.ratio:.3g}.")
    if not in_order:
        say(
            "Order: shuffled. `caster predict` keeps the order of its inputs, as does `--in-order`."
        )
    say(f"Written: {page}, {data_file(page)}")


def _table(found: Evaluation) -> Table:
    title = (
        f"{counted(found.size, 'sample')} in {counted(len(found.batches), 'batch')}; "
        "percent, except NLL"
    )
    numbers = ("accuracy", "95% interval", "harm", "help", "NLL", "ECE")
    table = new_table("classifier", *numbers, numbers=numbers, title=title)
    for name, score in found.scores.items():
        ends = score.interval
        table.add_row(
            found.mechanism.label(name),
            f"{100 * score.accuracy:.1f}",
            "" if ends is None else f"{100 * ends.low:.1f}-{100 * ends.high:.1f}",
            f"{100 * score.harm:.1f}",
            f"{100 * score.help:.1f}",
            f"{score.nll:.3f}",
            f"{100 * score.calibration_error:.1f}",
        )
    return table
