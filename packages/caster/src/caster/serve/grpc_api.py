"""The protocol over gRPC."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from caster._version import __version__
from caster.serve.batcher import InferRequest
from caster.serve.grpc_messages import CLASSES, METHODS, SERVICE
from caster.serve.rest import EXTENSIONS, STREAM_HEADER
from caster.serve.service import Service
from caster.serve.tensors import (
    RequestError,
    Tensor,
    Tensors,
    datatype_of,
    from_bytes,
    from_values,
    to_bytes,
)

CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
HEALTH = "ServerLive", "ServerReady"  # probes need no token

Method = Callable[[Any, str | None], Awaitable[Any]]  # request and stream header -> response


def grpc_handlers(service: Service, check_token: Callable[[str | None], None]) -> Any:
    """The handlers of the service, for `grpc.aio.Server.add_generic_rpc_handlers`."""
    api = _Methods(service)

    def handler(name: str) -> Any:
        run: Method = getattr(api, name)

        async def handle(request: Any, context: Any) -> Any:
            start, code = time.perf_counter(), "UNKNOWN"
            headers = dict(context.invocation_metadata() or ())
            try:
                if name not in HEALTH:
                    check_token(headers.get("authorization"))
                answer = await run(request, headers.get(STREAM_HEADER))
                code = "OK"
                return answer
            except RequestError as error:
                code = error.failure.value[1]
                await context.abort(grpc.StatusCode[code], str(error))
            finally:
                service.metrics.requests.labels("grpc", code).inc()
                elapsed = time.perf_counter() - start
                service.metrics.request_seconds.labels("grpc").observe(elapsed)

        return grpc.unary_unary_rpc_method_handler(
            handle,
            request_deserializer=CLASSES[f"{name}Request"].FromString,
            response_serializer=CLASSES[f"{name}Response"].SerializeToString,
        )

    return grpc.method_handlers_generic_handler(SERVICE, {name: handler(name) for name in METHODS})


class _Methods:
    """The methods of the protocol, named as it names them."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def ServerLive(self, request: Any, _: str | None) -> Any:  # noqa: N802
        return CLASSES["ServerLiveResponse"](live=True)

    async def ServerReady(self, request: Any, _: str | None) -> Any:  # noqa: N802
        return CLASSES["ServerReadyResponse"](ready=self._service.broken is None)

    async def ModelReady(self, request: Any, _: str | None) -> Any:  # noqa: N802
        self._service.check_name(request.name, request.version)
        return CLASSES["ModelReadyResponse"](ready=self._service.broken is None)

    async def ServerMetadata(self, request: Any, _: str | None) -> Any:  # noqa: N802
        return CLASSES["ServerMetadataResponse"](
            name="caster", version=__version__, extensions=EXTENSIONS
        )

    async def ModelMetadata(self, request: Any, _: str | None) -> Any:  # noqa: N802
        self._service.check_name(request.name, request.version)
        inputs, outputs = self._service.signature()
        return CLASSES["ModelMetadataResponse"](
            name=self._service.name,
            versions=["1"],
            platform="caster",
            inputs=[CLASSES["TensorMetadata"](**each) for each in inputs],
            outputs=[CLASSES["TensorMetadata"](**each) for each in outputs],
        )

    async def ModelInfer(self, request: Any, header: str | None) -> Any:  # noqa: N802
        self._service.check_name(request.model_name, request.model_version)
        parameters = {
            name: getattr(value, value.WhichOneof("parameter_choice") or "bool_param")
            for name, value in request.parameters.items()
        }
        asked = InferRequest.of(_inputs(request), parameters, header)
        answer = await self._service.infer(asked)
        wanted = {output.name for output in request.outputs} or answer.outputs.keys()
        outputs = {name: a for name, a in answer.outputs.items() if name in wanted}
        return CLASSES["ModelInferResponse"](
            model_name=self._service.name,
            model_version="1",
            id=request.id,
            parameters={name: _parameter(value) for name, value in answer.parameters.items()},
            outputs=[
                CLASSES["InferTensor"](name=n, datatype=datatype_of(a.dtype), shape=a.shape)
                for n, a in outputs.items()
            ],
            raw_output_contents=[to_bytes(array) for array in outputs.values()],
        )


def _inputs(request: Any) -> Tensors:
    raw, inputs = list(request.raw_input_contents), Tensors()
    if raw and len(raw) != len(request.inputs):
        raise RequestError(f"{len(request.inputs)} inputs, but {len(raw)} raw contents")
    for i, tensor in enumerate(request.inputs):
        if tensor.name in inputs:
            raise RequestError(f"input {tensor.name!r} comes twice")
        inputs[tensor.name] = _input(tensor, raw[i] if raw else None)
    return inputs


def _input(tensor: Any, raw: bytes | None) -> Tensor:
    name, datatype, shape = tensor.name, tensor.datatype, list(tensor.shape)
    if raw is not None:
        return from_bytes(name, datatype, shape, raw)
    if datatype not in CONTENTS:
        raise RequestError(f"tensor {name}: {datatype!r} is not a datatype with contents")
    return from_values(name, datatype, shape, list(getattr(tensor.contents, CONTENTS[datatype])))


def _parameter(value: str | int | bool) -> Any:
    kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
    return CLASSES["InferParameter"](**{kind: value})
