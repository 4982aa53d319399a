"""Messages and tensors are those of tritonclient, which has them from the protocol's own files."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor, np_to_triton_dtype, serialize_byte_tensor

import caster
from caster.models.preprocessing import Preprocessing
from caster.serve.grpc_api import CLASSES, METHODS, SERVICE
from caster.serve.tensors import (
    DTYPES,
    RequestError,
    datatype_of,
    from_bytes,
    from_values,
    to_bytes,
    to_json,
)
from caster.serve.worker import input_signature


def fields(message):
    """Number, name and type of every field, with those of messages inside."""
    return [
        (f.number, f.name, f.type, f.is_repeated, f.message_type and fields(f.message_type))
        for f in message.fields
    ]


def test_fields_are_the_protocols():
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert service.full_name == SERVICE
    for name in METHODS:
        method = service.methods_by_name[name]
        for ours, theirs in (("Request", method.input_type), ("Response", method.output_type)):
            found = fields(CLASSES[f"{name}{ours}"].DESCRIPTOR)
            assert found == [f for f in fields(theirs) if f[0] <= len(found)], name


def test_a_message_is_read_as_it_was_written():
    theirs = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[b"12345678"])
    theirs.inputs.add(name="x", datatype="FP32", shape=[2, 1])
    theirs.parameters["stream"].string_param = "camera"
    theirs.parameters["state"].bool_param = False
    ours = CLASSES["ModelInferRequest"].FromString(theirs.SerializeToString())
    assert ours.parameters["stream"].string_param == "camera"
    assert ours.parameters["state"].WhichOneof("parameter_choice") == "bool_param"
    assert list(ours.inputs[0].shape) == [2, 1]
    assert ours.SerializeToString(deterministic=True) == theirs.SerializeToString(
        deterministic=True
    )


@pytest.mark.parametrize("datatype", [name for name in DTYPES if name != "BYTES"])
def test_numbers_go_there_and_back(datatype):
    array = np.array([[0, 1], [1, 0], [1, 1]]).astype(DTYPES[datatype])
    assert datatype_of(array.dtype) == datatype == np_to_triton_dtype(array.dtype)
    for found in (
        from_bytes("x", datatype, (3, 2), to_bytes(array)),
        from_values("x", datatype, (3, 2), to_json(array)),
        from_values("x", datatype, (3, 2), array.tolist()),
    ):
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=5))
def test_text_is_packed_as_tritonclient_does(words):
    array = np.array([*words, ""], np.object_)[: len(words)]
    packed = to_bytes(array)
    assert [each.decode() for each in deserialize_bytes_tensor(packed)] == words
    if words:
        assert packed == serialize_byte_tensor(array).item()
    assert from_bytes("x", "BYTES", [len(words)], packed).tolist() == words
    assert from_values("x", "BYTES", [len(words)], to_json(array)).tolist() == words


@given(st.binary(max_size=40), st.integers(0, 4))
def test_damaged_text_is_an_error_or_text(raw, count):
    try:
        found = from_bytes("x", "BYTES", [count], raw)
    except RequestError:
        return
    assert to_bytes(found) == raw


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("INT8", [300]),
        ("INT64", [0.5]),
        ("INT64", [10**30]),
        ("BOOL", [2]),
        ("FP32", ["1"]),
        ("FP32", [None]),
        ("FP32", [[1], [2, 3]]),
        ("BYTES", [1]),
        ("FP32", [1, 2]),
    ],
)
def test_values_of_another_type_are_rejected(datatype, values):
    with pytest.raises(RequestError):
        from_values("x", datatype, [1], values)


@pytest.mark.parametrize(
    ("layout", "channels", "shape"),
    [("NCHW", "RGB", (None, 3, 8, 9)), ("NCHW", "grey", (None, 1, 8, 9)),
     ("NHWC", "BGR", (None, 8, 9, 3)), ("NHWC", "grey", (None, 8, 9, 1))],
)  # fmt: skip
def test_the_input_of_a_function_is_that_of_its_preprocessing(layout, channels, shape):
    depth = 1 if channels == "grey" else 3
    mean, std = (0.0,) * depth, (1.0,) * depth
    read = Preprocessing(255, mean, std, layout, crop=(8, 9), channels=channels)
    model = caster.wrap(lambda batch: batch, preprocessing=read)
    assert input_signature(model) == ("images", shape, np.float32)
