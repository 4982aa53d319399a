"""One server process: ports, TLS, token, signals and graceful shutdown."""

from __future__ import annotations

import asyncio
import hmac
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import uvicorn
from starlette.routing import BaseRoute

from caster.adapt.adapter import Adapter
from caster.errors import CasterError
from caster.io.files import AnyPath, locked, read_regular
from caster.serve.grpc_api import grpc_handlers
from caster.serve.replicas import RayReplica, ReplicatedService, check_room
from caster.serve.rest import rest_app
from caster.serve.service import ServeOptions, Service
from caster.serve.streams import StreamStore, opened_folder
from caster.serve.tensors import Failure, RequestError
from caster.serve.watch import StreamLogs
from caster.serve.worker import OnAnswer, Worker

DRAIN_SECONDS = 30  # for requests in flight at shutdown
LOCAL = ("127.0.0.1", "localhost", "::1")
TOKEN_LENGTHS = range(16, 4097)

CheckToken = Callable[[str | None], None]  # raises unless the Authorization header is right

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Replicas:
    """Processes of the connected Ray cluster that share the streams of a server."""

    make: Callable[[], Adapter]  # called in each of them
    count: int
    gpus: bool = False  # whether each needs one


def serve(
    adapter: Adapter,
    options: ServeOptions,
    *,
    on_answer: OnAnswer | None = None,
    routes: Sequence[BaseRoute] = (),
    started: Callable[[str, str], None] = lambda rest, rpc: None,
    replicas: Replicas | None = None,
) -> None:
    """Serve a model until SIGTERM or Ctrl-C, then finish open requests and store every stream.

    `on_answer` is called after every batch of a stream, instead of the log. `routes` adds HTTP
    routes behind the same token. `started` is called with the addresses of REST and gRPC. With
    `replicas`, other processes answer batches and call `on_answer` (docs/clusters.md).
    """
    if options.http_port == options.grpc_port != 0:
        raise CasterError(
            f"REST and gRPC cannot share port {options.grpc_port}: choose another with "
            "{argument}",
            argument="grpc_port",
        )
    check_token = _token_check(options.token_file)
    tls = _tls_files(options.tls_cert, options.tls_key)
    if options.host not in LOCAL and (options.token_file is None or tls is None):
        logger.warning("without a token and TLS, anyone who can reach %s can use it", options.host)
    rest = _bound(options.host, options.http_port)
    with closing(rest), opened_folder(options.folder, adapter), ExitStack() as held:
        if options.logs is not None:
            logs = StreamLogs(options.logs, adapter.state)
            message = (
                f"another server logs to {options.logs}: choose another folder with {{argument}}"
            )
            held.enter_context(locked(options.logs / "lock", message, argument="logs"))
            routes = [*logs.routes(), *routes]
        service = _service(adapter, options, on_answer, replicas)
        if options.logs is not None:
            service.metrics.registry.register(logs)
        limit = int(options.request_mb * 1e6)
        app = rest_app(service, request_bytes=limit, check_token=check_token, routes=routes)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ssl_certfile=options.tls_cert,
            ssl_keyfile=options.tls_key,
            timeout_graceful_shutdown=DRAIN_SECONDS,
        )

        async def run() -> None:
            if isinstance(service, ReplicatedService) and replicas is not None:
                await service.start(replicas.count)
            rpc = grpc.aio.server(
                handlers=[grpc_handlers(service, check_token)],
                options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", limit)],
            )
            host = f"[{options.host}]" if ":" in options.host else options.host
            port = _grpc_port(rpc, host, options.grpc_port, tls)
            secure = "" if tls is None else "s"
            rest_address = f"http{secure}://{host}:{rest.getsockname()[1]}"
            await _until_stopped(
                service, config, rest, rpc, lambda: started(rest_address, f"{host}:{port}")
            )

        asyncio.run(run())


def _service(
    adapter: Adapter, options: ServeOptions, on_answer: OnAnswer | None, replicas: Replicas | None
) -> Service:
    """The model with a worker in this process, or with replicas that `run` starts later."""
    if replicas is None:
        service = Service(adapter, options)
        service.add(_worker(lambda: adapter, options, on_answer))
        return service
    check_room(replicas.count, replicas.gpus)
    make = partial(_worker, replicas.make, options, on_answer)
    return ReplicatedService(adapter, options, partial(RayReplica, make, replicas.gpus))


def _worker(
    make: Callable[[], Adapter], options: ServeOptions, on_answer: OnAnswer | None
) -> Worker:
    """Make the worker of a process."""
    adapter = make()
    store = StreamStore(
        adapter,
        options.folder,
        in_memory=options.streams,
        total=options.max_streams,
        snapshot_every=options.snapshot_every,
        idle_seconds=options.idle_seconds,
    )
    logs = None if options.logs is None else StreamLogs(options.logs, adapter.state)
    return Worker(adapter, store, frozen=options.frozen, logs=logs, on_answer=on_answer)


async def _until_stopped(
    service: Service,
    config: uvicorn.Config,
    rest: socket.socket,
    rpc: Any,
    started: Callable[[], None],
) -> None:
    http = _HttpServer(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, http.stop)
    await rpc.start()
    background = asyncio.create_task(service.maintain())
    started()
    try:
        await http.serve(sockets=[rest])
        await rpc.stop(DRAIN_SECONDS)
    finally:
        background.cancel()
        await asyncio.gather(background, return_exceptions=True)
        await service.close()


class _HttpServer(uvicorn.Server):
    """A server that does not handle signals: uvicorn would raise them again at the end."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signal handlers of `_until_stopped` in place."""
        yield

    def stop(self) -> None:
        """Shut down gracefully; on a second call, at once."""
        self.force_exit = self.should_exit
        self.should_exit = True


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is named.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(2048)  # only now does another server fail to bind the port
    except OSError as error:
        found.close()
        if isinstance(error, socket.gaierror):
            raise CasterError(
                f"cannot listen on {host}: {error.strerror}: name an address of this machine with "
                "{argument}",
                argument="host",
            ) from None
        raise _port_error(host, port, "http_port", error.strerror) from None
    return found


def _grpc_port(rpc: Any, host: str, port: int, tls: tuple[bytes, bytes] | None) -> int:
    try:
        if tls is None:
            return int(rpc.add_insecure_port(f"{host}:{port}"))
        certificate, key = tls
        credentials = grpc.ssl_server_credentials([(key, certificate)])
        return int(rpc.add_secure_port(f"{host}:{port}", credentials))
    except RuntimeError:
        raise _port_error(host, port, "grpc_port", "it is in use or not permitted") from None


def _port_error(host: str, port: int, argument: str, why: str | None) -> CasterError:
    return CasterError(
        f"cannot listen on {host}:{port}: {why}: choose another port with {{argument}}",
        argument=argument,
    )


def _tls_files(certificate: AnyPath | None, key: AnyPath | None) -> tuple[bytes, bytes] | None:
    """Read and check the certificate and its key; None without TLS."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise CasterError("TLS needs a certificate and its key: pass --tls-cert and --tls-key")
    contents = read_regular(certificate), read_regular(key)  # also names a file that is missing
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise CasterError(
            f"{certificate} and {key} are not a certificate and its key in PEM format"
            + (f": {error.reason}" if error.reason else "")
        ) from None
    return contents


def _token_check(file: Path | None) -> CheckToken:
    """Make a function that raises unless a request has the token in the file, if there is one."""
    if file is None:
        return lambda header: None
    token = read_regular(file).strip()
    if len(token.split()) > 1:
        raise CasterError(f"the token in {file} has white space, which a request cannot send")
    if len(token) not in TOKEN_LENGTHS:
        raise CasterError(
            f"the token in {file} has {len(token)} characters, and needs {TOKEN_LENGTHS[0]} to "
            f"{TOKEN_LENGTHS[-1]:,}: make one with `openssl rand -hex 32`"
        )

    def check(header: str | None) -> None:
        given = (header or "").encode(errors="replace")
        if not hmac.compare_digest(given, b"Bearer " + token):
            raise RequestError("the request has no valid bearer token", Failure.UNAUTHENTICATED)

    return check
