"""Commands on state files: inspect, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from caster.cli.console import counted, errors, new_table, output, say, size
from caster.errors import one_line

if TYPE_CHECKING:
    from rich.table import Table

    from caster.state import Layers, State

LISTED = 20  # classes `inspect` lists unasked
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key", metavar="FILE", help="Accept the state only if it is signed with this key."
    ),
]
StateFile = Annotated[Path, typer.Argument(metavar="STATE", help="State file, from `caster fit`.")]


def inspect(
    state: StateFile,
    classes: Annotated[
        bool, typer.Option("--classes", help=f"List all classes, also beyond {LISTED}.")
    ] = False,
    key: KeyFile = None,
) -> None:
    """What a state file holds: classes, counts, sizes, margin, constants, digests, head, layers."""
    from caster import state as states

    held = states.load(state, key)
    moments, counts = held.moments, held.moments.counts
    table = new_table("field", "value", title=str(state))
    table.columns[0].no_wrap = True
    for name, value in (
        ("classes", f"{moments.n_classes:,}"),
        ("samples", f"{int(counts.sum()):,}, {counts.min():,} to {counts.max():,} a class"),
        ("features -> directions", f"{moments.U.shape[0]:,} -> {moments.rank}"),
        ("margin", f"{moments.margin:.4g}"),
        ("file", size(state.stat().st_size)),
        *((f"  {name}", size(bytes_)) for name, bytes_ in states.array_sizes(held)),
        ("constants", ", ".join(f"{k} {v:g}" for k, v in vars(held.settings).items())),
        ("content digest", states.digest(held)),
        ("signature", "not checked: --key checks it" if key is None else f"valid, by {key}"),
        ("model digest", held.model_sha256 or "not bound to a model"),
        ("preprocessing digest", held.preprocessing_sha256 or "not bound to a preprocessing"),
        ("head", _head(held)),
        ("layers", "not measured" if held.layers is None else layers_in_words(held.layers)),
        *([("  sites", _sites(held.layers))] if held.layers else []),
        ("written by", f"caster {held.caster_version}, state format {states.VERSION}"),
    ):
        table.add_row(name, Text(value))
    output.print(table)
    output.print(_class_table(held.classes.tolist(), counts.tolist(), everything=classes))


def _head(held: State) -> str:
    """Which of the model's logits are the classes'."""
    if held.head is None:
        if held.model_sha256 is None:
            return "not bound to a model: logits come with the features, in the order of classes"
        return "no head: rejected batches get Source-GDA's answer"
    if held.head == tuple(range(len(held.head))):
        return f"logits 0 to {len(held.head) - 1}, in the order of classes"
    more = " ..." if len(held.head) > LISTED else ""
    return f"logits {', '.join(map(str, held.head[:LISTED]))}{more}"


def layers_in_words(layers: Layers) -> str:
    """How many sites were measured.

    >>> layers_in_words({})
    'the inputs of BatchNorms, whose statistics the model keeps itself'
    """
    if not layers:
        return "the inputs of BatchNorms, whose statistics the model keeps itself"
    channels = sum(len(found.mean) for found in layers.values())
    full = sum(found.covariance is not None for found in layers.values())
    more = f", {full:,} with covariances for full maps" if full else ""
    return f"{counted(len(layers), 'site')} of {channels:,} channels in all{more}"


def _sites(layers: Layers) -> str:
    """Every site, its channels, whether it can have a full map, and what is no part of it."""
    told = []
    for site, found in layers.items():
        full = "" if found.covariance is None else ", full"
        added = f", without {counted(site.added, 'token')}" if site.added else ""
        told.append(f"{site} ({len(found.mean)}{full}{added})")
    return ", ".join(told)


def _class_table(labels: list[Any], counts: list[int], *, everything: bool) -> Table:
    shown = len(labels) if everything else min(LISTED, len(labels))
    table = new_table("class", "samples", numbers=("samples",))
    for label, count in zip(labels[:shown], counts[:shown], strict=True):
        table.add_row(Text(one_line(str(label))), f"{count:,}")
    if shown < len(labels):
        table.caption = f"{len(labels) - shown:,} more: --classes lists them"
    return table


def doctor(
    state: StateFile,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows adapted together.")] = 64,
    key: KeyFile = None,
) -> None:
    """Say in plain words whether transport can be supported at a batch size."""
    from caster.report.doctor import diagnose

    with errors.status("drawing batches like the source") as status:
        found = diagnose(state, batch_size, lambda n: status.update(f"trying batches of {n}"), key)
    for line in found.sentences():
        say(f"- {line}")
