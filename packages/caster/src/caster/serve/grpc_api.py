"""The protocol over gRPC: messages, built without generated code, and methods."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import (  # type: ignore[import-untyped]
    descriptor_pb2,
    descriptor_pool,
    message_factory,
)

from caster._version import __version__
from caster.serve.batcher import InferRequest
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

# --- messages ------------------------------------------------------------------------------------

# Only field numbers and types matter on the wire. The messages have their own descriptor pool, so
# that a client library with generated messages can be imported in the same process.
SERVICE = "inference.GRPCInferenceService"
# Fields are numbered in order. A `*` marks a repeated field, `parameters` is a map, and the fields
# of InferParameter form a oneof.
MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "bool live",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "bool ready",
    "ModelReadyRequest": "string name, string version",
    "ModelReadyResponse": "bool ready",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "string name, string version, string* extensions",
    "ModelMetadataRequest": "string name, string version",
    "TensorMetadata": "string name, string datatype, int64* shape",
    "ModelMetadataResponse": "string name, string* versions, string platform, "
    "TensorMetadata* inputs, TensorMetadata* outputs",
    "InferParameter": "bool bool_param, int64 int64_param, string string_param, "
    "double double_param, uint64 uint64_param",
    "InferTensorContents": "bool* bool_contents, int32* int_contents, int64* int64_contents, "
    "uint32* uint_contents, uint64* uint64_contents, float* fp32_contents, double* fp64_contents, "
    "bytes* bytes_contents",
    "InferTensor": "string name, string datatype, int64* shape, InferParameter* parameters, "
    "InferTensorContents contents",
    "RequestedOutput": "string name, InferParameter* parameters",
    "ModelInferRequest": "string model_name, string model_version, string id, "
    "InferParameter* parameters, InferTensor* inputs, RequestedOutput* outputs, "
    "bytes* raw_input_contents",
    "ModelInferResponse": "string model_name, string model_version, string id, "
    "InferParameter* parameters, InferTensor* outputs, bytes* raw_output_contents",
}
METHODS = "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer"
_Field = descriptor_pb2.FieldDescriptorProto


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="caster/inference.proto", package="inference", syntax="proto3"
    )
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        if name == "InferParameter":
            message.oneof_decl.add(name="parameter_choice")
        for number, text in enumerate(filter(None, fields.split(", ")), 1):
            kind, field_name = text.split()
            field = _add(message, field_name, number, kind)
            if name == "InferParameter":
                field.oneof_index = 0
            if field_name == "parameters":
                entry = message.nested_type.add(name="ParametersEntry")
                entry.options.map_entry = True
                _add(entry, "key", 1, "string")
                _add(entry, "value", 2, "InferParameter")
                field.type_name = f".inference.{name}.ParametersEntry"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"inference.{name}"))
        for name in MESSAGES
    }


def _add(message: Any, name: str, number: int, kind: str) -> Any:
    label = _Field.LABEL_REPEATED if kind.endswith("*") else _Field.LABEL_OPTIONAL
    kind = kind.rstrip("*")
    field = message.field.add(name=name, number=number, label=label)
    if kind in MESSAGES:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".inference.{kind}"
    else:
        field.type = getattr(_Field, f"TYPE_{kind.upper()}")
    return field


CLASSES = _build()  # by name


# --- methods -------------------------------------------------------------------------------------

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
HEALTH = "ServerLive", "ServerReady"  # these probes need no token

Method = Callable[[Any, str | None], Awaitable[Any]]  # request and stream header -> response


def grpc_handlers(service: Service, check_token: Callable[[str | None], None]) -> Any:
    """Make the handlers of the service, for `grpc.aio.server`."""
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
    """The methods of the protocol, under its names."""

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
        wanted = {output.name for output in request.outputs}
        answer = await self._service.infer(asked, wanted)
        outputs = {name: a for name, a in answer.outputs.items() if not wanted or name in wanted}
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
        raise RequestError(f"there are {len(request.inputs)} inputs, but {len(raw)} raw contents")
    for i, tensor in enumerate(request.inputs):
        if tensor.name in inputs:
            raise RequestError(f"input {tensor.name!r} is given twice")
        inputs[tensor.name] = _input(tensor, raw[i] if raw else None)
    return inputs


def _input(tensor: Any, raw: bytes | None) -> Tensor:
    name, datatype, shape = tensor.name, tensor.datatype, list(tensor.shape)
    if raw is not None:
        return from_bytes(name, datatype, shape, raw)
    if datatype not in CONTENTS:
        raise RequestError(f"tensor {name}: {datatype!r} has no typed contents: send raw contents")
    return from_values(name, datatype, shape, list(getattr(tensor.contents, CONTENTS[datatype])))


def _parameter(value: str | int | bool) -> Any:
    kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
    return CLASSES["InferParameter"](**{kind: value})
