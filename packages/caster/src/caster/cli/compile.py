"""The compile command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from caster.cli.console import say, size
from caster.cli.inspect import KeyFile, StateFile, describe_mechanism, say_poor_head
from caster.cli.options import Every, HeadOption, MechanismOption, PreprocessingOption, Tau
from caster.errors import CasterError
from caster.io.files import check_writable

if TYPE_CHECKING:
    from caster.models.onnx.compiled import Metadata


def compile(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL.onnx", help="Classifier that the state was fitted with."),
    ],
    state: StateFile,
    compiled: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT.onnx", help="File to write.")
    ],
    mechanism: MechanismOption = "auto",
    tau: Tau = None,
    every: Every = None,
    preprocessing: PreprocessingOption = None,
    head: HeadOption = None,
    key: KeyFile = None,
) -> None:
    """Compile a model and its state into one ONNX file that adapts itself.

    ONNX Runtime runs it on a CPU or in WebAssembly, without caster. Its inputs are preprocessed
    images and the stream's state; its outputs are the answer, the verdict and the next state.
    """
    for path in (model, compiled):
        if path.suffix != ".onnx":
            raise CasterError(f"{path} is not an ONNX file: its name must end in .onnx")
    check_writable(compiled, *(str(path) for path in (model, state, preprocessing, key) if path))
    from caster import state as states
    from caster.export import compile_model
    from caster.models.wrap import wrap

    wrapped: Any = wrap(str(model), head=head, preprocessing=preprocessing)
    loaded = states.load(state, key)
    say_poor_head(loaded.source_check)
    found = compile_model(wrapped, loaded, compiled, mechanism=mechanism, tau=tau, every=every)
    sites = len(loaded.layers or ()) if found.mechanism == "layers" else None
    say(f"Mechanism: {describe_mechanism(found.mechanism, sites)}.")
    whole, parts = compiled.stat().st_size, (wrapped.file_bytes, state.stat().st_size)
    say(f"Size: {size(whole)} (model {size(parts[0])}, state {size(parts[1])}).")
    _say_how(found, compiled)
    say(f"Written: {compiled}")


def _say_how(found: Metadata, compiled: Path) -> None:
    """Print how to start and continue a stream."""
    if found.state:
        say(
            f"Stream state: {len(found.state)} tensors, listed by `caster inspect {compiled}`. "
            "Start with zeros; after a batch, pass next.NAME as NAME."
        )
    else:
        say("Stream state: none. Batches are independent, and the images are the only input.")
    say(f'In Python: caster.wrap("{compiled}").stream(batches)')
