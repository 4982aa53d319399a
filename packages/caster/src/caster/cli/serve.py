"""The serve command."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from caster.cli.console import say
from caster.cli.inspect import KeyFile, StateFile
from caster.cli.options import (
    CLUSTER,
    Every,
    MechanismOption,
    NoSafeguards,
    OtherModel,
    OtherPreprocessing,
    RayOption,
    Tau,
    adapter_options,
    on_cluster,
    with_model,
)
from caster.errors import CasterError

if TYPE_CHECKING:
    from caster.adapt.adapter import Adapter
    from caster.cli.options import MakeModel
    from caster.models.protocol import FrozenModel
    from caster.state import State

NETWORK, STREAMS, LIMITS = "Network", "Streams", "Limits"


@with_model(output=None)
def serve(
    state: StateFile,
    model: FrozenModel | None,
    make_model: MakeModel | None,
    key: KeyFile = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the model in requests. [default: its file's]")
    ] = None,
    mechanism: MechanismOption = "auto",
    tau: Tau = None,
    every: Every = None,
    frozen: Annotated[
        bool, typer.Option("--frozen", help="Answer with the frozen model only, to compare with.")
    ] = False,
    no_safeguards: NoSafeguards = False,
    allow_other_model: OtherModel = False,
    allow_other_preprocessing: OtherPreprocessing = False,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0: all.", rich_help_panel=NETWORK)
    ] = "127.0.0.1",
    http_port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="REST; 0: any free port.", rich_help_panel=NETWORK),
    ] = 8000,
    grpc_port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="gRPC; 0: any free port.", rich_help_panel=NETWORK),
    ] = 8001,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File with the bearer token of clients.", rich_help_panel=NETWORK
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(metavar="PEM", help="Certificate, for TLS.", rich_help_panel=NETWORK),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Its key.", rich_help_panel=NETWORK)
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            metavar="FOLDER",
            help="Folder for the streams' files. [default: STATE.streams]",
            rich_help_panel=STREAMS,
        ),
    ] = None,
    logs: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for the streams' logs, which /monitor shows. [default: STATE.logs]",
            rich_help_panel=STREAMS,
        ),
    ] = None,
    no_logs: Annotated[
        bool,
        typer.Option("--no-logs", help="Log nothing: no /monitor.", rich_help_panel=STREAMS),
    ] = False,
    batch: Annotated[
        int,
        typer.Option(
            min=1,
            help="Samples up to which waiting requests of a stream are joined.",
            rich_help_panel=STREAMS,
        ),
    ] = 64,
    wait: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="MS",
            help="Milliseconds that a request waits for others of its stream to join it.",
            rich_help_panel=STREAMS,
        ),
    ] = 0.0,
    snapshot_every: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Batches of a stream between snapshots: as many are repeated after a crash.",
            rich_help_panel=STREAMS,
        ),
    ] = 64,
    idle: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Write out a stream, and free its memory, after so long without a request.",
            rich_help_panel=STREAMS,
        ),
    ] = 300.0,
    streams: Annotated[
        int, typer.Option(min=1, help="Streams in memory at a time.", rich_help_panel=LIMITS)
    ] = 64,
    max_streams: Annotated[
        int, typer.Option(min=1, help="Streams in the folder.", rich_help_panel=LIMITS)
    ] = 10_000,
    max_request: Annotated[
        float,
        typer.Option(min=0.001, metavar="MB", help="Size of a request.", rich_help_panel=LIMITS),
    ] = 64.0,
    queue: Annotated[
        int, typer.Option(min=1, help="Requests that wait at a time.", rich_help_panel=LIMITS)
    ] = 256,
    verify: Annotated[
        float,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="Check that the weights are unchanged, so often.",
            rich_help_panel=LIMITS,
        ),
    ] = 300.0,
    ray: RayOption = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes of the cluster that share the streams, each with a copy of the model. "
            "[default: 2]",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
) -> None:
    """Serve a model by the Open Inference Protocol (KServe v2), over REST and gRPC.

    A client names its stream in the header `caster-stream` or the parameter `stream`; every stream
    has its own statistics and certificate, and outlives restarts. Inputs are preprocessed batches.
    """
    if model is None or make_model is None:
        raise CasterError("name the model with --model")
    if logs is not None and no_logs:
        raise CasterError("--logs names a folder, and --no-logs wants none: leave one out")
    if replicas is not None and ray is None:
        raise CasterError("--replicas requires --ray")
    from caster.adapt.adapter import Adapter
    from caster.serve import Replicas, ServeOptions
    from caster.serve import serve as run
    from caster.state import load

    given = adapter_options(
        every,
        no_safeguards,
        mechanism=mechanism,
        tau=tau,
        allow_other_model=allow_other_model,
        allow_other_preprocessing=allow_other_preprocessing,
    )
    adapter = Adapter(model, load(state, key), **given)
    options = ServeOptions(
        name=name or default_name(model.name),
        folder=folder or state.with_name(f"{state.name}.streams"),
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        batch=batch,
        wait_ms=wait,
        streams=streams,
        max_streams=max_streams,
        idle_seconds=idle,
        snapshot_every=snapshot_every,
        request_mb=max_request,
        queue=queue,
        verify_seconds=verify,
        token_file=token_file,
        tls_cert=tls_cert,
        tls_key=tls_key,
        frozen=frozen,
        logs=None if no_logs else logs or state.with_name(f"{state.name}.logs"),
    )
    logging.getLogger("asyncio").setLevel(logging.ERROR)

    def started(rest: str, rpc: str) -> None:
        say(f"Serving {options.name}: REST at {rest}/v2/models/{options.name}, gRPC at {rpc}.")
        if options.logs is not None:
            say(f"Monitor: {rest}/monitor, logs in {options.logs}.")
        say(f"Streams: {options.folder}. Stop with Ctrl-C or SIGTERM.")

    if ray is None:
        run(adapter, options, started=started)
    else:
        with on_cluster(ray, make_model, model) as (make, gpus):
            make_there = partial(_adapter, make or make_model, adapter.state, given)
            copies = Replicas(make_there, replicas or 2, gpus)
            run(adapter, options, started=started, replicas=copies)
    say("Stopped: every stream is stored.")


def _adapter(make: MakeModel, state: State, options: dict[str, Any]) -> Adapter:
    from caster.adapt.adapter import Adapter

    return Adapter(make(), state, **options)


def default_name(model: str) -> str:
    """The name of a model from its file's, or from timm's or Hugging Face's.

    >>> default_name("models/resnet.onnx"), default_name("timm:resnet50.a1_in1k")
    ('resnet', 'resnet50.a1_in1k')
    """
    name = model.rpartition(":")[2]
    return Path(name).name.removesuffix(".onnx")
