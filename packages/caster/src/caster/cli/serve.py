"""The serve command."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from caster.cli.console import say
from caster.cli.inspect import KeyFile, StateFile
from caster.cli.options import (
    AdapterOptions,
    Every,
    RayOption,
    of_cluster,
    on_cluster,
    panel,
    with_model,
)
from caster.errors import CasterError

if TYPE_CHECKING:
    from caster.adapt.adapter import Adapter
    from caster.cli.options import MakeModel
    from caster.models.protocol import FrozenModel
    from caster.state import State

network, of_streams, limit = map(panel, ("Network", "Streams", "Limits"))


@dataclass(frozen=True)
class ServerOptions:
    """The options of `ServeOptions` that a user types as they are."""

    host: Annotated[str, network("Address to listen on; 0.0.0.0: all.")] = "127.0.0.1"
    http_port: Annotated[int, network("REST; 0: any free port.", min=0, max=65535)] = 8000
    grpc_port: Annotated[int, network("gRPC; 0: any free port.", min=0, max=65535)] = 8001
    token_file: Annotated[
        Path | None, network("File with the bearer token of clients.", metavar="FILE")
    ] = None
    tls_cert: Annotated[Path | None, network("Certificate, for TLS.", metavar="PEM")] = None
    tls_key: Annotated[Path | None, network("Its key.", metavar="PEM")] = None
    batch: Annotated[
        int, of_streams("Samples up to which waiting requests of a stream are joined.", min=1)
    ] = 64
    wait_ms: Annotated[
        float,
        of_streams(
            "Milliseconds that a request waits for others of its stream to join it.",
            "--wait",
            min=0,
            metavar="MS",
        ),
    ] = 0.0
    snapshot_every: Annotated[
        int,
        of_streams(
            "Batches of a stream between snapshots: as many are repeated after a crash.",
            min=1,
            metavar="N",
        ),
    ] = 64
    idle_seconds: Annotated[
        float,
        of_streams(
            "Write out a stream, and free its memory, after so long without a request.",
            "--idle",
            min=0,
            metavar="SECONDS",
        ),
    ] = 300.0
    streams: Annotated[int, limit("Streams in memory at a time.", min=1)] = 64
    max_streams: Annotated[int, limit("Streams in the folder.", min=1)] = 10_000
    request_mb: Annotated[
        float, limit("Size of a request.", "--max-request", min=0.001, metavar="MB")
    ] = 64.0
    queue: Annotated[int, limit("Requests that wait at a time.", min=1)] = 256
    verify_seconds: Annotated[
        float,
        limit(
            "Check that the weights are unchanged, so often.", "--verify", min=1, metavar="SECONDS"
        ),
    ] = 300.0


@with_model(output=None)
def serve(
    state: StateFile,
    model: FrozenModel | None,
    make_model: MakeModel | None,
    how: AdapterOptions,
    server: ServerOptions,
    key: KeyFile = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the model in requests. [default: its file's]")
    ] = None,
    every: Every = None,
    frozen: Annotated[
        bool, typer.Option("--frozen", help="Answer with the frozen model only, to compare with.")
    ] = False,
    folder: Annotated[
        Path | None,
        of_streams("Folder for the streams' files. [default: STATE.streams]", metavar="FOLDER"),
    ] = None,
    logs: Annotated[
        Path | None,
        of_streams(
            "Folder for the streams' logs, which /monitor shows. [default: STATE.logs]",
            metavar="FOLDER",
        ),
    ] = None,
    no_logs: Annotated[bool, of_streams("Log nothing: no /monitor.", "--no-logs")] = False,
    ray: RayOption = None,
    replicas: Annotated[
        int | None,
        of_cluster(
            "Processes of the cluster that share the streams, each with a copy of the model. "
            "[default: 2]",
            min=1,
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

    given = how.arguments(every)
    adapter = Adapter(model, load(state, key), **given)
    options = ServeOptions(
        name=name or default_name(model.name),
        folder=folder or state.with_name(f"{state.name}.streams"),
        frozen=frozen,
        logs=None if no_logs else logs or state.with_name(f"{state.name}.logs"),
        **vars(server),
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
