"""Commands on features that exist already: fit, predict, inspect, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from rich.text import Text

from caster.cli.console import errors, output, progress_bar, say, size
from caster.config import Settings

if TYPE_CHECKING:
    from caster.jobs.predict import Summary

LISTED = 20  # classes `inspect` lists unasked
StateFile = Annotated[Path, typer.Argument(metavar="STATE", help="State file, from `caster fit`.")]


def fit(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FEATURES",
            help=".npz or .parquet with `features` and `labels`; read in chunks.",
        ),
    ],
    state: Annotated[Path, typer.Option("--output", "-o", metavar="STATE", help="File to write.")],
    k_max: Annotated[int, typer.Option(help="Most directions to retain.")] = Settings.k_max,
    lam: Annotated[float, typer.Option(help="Shrinkage of the map (λ).")] = Settings.lam,
    beta: Annotated[float, typer.Option(help="Ridge of class covariances (β).")] = Settings.beta,
) -> None:
    """Fit source class statistics once, and keep them in one small file.

    The file is read twice, in chunks: it may be larger than memory.
    """
    from caster.jobs.fit import fit_file

    settings = Settings(k_max=k_max, lam=lam, beta=beta)
    with progress_bar() as progress:
        clf = fit_file(source, state, settings, progress)
    moments = clf.moments_
    say(
        f"{int(moments.counts.sum()):,} samples of {moments.n_classes:,} classes, "
        f"{moments.U.shape[0]:,} features -> {moments.rank} directions, "
        f"margin {moments.margin:.3g}: {state} ({size(state.stat().st_size)})"
    )


def predict(
    state: StateFile,
    target: Annotated[
        Path,
        typer.Argument(
            metavar="TARGET",
            help=".npz or .parquet with `features` and, to fall back on, the head's `logits`.",
        ),
    ],
    table: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT", help=".csv or .parquet to write.")
    ],
    batch_size: Annotated[int, typer.Option(min=1, help="Rows adapted together.")] = 64,
    tau: Annotated[
        float | None, typer.Option(help="Largest accepted certificate, instead of the state's.")
    ] = None,
    gate: Annotated[
        bool,
        typer.Option("--gate/--no-gate", help="Whether rejected batches keep the frozen answer."),
    ] = True,
) -> None:
    """Adapted predictions for a file of target features, batch by batch in its own order.

    Every row gets its batch, verdict, certificate ratio and reason. A rejected batch keeps the
    frozen head's answer, or Source-GDA's where the file has no `logits`.
    """
    from caster.jobs.predict import predict_file

    with progress_bar() as progress:
        summary = predict_file(
            state, target, table, batch_size=batch_size, tau=tau, gate=gate, progress=progress
        )
    output.print(_summary_table(summary))
    if not gate:
        output.print("Gate off: rejected batches were answered by the transported classifier too.")
    changed = "no `logits` given: rejected batches got Source-GDA's answer"
    if summary.changed is not None:
        changed = f"{summary.changed:,} predictions differ from the frozen head's"
    say(f"Median ratio {summary.median_ratio:.3g}; {changed}.")
    say(f"Written: {table}")


def _summary_table(summary: Summary) -> Table:
    title = f"{summary.rows:,} rows in {summary.batches:,} batches"
    right = [Column(name, justify="right") for name in ("batches", "share")]
    table = Table("verdict", *right, title=title, title_justify="left")
    for reason, count in summary.reasons.most_common():
        name = reason if reason == "accepted" else f"rejected: {reason}"
        table.add_row(name, f"{count:,}", f"{count / summary.batches:.1%}")
    return table


def inspect(
    state: StateFile,
    classes: Annotated[
        bool, typer.Option("--classes", help=f"List all classes, also beyond {LISTED}.")
    ] = False,
) -> None:
    """What a state file holds: classes and their counts, sizes, margin, constants, digests."""
    from caster import state as states

    held = states.load(state)
    moments, counts = held.moments, held.moments.counts
    table = Table(title=Text(str(state)), title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (
        ("classes", f"{moments.n_classes:,}"),
        ("samples", f"{int(counts.sum()):,}, {counts.min():,} to {counts.max():,} a class"),
        ("features -> directions", f"{moments.U.shape[0]:,} -> {moments.rank}"),
        ("margin", f"{moments.margin:.4g}"),
        ("file", size(state.stat().st_size)),
        *((f"  {name}", size(bytes_)) for name, bytes_ in states.array_sizes(held)),
        ("constants", ", ".join(f"{k} {v:g}" for k, v in vars(held.settings).items())),
        ("content digest", states.digest(held)),
        ("model digest", held.model_sha256 or "not bound to a model"),
        ("preprocessing digest", held.preprocessing_sha256 or "not bound to a preprocessing"),
        ("written by", f"caster {held.caster_version}, state format {states.VERSION}"),
    ):
        table.add_row(name, Text(value))
    output.print(table)
    output.print(_class_table(held.classes.tolist(), counts.tolist(), everything=classes))


def _class_table(labels: list[Any], counts: list[int], *, everything: bool) -> Table:
    shown = len(labels) if everything else min(LISTED, len(labels))
    table = Table("class", Column("samples", justify="right"), box=SIMPLE_HEAD)
    for label, count in zip(labels[:shown], counts[:shown], strict=True):
        table.add_row(Text(str(label)), f"{count:,}")
    if shown < len(labels):
        table.caption = f"{len(labels) - shown:,} more: --classes lists them"
    return table


def doctor(
    state: StateFile,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows adapted together.")] = 64,
) -> None:
    """Say in plain words whether transport can be supported at a batch size."""
    from caster.jobs.doctor import diagnose

    with errors.status("drawing batches like the source") as status:
        found = diagnose(state, batch_size, lambda n: status.update(f"trying batches of {n}"))
    for line in found.sentences():
        say(f"- {line}")
