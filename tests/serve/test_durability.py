"""`caster serve` when it is killed, stopped, out of disk space or tampered with."""

from __future__ import annotations

import asyncio
import re
import resource
import subprocess
import sys
import time

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from caster.monitor import log
from caster.serve.batcher import InferRequest
from caster.serve.service import ServeOptions, Service
from caster.serve.streams import StreamStore
from caster.serve.watch import StreamLogs
from caster.serve.worker import Worker
from tests.support import served
from tests.support.command_line import cli, refusal
from tests.support.served import SIZE, batches, grpc_infer, in_process, rest_infer, same

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return served.write(tmp_path_factory.mktemp("served"))


def test_a_killed_server_resumes_and_says_what_to_repeat(files, tmp_path):
    images = batches(8, seed=1)
    outs = in_process(files, images)
    options, stream = ("--snapshot-every", 3), {"stream": "camera 1"}
    labelled = files.adapter.new_stream()
    known = [labelled(batch) for batch in images[:2]]
    ids = np.concatenate([out.ids for out in known])
    truth = np.concatenate([out.proposed for out in known])
    labels = {"stream": "labelled", "ids": ids.tolist(), "labels": truth.tolist()}
    with served.serving(files, *options, folder=tmp_path / "streams") as server:
        for i in range(5):  # the snapshot has three
            same(rest_infer(server, {"x": images[i]}, parameters=stream), outs[i])
        rest_infer(server, {"x": images[0]}, parameters={"stream": "camera 2"})
        for i in range(2):
            rest_infer(server, {"x": images[i]}, parameters={"stream": "labelled"})
        _, found = server.curl("/v2/models/model/feedback", labels)
        assert found["counted"] == labelled.feedback(ids, truth) > 0
        server.kill()
    with served.serving(files, *options, folder=tmp_path / "streams") as server:
        with pytest.raises(InferenceServerException, match="position 48, not 80: repeat 2 batches"):
            rest_infer(server, {"x": images[5]}, parameters=stream | {"position": 5 * SIZE})
        # What came with the snapshot is answered from it, and changes nothing.
        again = grpc_infer(server, {"x": images[2]}, parameters=stream | {"position": 2 * SIZE})
        same(again, outs[2])
        assert again["parameters"]["repeated"]
        for i in range(3, 7):
            position = {"position": i * SIZE}
            answer = grpc_infer(server, {"x": images[i]}, parameters=stream | position)
            same(answer, outs[i])
            assert answer["parameters"].get("repeat_batches") == (2 if i == 3 else None)
        _, found = server.curl("/v2/models/model/feedback", labels)
        assert found["counted"] == 0  # it has these labels already
        status, errors = server.stop()
    assert status == 0
    assert "camera 1: resumed at sample 48; repeat 2 batches" in errors
    with served.serving(files, *options, folder=tmp_path / "streams") as server:
        answer = rest_infer(server, {"x": images[7]}, parameters=stream)
        same(answer, outs[7])  # SIGTERM has stored all seven
        assert "repeat_batches" not in answer["parameters"]
        other = rest_infer(server, {"x": images[0]}, parameters={"stream": "camera 2"})
        same(other, outs[0])  # there was no snapshot of it
        assert other["parameters"]["repeat_batches"] == 1


def test_a_full_disk_means_frozen_answers_and_changed_weights_none(tmp_path):
    """A limit on the size of files stands for the disk: writes fail as they do there."""
    files = served.write(tmp_path)
    images = batches(6, seed=3)
    outs = in_process(files, images)
    logits = [np.asarray(files.adapter.model(batch).logits) for batch in images]
    frozen = [np.array(served.NAMES)[found.argmax(1)].tolist() for found in logits]
    unlimited = resource.RLIM_INFINITY
    with served.serving(files, "--snapshot-every", 1, "--idle", 0.2, "--verify", 1) as server:
        pid = server.process.pid
        same(rest_infer(server, {"x": images[0]}, parameters={"stream": "a"}), outs[0])
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, unlimited))
        same(rest_infer(server, {"x": images[1]}, parameters={"stream": "a"}), outs[1])
        for infer in (rest_infer, grpc_infer):
            for stream in ("a", "new"):
                answer = infer(server, {"x": images[2]}, parameters={"stream": stream})
                assert answer["labels"].tolist() == frozen[2]
                assert (answer["reason"].item(), answer["position"].item()) == ("frozen", -1)
                assert "File too large" in answer["parameters"]["warning"]
        assert server.metric("caster_degraded") == 1
        assert server.curl("/v2/health/ready")[0] == 200
        label = {"stream": "a", "ids": [0], "labels": [served.NAMES[0]]}
        assert server.curl("/v2/models/model/feedback", label)[0] == 503
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (unlimited, unlimited))
        time.sleep(1.2)  # until the server tries again
        same(rest_infer(server, {"x": images[2]}, parameters={"stream": "a"}), outs[2])
        assert server.metric("caster_degraded") == 0
        wait_for(lambda: server.metric("caster_streams_in_memory") == 0)  # it was idle
        same(rest_infer(server, {"x": images[3]}, parameters={"stream": "a"}), outs[3])
        with (tmp_path / "model.onnx").open("ab") as model:
            model.write(b"x")
        wait_for(lambda: server.curl("/v2/health/ready")[0] == 503)
        with pytest.raises(InferenceServerException, match=r"model\.onnx") as failed:
            grpc_infer(server, {"x": images[4]})
        assert failed.value.status() == "StatusCode.UNAVAILABLE"
        _, errors = server.stop()
    assert errors.count("until this is solved, the frozen model answers") == 1
    assert "written again" in errors


def wait_for(condition):
    for _ in range(300):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen")


def test_token_and_tls(files, tmp_path):
    token, certificate, key = (tmp_path / name for name in ("token", "cert.pem", "key.pem"))
    token.write_text("0123456789abcdef\n")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    options = "--token-file", token, "--tls-cert", certificate, "--tls-key", key
    with served.serving(files, *options, folder=tmp_path / "streams") as server:
        trust = "--cacert", str(certificate)
        bearer = "-H", "Authorization: Bearer 0123456789abcdef"
        assert server.scheme == "https"
        assert server.curl("/v2/health/ready", None, *trust)[0] == 200
        for path in ("/v2", "/metrics", "/v2/models/model/infer"):
            assert server.curl(path, None, *trust)[0] == 401
            assert server.curl(path, None, *trust, *bearer)[0] in (200, 405)
        client = tritonclient.grpc.InferenceServerClient(
            server.rpc, ssl=True, root_certificates=str(certificate)
        )
        assert client.is_server_live()
        with pytest.raises(InferenceServerException, match="bearer token"):
            client.get_server_metadata()
        client.get_server_metadata(headers={"authorization": "Bearer 0123456789abcdef"})
        client.close()
        port = server.rest.rpartition(":")[2]
        for more, message in (
            (["--http-port", port], f"cannot listen on 127.0.0.1:{port}: Address already in use"),
            (["--grpc-port", server.rpc.rpartition(":")[2]], "choose another port with --grpc"),
            (["--folder", tmp_path / "streams"], "another server is using"),
        ):
            assert message in refused(files, *more)


def service(files, folder, on_answer=None, **options):
    folder.mkdir()
    store = StreamStore(
        files.adapter, folder, in_memory=4, total=9, snapshot_every=9, idle_seconds=9.0
    )
    found = Service(files.adapter, ServeOptions("model", folder, queue=9, **options))
    found.add(Worker(files.adapter, store, on_answer=on_answer))
    return found


def test_on_answer_gets_every_batch_and_cannot_stop_the_server(files, tmp_path):
    images, calls = batches(4, seed=5), []
    problems = [None, ValueError("a bug"), OSError(28, "No space left on device")]

    def on_answer(stream_id, adaptation, position):
        calls.append((stream_id, adaptation.verdict, position))
        if problem := problems[len(calls) - 1]:
            raise problem

    async def run():
        served_model = service(files, tmp_path / "streams", on_answer=on_answer)
        answers = [await served_model.infer(InferRequest({"x": x}, "a")) for x in images]
        await served_model.close()
        return answers

    answers = asyncio.run(run())
    outs = in_process(files, images[:3])
    assert calls == [("a", out.verdict, out.ids[0]) for out in outs]
    for answer, out in zip(answers, outs, strict=False):
        same(answer.outputs, out)
    assert answers[3].outputs["reason"].item() == "frozen"
    assert "No space left" in answers[3].parameters["warning"]


def test_a_request_whose_client_has_gone_is_not_part_of_its_stream(files, tmp_path):
    first, second = batches(2, seed=6)

    async def run():
        served_model = service(files, tmp_path / "streams", wait_ms=200.0)
        gone = asyncio.create_task(served_model.infer(InferRequest({"x": first}, "a")))
        stays = asyncio.create_task(served_model.infer(InferRequest({"x": second}, "a")))
        await asyncio.sleep(0)
        gone.cancel()
        answer = await stays
        await served_model.close()
        return answer

    same(asyncio.run(run()).outputs, files.adapter.new_stream()(second))


def refused(files, *options):
    """The one line of a command that fails before it serves."""
    fixed = ["--http-port", 0, "--grpc-port", 0, "--folder", files.folder / "refused"]
    fixed += [] if "--logs" in options else ["--logs", files.folder / "refused-logs"]
    return refusal(cli("serve", *files.arguments, *fixed, *options, columns=200))


def test_clear_rejections(files, tmp_path, monkeypatch):
    short = tmp_path / "token"
    short.write_text("short")
    assert "16 to 4,096" in refused(files, "--token-file", short)
    (tmp_path / "lines").write_text("0123456789abcdef\n0123456789abcdef\n")
    assert "white space" in refused(files, "--token-file", tmp_path / "lines")
    assert f"{tmp_path / 'absent'}" in refused(
        files, "--tls-cert", tmp_path / "absent", "--tls-key", short
    )
    done = cli("serve", *files.arguments, "--host", "no.invalid", "--folder", tmp_path / "none")
    assert done.exit_code == 1
    assert "name an address of this machine with --host" in " ".join(done.stderr.split())
    assert "certificate and its key" in refused(files, "--tls-cert", short)
    said = refused(files, "--tls-cert", short, "--tls-key", short)
    assert re.search(r"in PEM format(: [A-Z_]+)?$", said)
    assert "it is a file, not a folder" in refused(files, "--logs", short)
    assert "is a file, not a folder" in refused(files, "--folder", short)
    same = refused(files, "--http-port", 8431, "--grpc-port", 8431)
    assert same == "REST and gRPC cannot share port 8431: choose another with --grpc-port"
    folder = tmp_path / "streams"
    folder.mkdir()
    (folder / "source").write_text("0" * 64)
    assert "streams of another state" in refused(files, "--folder", folder)
    other = served.Files(tmp_path, files.adapter)
    (tmp_path / "model.caster").write_bytes((files.folder / "model.caster").read_bytes())
    # An empty field more: another model for the same state.
    content = (files.folder / "model.onnx").read_bytes()
    (tmp_path / "model.onnx").write_bytes(content + b"\x32\x00")
    assert "another model" in refused(other)
    for name in [name for name in sys.modules if name.startswith("caster.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'caster-tta[serve]'" in refused(files)


def test_any_id_of_a_stream_can_be_logged(files, tmp_path):
    """A log that cannot be written would stop the adaptation of all streams."""
    logs = StreamLogs(tmp_path, files.adapter.state)
    out = files.adapter(batches(1, seed=3)[0])
    ids = ["x" * 128, "x" * 127 + "y", "/" * 128, "日" * 128, "a"]
    for stream_id in ids:
        logs.answered(stream_id, out, 0)
    assert len(log.names(tmp_path)) == len(ids)
    assert all(log.read(tmp_path, name).batches == 1 for name in log.names(tmp_path))
