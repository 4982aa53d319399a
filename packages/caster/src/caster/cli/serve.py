"""The serve command."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from caster.cli.console import say
from caster.cli.inspect import KeyFile, StateFile, say_poor_head
from caster.cli.options import (
    AdapterOptions,
    Every,
    RayOption,
    cluster_option,
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
    """Fields of `ServeOptions` that are options of the command as they are."""

    host: Annotated[str, network("Address to listen on; 0.0.0.0 is all.")] = "127.0.0.1"
    http_port: Annotated[int, network("Port for REST; 0 is any free one.", min=0, max=65535)] = 8000
    grpc_port: Annotated[int, network("Port for gRPC; 0 is any free one.", min=0, max=65535)] = 8001
    token_file: Annotated[
        Path | None, network("File with the bearer token that clients must send.", metavar="FILE")
    ] = None
    tls_cert: Annotated[Path | None, network("TLS certificate.", metavar="PEM")] = None
    tls_key: Annotated[Path | None, network("Key of the certificate.", metavar="PEM")] = None
    batch: Annotated[
        int,
        of_streams(
            "Join waiting requests of a stream to batches of at most N samples.", min=1, metavar="N"
        ),
    ] = 64
    wait_ms: Annotated[
        float,
        of_streams(
            "Time that a request waits for others of its stream to join it, in milliseconds.",
            "--wait",
            min=0,
            metavar="MS",
        ),
    ] = 0.0
    snapshot_every: Annotated[
        int,
        of_streams(
            "Save a snapshot every N batches of a stream: up to N are repeated after a crash.",
            min=1,
            metavar="N",
        ),
    ] = 64
    idle_seconds: Annotated[
        float,
        of_streams(
            "Move a stream from memory to disk after this time without a request.",
            "--idle",
            min=0,
            metavar="SECONDS",
        ),
    ] = 300.0
    streams: Annotated[int, limit("Streams in memory.", min=1)] = 64
    max_streams: Annotated[int, limit("Streams in the folder.", min=1)] = 10_000
    request_mb: Annotated[
        float, limit("Size of a request, in megabytes.", "--max-request", min=0.001, metavar="MB")
    ] = 64.0
    queue: Annotated[int, limit("Requests waiting in the queue.", min=1)] = 256
    verify_seconds: Annotated[
        float,
        limit(
            "Time between checks that the weights are unchanged.",
            "--verify",
            min=1,
            metavar="SECONDS",
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
        str | None, typer.Option(help="Name of the model in requests. [default: name of its file]")
    ] = None,
    every: Every = None,
    frozen: Annotated[
        bool, typer.Option("--frozen", help="Answer with the frozen model only, for comparison.")
    ] = False,
    folder: Annotated[
        Path | None,
        of_streams(
            "Folder for snapshots of the streams. [default: STATE.streams]", metavar="FOLDER"
        ),
    ] = None,
    logs: Annotated[
        Path | None,
        of_streams(
            "Folder for logs of the streams, shown at /monitor. [default: STATE.logs]",
            metavar="FOLDER",
        ),
    ] = None,
    no_logs: Annotated[
        bool, of_streams("Write no logs; /monitor is then off.", "--no-logs")
    ] = False,
    ray: RayOption = None,
    replicas: Annotated[
        int | None,
        cluster_option(
            "Number of processes that share the streams, each with a copy of the model. "
            "[default: 2]",
            min=1,
        ),
    ] = None,
) -> None:
    """Serve a model with the Open Inference Protocol (KServe v2), over REST and gRPC.

    A client names its stream in the header `caster-stream` or the parameter `stream`. Every stream
    has its own statistics and certificate, and survives restarts. Inputs are preprocessed batches.
    """
    if model is None or make_model is None:
        raise CasterError("name the model with --model")
    if logs is not None and no_logs:
        raise CasterError("use --logs or --no-logs, not both")
    if replicas is not None and ray is None:
        raise CasterError("--replicas requires --ray")
    from caster.adapt.adapter import Adapter
    from caster.serve import Replicas, ServeOptions
    from caster.serve import serve as run
    from caster.state import load

    given = how.arguments(every)
    adapter = Adapter(model, load(state, key), **given)
    say_poor_head(adapter.state.source_check)
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
    say("Stopped.")


def _adapter(make: MakeModel, state: State, options: dict[str, Any]) -> Adapter:
    from caster.adapt.adapter import Adapter

    return Adapter(make(), state, **options)


def default_name(model: str) -> str:
    """Name a model after its file, or as timm or Hugging Face do.

    >>> default_name("models/resnet.onnx"), default_name("timm:resnet50.a1_in1k")
    ('resnet', 'resnet50.a1_in1k')
    """
    name = model.rpartition(":")[2]
    return Path(name).name.removesuffix(".onnx")
