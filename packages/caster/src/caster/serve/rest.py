"""The protocol over HTTP: JSON, optionally followed by binary tensors."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from caster._version import __version__
from caster.serve.batcher import InferAnswer, InferRequest
from caster.serve.service import Service
from caster.serve.tensors import (
    Failure,
    RequestError,
    Tensors,
    datatype_of,
    from_bytes,
    from_values,
    to_bytes,
    to_json,
)
from caster.serve.worker import COUNTED

STREAM_HEADER = "caster-stream"
JSON_LENGTH = "inference-header-content-length"  # bytes of JSON before binary tensors
BINARY_SIZE, BINARY, ALL_BINARY = "binary_data_size", "binary_data", "binary_data_output"
EXTENSIONS = ("binary_tensor_data",)
WINDOW_BITS = {"gzip": 31, "deflate": 15}

Handler = Callable[[Request], Awaitable[Response]]


def rest_app(
    service: Service,
    *,
    request_bytes: int,
    check_token: Callable[[str | None], None],
    routes: Sequence[BaseRoute] = (),
) -> Starlette:
    """Make an application with the protocol's routes, `/metrics` and `routes`."""

    async def live(_: Request) -> Response:
        return Response()

    async def ready(request: Request) -> Response:
        _check_model(service, request)
        return Response(status_code=200 if service.broken is None else 503)

    async def server(_: Request) -> Response:
        return JSONResponse({"name": "caster", "version": __version__, "extensions": EXTENSIONS})

    async def model(request: Request) -> Response:
        _check_model(service, request)
        inputs, outputs = service.signature()
        about = {"name": service.name, "versions": ["1"], "platform": "caster"}
        adapter = service.adapter
        more = {"mechanism": adapter.mechanism, "classes": adapter.classes.tolist()}
        return JSONResponse({**about, "inputs": inputs, "outputs": outputs, "parameters": more})

    async def infer(request: Request) -> Response:
        _check_model(service, request)
        body = await _body(request, request_bytes)
        given, inputs = _parsed(body, request.headers.get(JSON_LENGTH))
        parameters = _object(given.get("parameters", {}))
        asked = InferRequest.of(inputs, parameters, request.headers.get(STREAM_HEADER))
        wanted = _wanted(given)
        binary = parameters.get(ALL_BINARY) is True
        answer = await service.infer(asked, wanted)
        return _response(service.name, given.get("id"), answer, wanted, binary)

    async def feedback(request: Request) -> Response:
        _check_model(service, request)
        given = _object(_loaded(await _body(request, request_bytes)))
        ids, labels = given.get("ids"), given.get("labels")
        if not isinstance(ids, list) or not isinstance(labels, list):
            raise RequestError("feedback must be JSON with the lists `ids` and `labels`")
        inputs = {
            "ids": from_values("ids", "INT64", [len(ids)], ids),
            "labels": from_values("labels", service.label_datatype, [len(labels)], labels),
        }
        asked = InferRequest.of(inputs, given, request.headers.get(STREAM_HEADER))
        answer = await service.infer(asked)
        return JSONResponse({**answer.parameters, "counted": int(answer.outputs[COUNTED][0])})

    def metrics(_: Request) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    def route(path: str, handler: Handler, method: str = "GET") -> Route:
        return Route(path, _counted(service, handler), methods=[method])

    of_model = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
    table = [
        route("/v2/health/live", live),
        route("/v2/health/ready", ready),
        route("/v2", server),
        *(route(path, model) for path in of_model),
        *(route(f"{path}/ready", ready) for path in of_model),
        *(route(f"{path}/infer", infer, "POST") for path in of_model),
        route("/v2/models/{model}/feedback", feedback, "POST"),
        Route("/metrics", metrics),
        *routes,
    ]

    async def failed(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": error.detail}, error.status_code)

    app = Starlette(routes=table, exception_handlers={HTTPException: failed})
    app.add_middleware(_TokenGuard, check=check_token)
    return app


class _TokenGuard:
    """Reject requests without the token, except health probes."""

    def __init__(self, app: ASGIApp, check: Callable[[str | None], None]) -> None:
        self._app, self._check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].startswith("/v2/health/"):
            try:
                self._check(Request(scope).headers.get("authorization"))
            except RequestError as error:
                headers = {"www-authenticate": "Bearer"}
                response = JSONResponse({"error": str(error)}, error.failure.value[0], headers)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _counted(service: Service, handler: Handler) -> Handler:
    """Turn errors into responses of the protocol, and count the request."""

    async def handle(request: Request) -> Response:
        start = time.perf_counter()
        try:
            response = await handler(request)
        except RequestError as error:
            status = error.failure.value[0]
            headers = {"retry-after": "1"} if status == 503 else None
            response = JSONResponse({"error": str(error)}, status, headers)
        except ClientDisconnect:
            response = Response(status_code=400)
        service.metrics.requests.labels("rest", str(response.status_code)).inc()
        service.metrics.request_seconds.labels("rest").observe(time.perf_counter() - start)
        return response

    return handle


def _check_model(service: Service, request: Request) -> None:
    parts = request.path_params
    if "model" in parts:
        service.check_name(parts["model"], parts.get("version", ""))


async def _body(request: Request, limit: int) -> bytes:
    """Read the body, decompressed; raise if it exceeds the limit."""
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in (*WINDOW_BITS, "identity"):
        raise RequestError(f"content-encoding {encoding[:20]!r} is not supported")
    unpack = None if encoding == "identity" else zlib.decompressobj(WINDOW_BITS[encoding])
    too_large = RequestError(f"a request may have at most {limit:,} bytes", Failure.TOO_LARGE)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        try:
            body += chunk if unpack is None else unpack.decompress(chunk, limit + 1 - len(body))
        except zlib.error:
            raise RequestError(f"the body is not valid {encoding}") from None
        if len(body) > limit or (unpack is not None and unpack.unconsumed_tail):
            raise too_large
    return bytes(body)


def _loaded(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError("the body is not JSON") from None


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError("the request does not follow the protocol: expected a JSON object")
    return value


def _parsed(body: bytes, header: str | None) -> tuple[dict[str, Any], Tensors]:
    """Parse the JSON of a request and its input tensors."""
    if header is not None and not (
        header.isdecimal() and len(header) < 19 and int(header) <= len(body)
    ):
        raise RequestError(f"{JSON_LENGTH} must be a length within the body")
    at = len(body) if header is None else int(header)
    given = _object(_loaded(body[:at]))
    tensors = given.get("inputs")
    if not isinstance(tensors, list):
        raise RequestError("the request has no list `inputs`")
    view, inputs = memoryview(body), Tensors()
    for tensor in map(_object, tensors):
        name, datatype, shape = (tensor.get(key) for key in ("name", "datatype", "shape"))
        if not (isinstance(name, str) and isinstance(datatype, str) and isinstance(shape, list)):
            raise RequestError("every input needs a name, a datatype and a shape")
        if name in inputs:
            raise RequestError(f"input {name!r} is given twice")
        size = _object(tensor.get("parameters", {})).get(BINARY_SIZE)
        if size is None:
            inputs[name] = from_values(name, datatype, shape, tensor.get("data"))
        elif type(size) is not int or not 0 <= size <= len(body) - at:
            raise RequestError(f"tensor {name}: the body does not hold its {size!r} bytes")
        else:
            inputs[name] = from_bytes(name, datatype, shape, view[at : at + size])
            at += size
    if at != len(body):
        raise RequestError(f"{len(body) - at:,} extra bytes after the last tensor")
    return given, inputs


def _wanted(given: dict[str, Any]) -> dict[str, Any]:
    """Parse the requested outputs: whether each is binary, None if it does not say."""
    outputs = given.get("outputs", [])
    if not isinstance(outputs, list):
        raise RequestError("the `outputs` of a request must be a list")
    return {
        str(output.get("name")): _object(output.get("parameters", {})).get(BINARY)
        for output in map(_object, outputs)
    }


def _response(
    model: str, request_id: Any, answer: InferAnswer, wanted: dict[str, Any], binary: bool
) -> Response:
    """Answer with the wanted outputs, or with all; `binary` unless an output says otherwise."""
    outputs, parts = [], []
    for name, array in answer.outputs.items():
        if wanted and name not in wanted:
            continue
        own = wanted.get(name)
        tensor: dict[str, Any] = {
            "name": name,
            "datatype": datatype_of(array.dtype),
            "shape": list(array.shape),
        }
        if binary if own is None else own is True:
            parts.append(to_bytes(array))
            tensor["parameters"] = {BINARY_SIZE: len(parts[-1])}
        else:
            tensor["data"] = to_json(array)
        outputs.append(tensor)
    content: dict[str, Any] = {"model_name": model, "model_version": "1", "outputs": outputs}
    if answer.parameters:
        content["parameters"] = answer.parameters
    if isinstance(request_id, str):
        content["id"] = request_id
    text = json.dumps(content).encode()
    if not parts:
        return Response(text, media_type="application/json")
    headers = {JSON_LENGTH: str(len(text))}
    return Response(
        b"".join([text, *parts]), headers=headers, media_type="application/octet-stream"
    )
