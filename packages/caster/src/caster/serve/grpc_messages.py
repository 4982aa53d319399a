"""Messages of the Open Inference Protocol's gRPC service, built without a code generator.

Only field numbers and types matter on the wire. The messages live in a pool of their own, so that
a client library with generated ones can be imported beside them.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import (  # type: ignore[import-untyped]
    descriptor_pb2,
    descriptor_pool,
    message_factory,
)

SERVICE = "inference.GRPCInferenceService"
# Fields are numbered in their order. A `*` is a repeated field, `parameters` a map, and all fields
# of InferParameter are one oneof.
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
