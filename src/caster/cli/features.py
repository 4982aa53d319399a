"""Commands on features that exist already: fit, predict, inspect, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from caster.cli.console import errors, output, progress_bar, size
from caster.config import Settings

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
    output.print(
        f"{int(moments.counts.sum()):,} samples of {moments.n_classes:,} classes, "
        f"{moments.U.shape[0]:,} features -> {moments.rank} directions, "
        f"margin {moments.margin:.3g}: {state} ({size(state.stat().st_size)})",
        markup=False,
        highlight=False,
        soft_wrap=True,
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
    rows = Table(
        title=f"{summary.rows:,} rows in {summary.batches:,} batches", title_justify="left"
    )
    rows.add_column("verdict")
    rows.add_column("batches", justify="right")
    rows.add_column("share", justify="right")
    for reason, count in summary.reasons.most_common():
        name = reason if reason == "accepted" else f"rejected: {reason}"
        rows.add_row(name, f"{count:,}", f"{count / summary.batches:.1%}")
    output.print(rows)
    if not gate:
        output.print("Gate off: rejected batches were answered by the transported classifier too.")
    changed = "no `logits` given: rejected batches got Source-GDA's answer"
    if summary.changed is not None:
        changed = f"{summary.changed:,} predictions differ from the frozen head's"
    output.print(f"Median ratio {summary.median_ratio:.3g}; {changed}.", highlight=False)
    output.print(f"Written: {table}", markup=False, highlight=False, soft_wrap=True)


def inspect(state: StateFile) -> None:
    """What a state file holds: classes, sizes, margin, constants, digests."""
    from caster import state as states

    held = states.load(state)
    moments, counts = held.moments, held.moments.counts
    table = Table(title=str(state), title_justify="left", show_header=False)
    fewest, most = held.classes[counts.argmin()], held.classes[counts.argmax()]
    named = ", ".join(str(label) for label in held.classes[:8].tolist())
    for name, value in (
        ("classes", f"{moments.n_classes:,}: {named}{', …' if moments.n_classes > 8 else ''}"),
        ("samples", f"{int(counts.sum()):,}"),
        ("samples a class", f"{counts.min():,} ({fewest}) to {counts.max():,} ({most})"),
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
        table.add_row(name, value)
    output.print(table)


def doctor(
    state: StateFile,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows adapted together.")] = 64,
) -> None:
    """Say in plain words whether transport can be supported at a batch size."""
    from caster.jobs.doctor import diagnose

    with errors.status("drawing batches like the source") as status:
        found = diagnose(state, batch_size, lambda n: status.update(f"trying batches of {n}"))
    for line in found.sentences():
        output.print(f"- {line}", markup=False, highlight=False, soft_wrap=True)
