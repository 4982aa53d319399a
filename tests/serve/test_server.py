"""`caster serve` as a process on the loopback: its clients, streams and limits."""

from __future__ import annotations

import gzip
import http.client
import json
import queue
import re
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from caster.monitor import log
from tests.support import served
from tests.support.served import CLIENTS, NAMES, SIZE, batches, in_process, same

pytestmark = pytest.mark.slow
LENGTH = "inference-header-content-length"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return served.write(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(files):
    """Two streams in memory at a time: every test with three of them has one come back."""
    options = "--batch", SIZE, "--wait", 1000, "--streams", 2, "--queue", 6, "--max-request", 0.5
    with served.serving(files, *options, "--max-streams", 20, "--snapshot-every", 2) as found:
        yield found


def test_three_clients_have_streams_of_their_own(files, server):
    data = {name: batches(3, seed) for seed, name in enumerate(CLIENTS)}
    expected = {name: in_process(files, images) for name, images in data.items()}
    for i in range(3):
        for name, infer in CLIENTS.items():
            answer = infer(server, {"x": data[name][i]}, parameters={"stream": f"own/{name}"})
            same(answer, expected[name][i])
            assert answer["parameters"] == {"stream": f"own/{name}", "batch_samples": SIZE}
    assert server.metric("caster_streams_in_memory") == 2


def test_the_documented_client_runs(files, server, capsys):
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    code = re.search(r"```python\n(import tritonclient.*?)```", page, re.DOTALL)[1]
    (batch,) = batches(1, seed=6)
    exec(code.replace("localhost:8000", server.rest), {"batch": batch})
    (out,) = in_process(files, [batch])
    assert out.verdict.reason in capsys.readouterr().out


def test_metadata_and_health(server):
    rest = tritonclient.http.InferenceServerClient(server.rest)
    rpc = tritonclient.grpc.InferenceServerClient(server.rpc)
    for client in (rest, rpc):
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("model")
        assert client.is_model_ready("model", "1")
        with pytest.raises(InferenceServerException, match="no model"):
            client.get_model_metadata("other")
    about = rest.get_model_metadata("model")
    assert about["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3, 8, 8]}]
    assert tuple(each["name"] for each in about["outputs"]) == served.OUTPUTS
    assert about["parameters"]["classes"] == NAMES
    same_thing = rpc.get_model_metadata("model", as_json=True)
    shapes = [[int(size) for size in each["shape"]] for each in same_thing["outputs"]]
    assert shapes == [each["shape"] for each in about["outputs"]]
    assert rest.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    assert rpc.get_server_metadata().name == "caster"


def test_waiting_requests_of_a_stream_are_one_batch(files, server):
    images = batches(1, seed=7)[0]
    (out,) = in_process(files, [images])
    client = tritonclient.grpc.InferenceServerClient(server.rpc)
    done: queue.Queue = queue.Queue()
    half = SIZE // 2
    for stream, part in (("joined", images[:half]), ("alone", images[:half])):
        inputs = served.tensors(tritonclient.grpc, {"x": part})
        client.async_infer(
            "model", inputs, lambda result, error, s=stream: done.put((s, result, error)),
            parameters={"stream": stream},
        )  # fmt: skip
    last = served.grpc_infer(server, {"x": images[half:]}, headers={"caster-stream": "joined"})
    assert last["parameters"]["batch_samples"] == SIZE
    found = {}
    for _ in range(2):
        stream, result, error = done.get(timeout=30)
        assert error is None
        found[stream] = result
        samples = result.get_response().parameters["batch_samples"].int64_param
        assert samples == (SIZE if stream == "joined" else half)
    client.close()
    # Either may have arrived first: both are adapted by all 16 samples.
    first = found["joined"].as_numpy("position").item()
    assert {first, last["position"].item()} == {0, half}
    for part, answer in (
        (slice(half), found["joined"].as_numpy("probabilities")),
        (slice(half, None), last["probabilities"]),
    ):
        np.testing.assert_allclose(answer, out.probabilities[part], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("client", ["rest", "grpc"])
def test_a_client_may_carry_the_state_itself(files, server, client):
    infer, images = CLIENTS[client], batches(3, seed=11)
    state: dict = {}
    for batch, out in zip(images, in_process(files, images), strict=True):
        answer = infer(server, {"x": batch, **state}, parameters={"state": True})
        same(answer, out)
        state = {n.removeprefix("next."): a for n, a in answer.items() if n.startswith("next.")}
    expected = files.adapter.new_stream()
    for batch in images:
        expected(batch)
    for name, array in expected.state().items():
        np.testing.assert_allclose(state[name], array, rtol=1e-5, atol=1e-6, err_msg=name)
        assert state[name].dtype == array.dtype
    alone = infer(server, {"x": images[2]})
    same(alone, files.adapter.new_stream()(images[2]))
    assert tuple(alone)[:-1] == served.OUTPUTS


def test_labels_count_as_in_python(files, server):
    stream, images = files.adapter.new_stream(), batches(8, seed=21)
    outs = [stream(batch) for batch in images]
    for batch in images:
        served.rest_infer(server, {"x": batch}, parameters={"stream": "labelled"})
    ids = np.concatenate([out.ids[out.disputed] for out in outs])
    assert len(ids) > 3
    truth = np.concatenate([out.proposed for out in outs])[ids]
    counted = stream.feedback(ids[:3], truth[:3])
    path, header = "/v2/models/model/feedback", ("-H", "caster-stream: labelled")
    status, found = server.curl(path, {"ids": ids[:3].tolist(), "labels": truth[:3].tolist()},
                                *header)  # fmt: skip
    assert (status, found["counted"], found["decision"]) == (200, counted, stream.betting.position)
    assert counted > 0
    labels = np.array([truth[3].encode()], np.object_)
    answer = served.grpc_infer(server, {"ids": ids[3:4], "labels": labels},
                               parameters={"stream": "labelled"})  # fmt: skip
    assert answer["counted"].tolist() == [stream.feedback(ids[3:4], truth[3:4])]
    for body in ({"ids": [10_000], "labels": [NAMES[0]]}, {"ids": [0], "labels": ["class Z"]}, {}):
        status, found = server.curl(path, body, *header)
        assert status == 400
        assert found["error"]


def test_the_monitor_shows_every_stream_and_its_labels(files, server):
    """By its page, its data and its metrics, all as the library's own log has them."""
    images = batches(3, seed=71)
    for batch in images:
        served.rest_infer(server, {"x": batch}, parameters={"stream": "watched"})
    outs = in_process(files, images)
    labels = [str(label) for label in outs[0].labels[:4]]
    header = "-H", "caster-stream: watched"
    server.curl("/v2/models/model/feedback", {"ids": [0, 1, 2, 3], "labels": labels}, *header)
    status, page = server.curl("/monitor")
    assert status == 200
    assert page.startswith("<!DOCTYPE html>")
    status, data = server.curl("/monitor.json")
    (found,) = (stream for stream in data["streams"] if stream["name"] == "watched")
    logged = log.read(files.folder / "model.caster.logs", "watched")
    assert found["batches"] == logged.batches == 3
    assert found["accepted"] == sum(out.verdict.accepted for out in outs)
    assert (found["labels"], found["labelled_errors"]) == (4, 0)
    assert server.metric('caster_stream_samples_total{stream="watched"}') == 3 * SIZE


def request(tensor, *, encoding=None, header=True, model="model", tail=b"", outputs=(), **changed):
    """The parts of a raw request: path, body and headers."""
    about = {"name": "x", "datatype": "FP32", "shape": list(tensor.shape)}
    raw = tensor.tobytes() + tail
    about |= {"parameters": {"binary_data_size": len(raw)}} | changed
    content = {"inputs": [about], "parameters": {"stream": "guarded"}}
    text = json.dumps(content | {"outputs": [{"name": name} for name in outputs]}).encode()
    headers = {LENGTH: str(len(text))} if header is True else header
    body = text + raw
    if encoding:
        body, headers = gzip.compress(body)[:-20], headers | {"content-encoding": encoding}
    return f"/v2/models/{model}/infer", body, headers


def bad_requests():
    good = np.zeros((2, 3, 8, 8), np.float32)
    broken = good.copy()
    broken[1, 2, 3, 4] = np.nan
    large = np.zeros((1000, 3, 8, 8), np.float32)
    path = "/v2/models/model/infer"
    json_data = {"name": "x", "datatype": "FP32", "shape": [1, 3, 8, 8]}
    as_json = {"inputs": [json_data | {"data": ["1"] * 192}]}
    nested = b'{"inputs": ' + b"[" * 100_000
    return {
        "nan": (400, *request(broken)),
        "shape": (400, *request(good[:, :2])),
        "no samples": (400, *request(good[:0])),
        "negative shape": (400, *request(good, shape=[-2, -3, 8, 8])),
        "huge shape": (400, *request(good, shape=[2**40, 3, 8, 8])),
        "dtype": (400, *request(good.astype(np.float64), datatype="FP64")),
        "no such datatype": (400, *request(good, datatype="FP31")),
        "unknown input": (400, *request(good, name="y")),
        "unknown output": (400, *request(good, outputs=["nope"])),
        "one unknown output": (400, *request(good, outputs=["labels", "probability"])),
        "a state that the server keeps": (400, *request(good, outputs=["next.samples"])),
        "too many bytes": (400, *request(good, tail=b"more")),
        "size beyond the body": (400, *request(good, parameters={"binary_data_size": 10**9})),
        "a length that is none": (400, *request(good, header={LENGTH: "x"})),
        "truncated gzip": (400, *request(good, encoding="gzip")),
        "unknown encoding": (400, *request(good, encoding="lzma")),
        "not JSON": (400, path, b"{", {}),
        "nested": (400, path, nested, {}),
        "not an object": (400, path, b"[1]", {}),
        "no inputs": (400, path, b"{}", {}),
        "text for numbers": (400, path, json.dumps(as_json).encode(), {}),
        "oversize": (413, *request(large)),
        "model": (404, *request(good, model="other")),
        "path": (404, "/v3", b"", {}),
        "method": (405, "/v2", b"", {}),
        "two ids": (400, *request(good)[:2], request(good)[2] | {"caster-stream": "another"}),
    }  # fmt: skip


def test_bad_requests_get_an_error_and_change_no_stream(files, server):
    images = batches(2, seed=31)
    outs = in_process(files, images)
    same(served.rest_infer(server, {"x": images[0]}, parameters={"stream": "guarded"}), outs[0])
    connection = http.client.HTTPConnection(server.rest)
    for name, (status, path, body, headers) in bad_requests().items():
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        text = response.read()
        assert response.status == status, (name, text)
        assert json.loads(text)["error"], name
        if status == 413:  # the server hangs up: it reads no more
            connection.close()
    connection.close()
    ahead = {"stream": "guarded", "position": 999}
    nope = tritonclient.grpc.InferRequestedOutput("nope")
    for codes, arrays, options in (
        ("INVALID_ARGUMENT", {"x": np.full((2, 3, 8, 8), np.inf, np.float32)}, {}),
        ("INVALID_ARGUMENT", {"x": images[0], "y": images[0]}, {}),
        ("INVALID_ARGUMENT", {"x": images[0]}, {"parameters": {"stream": 3}}),
        ("INVALID_ARGUMENT", {"x": images[0]}, {"outputs": [nope]}),
        ("RESOURCE_EXHAUSTED", {"x": np.zeros((1000, 3, 8, 8), np.float32)}, {}),
        ("NOT_FOUND", {"x": images[0]}, {"model_version": "2"}),
        ("FAILED_PRECONDITION", {"x": images[0]}, {"parameters": ahead}),
    ):  # fmt: skip
        options = {"parameters": {"stream": "guarded"}} | options
        with pytest.raises(InferenceServerException) as failed:
            served.grpc_infer(server, arrays, **options)
        assert failed.value.status() == f"StatusCode.{codes}", failed.value
    bad_state = {"x": images[0], "samples": np.array([3]), "source": np.zeros(32, np.uint8)}
    with pytest.raises(InferenceServerException, match="state"):
        served.grpc_infer(server, bad_state)
    samples = [tritonclient.grpc.InferRequestedOutput("next.samples")]
    with pytest.raises(InferenceServerException, match=r"no output 'next\.samples'"):
        served.grpc_infer(server, {"x": images[0]}, outputs=samples)
    asked = served.grpc_infer(server, {"x": images[0]}, outputs=samples, parameters={"state": True})
    assert asked["next.samples"].item() == SIZE
    assert asked.keys() == {"next.samples", "parameters"}
    same(served.grpc_infer(server, {"x": images[1]}, parameters={"stream": "guarded"}), outs[1])


def test_a_request_that_comes_again_gets_the_same_answer(files, server):
    images = batches(2, seed=41)
    outs = in_process(files, images)
    for position, i in ((0, 0), (SIZE, 1), (SIZE, 1)):
        parameters = {"stream": "again", "position": position}
        answer = served.grpc_infer(server, {"x": images[i]}, parameters=parameters)
        same(answer, outs[i])
    assert answer["parameters"]["repeated"] is True
    part = served.rest_infer(server, {"x": images[1][3:5]},
                             parameters={"stream": "again", "position": SIZE + 3})  # fmt: skip
    same(part, outs[1], slice(3, 5))


def test_a_full_queue_and_too_many_streams_are_rejected(server):
    client = tritonclient.grpc.InferenceServerClient(server.rpc)
    done: queue.Queue = queue.Queue()
    inputs = served.tensors(tritonclient.grpc, {"x": batches(1, seed=51, size=1)[0]})
    for i in range(8):  # six may wait for others of their stream
        client.async_infer(
            "model", inputs, lambda result, error: done.put(error), parameters={"stream": f"q{i}"}
        )
    errors = [error for error in (done.get(timeout=30) for _ in range(8)) if error]
    assert [error.status() for error in errors] == ["StatusCode.RESOURCE_EXHAUSTED"] * 2
    client.close()
    image = batches(1, seed=51)[0]
    with pytest.raises(InferenceServerException, match="streams, its maximum"):
        for i in range(20):
            served.rest_infer(server, {"x": image}, parameters={"stream": f"many {i}"})
    served.rest_infer(server, {"x": image}, parameters={"stream": "many 0"})  # has its place


def test_metrics_count_what_was_served(server):
    before = server.metric("caster_samples_total")
    served.rest_infer(server, {"x": batches(1, seed=61)[0]})
    assert server.metric("caster_samples_total") == before + SIZE
    assert server.curl("/v2/models/other")[0] == 404
    assert server.metric('caster_requests_total{protocol="rest",status="404"}') >= 1
    assert server.metric("caster_ready") == 1
