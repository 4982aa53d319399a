"""The commands inspect and doctor, which describe a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from caster.cli.console import errors, new_table, output, say, size
from caster.errors import CasterError, counted, one_line

if TYPE_CHECKING:
    from rich.table import Table

    from caster.models.onnx.compiled import StateTensor
    from caster.state import Layers, State
    from caster.state.source_check import SourceCheck

LISTED = 20  # classes that `inspect` lists by default
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key", metavar="FILE", help="Accept the state only if it is signed with this key."
    ),
]
StateFile = Annotated[Path, typer.Argument(metavar="STATE", help="State file, from `caster fit`.")]


def inspect(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="State file from `caster fit`, or .onnx file from `caster compile`.",
        ),
    ],
    classes: Annotated[
        bool, typer.Option("--classes", help=f"List all classes, not only the first {LISTED}.")
    ] = False,
    key: KeyFile = None,
) -> None:
    """Show what a state file or compiled model contains: classes, sizes, constants, digests."""
    if file.suffix == ".onnx":
        if key is not None:
            raise CasterError(
                "--key applies to state files: pass it to `caster compile` to check the state"
            )
        _inspect_compiled(file, everything=classes)
    else:
        _inspect_state(file, key, everything=classes)


def _inspect_state(state: Path, key: Path | None, *, everything: bool) -> None:
    from caster import state as states

    loaded = states.load(state, key)
    moments, counts = loaded.moments, loaded.moments.counts
    table = new_table("field", "value", title=str(state))
    table.columns[0].no_wrap = True
    for name, value in (
        ("classes", f"{moments.n_classes:,}"),
        ("samples", f"{int(counts.sum()):,}, {counts.min():,} to {counts.max():,} per class"),
        ("features -> directions", f"{moments.U.shape[0]:,} -> {moments.rank}"),
        ("margin", f"{moments.margin:.4g}"),
        ("file", size(state.stat().st_size)),
        *((f"  {name}", size(bytes_)) for name, bytes_ in states.array_sizes(loaded)),
        ("constants", ", ".join(f"{k} {v:g}" for k, v in vars(loaded.settings).items())),
        ("content digest", states.digest(loaded)),
        ("signature", "not checked: pass --key to check it" if key is None else f"valid, by {key}"),
        ("model digest", loaded.model_sha256 or "not bound to a model"),
        ("preprocessing digest", loaded.preprocessing_sha256 or "not bound to preprocessing"),
        ("head", _head(loaded)),
        ("layers", "not measured" if loaded.layers is None else describe_layers(loaded.layers)),
        *([("  sites", _sites(loaded.layers))] if loaded.layers else []),
        ("sketch", "none" if loaded.sketch is None else counted(len(loaded.sketch), "sample")),
        ("written by", f"caster {loaded.caster_version}, state format {states.VERSION}"),
    ):
        table.add_row(name, Text(value))
    output.print(table)
    output.print(_class_table(loaded.classes.tolist(), counts.tolist(), everything=everything))


def _inspect_compiled(path: Path, *, everything: bool) -> None:
    from caster.models.onnx.compiled import NEXT, read_compiled

    model, sha256, found = read_compiled(path)
    state = {tensor.name for tensor in found.state}
    table = new_table("field", "value", title=str(path))
    table.columns[0].no_wrap = True
    for name, value in (
        ("mechanism", describe_mechanism(found.mechanism)),
        ("classes", f"{len(found.classes):,}"),
        ("file", size(path.stat().st_size)),
        ("constants", ", ".join(f"{k} {v}" for k, v in found.settings.items())),
        ("file digest", sha256),
        ("model digest", found.model_sha256),
        ("preprocessing digest", found.preprocessing_sha256 or "not bound to preprocessing"),
        ("state digest", found.state_sha256),
        ("inputs", _values(value for value in model.graph.input if value.name not in state)),
        ("outputs", _values(v for v in model.graph.output if not v.name.startswith(NEXT))),
        ("reasons", ", ".join(f"{number} {name}" for number, name in enumerate(found.reasons))),
        ("written by", f"caster {found.version}"),
    ):
        table.add_row(name, Text(one_line(value)))
    output.print(table)
    if found.state:
        output.print(state_table(found.state))
    output.print(_class_table(found.classes.tolist(), None, everything=everything))


def _values(values: Iterable[Any]) -> str:
    """List inputs or outputs of a graph, with types and shapes."""
    from onnx.helper import tensor_dtype_to_np_dtype

    listed = []
    for value in values:
        kind = value.type.tensor_type
        sizes = (str(size.dim_value or size.dim_param or "any") for size in kind.shape.dim)
        dtype = tensor_dtype_to_np_dtype(kind.elem_type).name
        listed.append(f"{value.name} {dtype} ({', '.join(sizes)})")
    return ", ".join(listed)


def describe_mechanism(mechanism: str, sites: int | None = None) -> str:
    """Describe a mechanism, with the number of its sites if that is known.

    >>> describe_mechanism("layers", 53)
    'layers, aligned at 53 sites'
    """
    if mechanism == "features":
        return "features, transported"
    return "layers, aligned" + ("" if sites is None else f" at {counted(sites, 'site')}")


def say_poor_head(check: SourceCheck | None) -> None:
    """Repeat the warning of `caster fit` about a head that is rarely right on the source."""
    if check is not None and check.head is not None and check.has_poor_head:
        say(
            f"caster: the model's head was right on only {check.head:.1%} of the source, so these "
            "labels are probably wrong: fit again with its classes in the order of its outputs "
            "(--classes), or with --no-head if it has other classes",
            errors,
        )


def state_table(state: Sequence[StateTensor]) -> Table:
    """Tabulate the tensors that a stream passes from batch to batch."""
    table = new_table("state", "type", "shape", "size", numbers=("size",))
    for tensor in state:
        shape = f"({', '.join(map(str, tensor.shape))})"
        table.add_row(Text(one_line(tensor.name)), tensor.dtype, shape, size(tensor.nbytes))
    return table


def _head(loaded: State) -> str:
    """Describe which of the model's logits belong to the classes."""
    if loaded.head is None:
        if loaded.model_sha256 is None:
            return (
                "not bound to a model: logits come with the features, in the order of the classes"
            )
        return "no head: Source-GDA answers rejected batches"
    if loaded.head == tuple(range(len(loaded.head))):
        return f"logits 0 to {len(loaded.head) - 1}, in the order of the classes"
    more = " ..." if len(loaded.head) > LISTED else ""
    return f"logits {', '.join(map(str, loaded.head[:LISTED]))}{more}"


def describe_layers(layers: Layers) -> str:
    """Describe the measured sites.

    >>> describe_layers({})
    'BatchNorm inputs, whose statistics are stored in the model'
    """
    from caster.report.doctor import NO_SITES, LayerSummary

    found = LayerSummary.of(layers)
    if not found.sites:
        return NO_SITES
    return (
        f"{counted(found.sites, 'site')} with {found.channels:,} channels in total, "
        f"{found.full:,} with covariances, {found.by_class:,} with moments per class"
    )


def _sites(layers: Layers) -> str:
    """List every site with its channels and excluded tokens."""
    listed = []
    for site, found in layers.items():
        tokens = f", without {counted(site.prefix_tokens, 'token')}" if site.prefix_tokens else ""
        listed.append(f"{site} ({len(found.mean)}{tokens})")
    return ", ".join(listed)


def _class_table(labels: list[Any], counts: list[int] | None, *, everything: bool) -> Table:
    """Tabulate the classes with their samples or, without counts, their indices."""
    shown = len(labels) if everything else min(LISTED, len(labels))
    number = "index" if counts is None else "samples"
    table = new_table("class", number, numbers=(number,))
    for label, count in zip(labels[:shown], counts or range(len(labels)), strict=False):
        table.add_row(Text(one_line(str(label))), f"{count:,}")
    if shown < len(labels):
        table.caption = f"{len(labels) - shown:,} more: pass --classes to list them"
    return table


def doctor(
    state: StateFile,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Samples per batch, for feature transport.")
    ] = 64,
    key: KeyFile = None,
) -> None:
    """Report in plain words what to expect from a state: aligned layers and feature transport.

    --batch-size is for feature transport; layers can be aligned with batches of any size.
    """
    from caster.report.doctor import diagnose

    with errors.status("simulating batches like the source") as status:
        found = diagnose(state, batch_size, lambda n: status.update(f"trying batches of {n}"), key)
    say_poor_head(found.source_check)
    if found.layers is None:
        say("Layers: none in this state, so `caster predict` transports features.")
    else:
        method = "mixture" if found.layers.by_class else "layer"
        say(f"Layers, aligned by default ({method} transport):")
        for line in found.layers.sentences():
            say(f"- {line}")
    say(
        "Features, transported:"
        if found.layers is None
        else "Features, transported instead with `--mechanism features`:"
    )
    for line in found.sentences():
        say(f"- {line}")
