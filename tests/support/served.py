"""A small model with its state, `caster serve` as a process, and its clients."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import np_to_triton_dtype

import caster
from tests.support import mixture_problem as problem
from tests.support.onnx_export import exported

NAMES = [f"class {letter}" for letter in "ABCDEF"]
SIZE = 16  # of a batch
OUTPUTS = ("labels", "probabilities", "disputed", "accepted", "reason", "ratio", "position")
Answer = dict[str, Any]  # outputs by name, and `parameters`


@dataclass(frozen=True)
class Files:
    """model.onnx, model.caster, and the adapter that a server makes of them."""

    folder: Path
    adapter: caster.Adapter

    @property
    def arguments(self) -> list[str]:
        return ["--model", str(self.folder / "model.onnx"), str(self.folder / "model.caster")]


@cache
def _graph() -> bytes:
    return exported(problem.model().module, torch.zeros(2, 3, 8, 8)).SerializeToString()


def write(folder: Path) -> Files:
    """Labels are names; every batch is compared, so that each has a ratio."""
    onnx.save(onnx.load_model_from_string(_graph()), folder / "model.onnx")
    model = caster.wrap(str(folder / "model.onnx"))
    source = [(x, [NAMES[i] for i in y]) for x, y in problem.source_batches(300)]
    adapter = caster.fit(model, source, classes=NAMES)
    adapter.save(folder / "model.caster")
    return Files(folder, adapter)


def batches(count: int, seed: int, size: int = SIZE) -> list[Any]:
    """Shifted images of one client."""
    images = problem.make_images(problem.shuffled(count * size, seed), seed, shift=0.8)
    return list(images.reshape(count, size, *images.shape[1:]))


class Server:
    """A server process on free ports."""

    def __init__(self, files: Files, *options: object, folder: Path | None = None) -> None:
        command = [sys.executable, "-m", "caster", "serve", *files.arguments]
        command += ["--http-port", "0", "--grpc-port", "0"]
        command += ["--folder", str(folder or files.folder / "streams")]
        self.process = subprocess.Popen(
            [*command, *map(str, options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"REST at (https?)://(\S+?)/v2.*gRPC at (\S+)\.$", line.strip())
        assert found, line + self.process.communicate()[1]
        self.scheme, self.rest, self.rpc = found.groups()

    def kill(self) -> str:
        """Send SIGKILL; return standard error."""
        self.process.kill()
        return self.process.communicate()[1]

    def stop(self) -> tuple[int, str]:
        """Send SIGTERM; return the exit status and standard error."""
        self.process.terminate()
        errors = self.process.communicate(timeout=60)[1]
        return self.process.returncode, errors

    def curl(self, path: str, body: Any = None, *options: str) -> tuple[int, Any]:
        """Status and JSON, by the program curl."""
        command = ["curl", "-s", "-w", "\n%{http_code}", f"{self.scheme}://{self.rest}{path}"]
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        command += [] if data is None else ["--data-binary", "@-"]
        done = subprocess.run([*command, *options], input=data, capture_output=True, check=True)
        text, _, status = done.stdout.decode().rpartition("\n")
        return int(status), json.loads(text) if text.startswith("{") else text

    def metric(self, name: str) -> float:
        _, text = self.curl("/metrics")
        return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[1])


@contextmanager
def serving(files: Files, *options: object, folder: Path | None = None) -> Iterator[Server]:
    server = Server(files, *options, folder=folder)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


def tensors(library: Any, arrays: dict[str, Any]) -> list[Any]:
    found = []
    for name, array in arrays.items():
        tensor = library.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        found.append(tensor)
    return found


def _decoded(array: Any) -> Any:
    return np.array([each.decode() for each in array]) if array.dtype == object else array


def rest_infer(server: Server, arrays: dict[str, Any], **options: Any) -> Answer:
    """By tritonclient over HTTP, in binary."""
    with tritonclient.http.InferenceServerClient(server.rest) as client:
        found = client.infer("model", tensors(tritonclient.http, arrays), **options)
    outputs = [each["name"] for each in found.get_response()["outputs"]]
    answer: Answer = {name: _decoded(found.as_numpy(name)) for name in outputs}
    return answer | {"parameters": found.get_response().get("parameters", {})}


def grpc_infer(server: Server, arrays: dict[str, Any], **options: Any) -> Answer:
    """By tritonclient over gRPC."""
    with tritonclient.grpc.InferenceServerClient(server.rpc) as client:
        found = client.infer("model", tensors(tritonclient.grpc, arrays), **options)
    response = found.get_response()
    answer: Answer = {each.name: _decoded(found.as_numpy(each.name)) for each in response.outputs}
    parameters = {
        name: getattr(value, value.WhichOneof("parameter_choice"))
        for name, value in response.parameters.items()
    }
    return answer | {"parameters": parameters}


def curl_infer(server: Server, arrays: dict[str, Any], **options: Any) -> Answer:
    """By curl, in JSON."""
    inputs = [
        {
            "name": name,
            "datatype": np_to_triton_dtype(array.dtype),
            "shape": array.shape,
            "data": array.tolist(),
        }
        for name, array in arrays.items()
    ]
    status, found = server.curl("/v2/models/model/infer", {"inputs": inputs, **options})
    assert status == 200, found
    answer: Answer = {each["name"]: np.array(each["data"]) for each in found["outputs"]}
    answer["probabilities"] = answer["probabilities"].reshape(-1, len(NAMES))
    return answer | {"parameters": found.get("parameters", {})}


CLIENTS = {"rest": rest_infer, "grpc": grpc_infer, "curl": curl_infer}


def same(answer: Answer, out: Any, samples: slice = slice(None)) -> None:
    """An answer is the one that the adapter gives in this process."""
    assert answer["labels"].tolist() == np.asarray(out.labels)[samples].tolist()
    expected = np.asarray(out.probabilities)[samples]
    np.testing.assert_allclose(answer["probabilities"], expected, rtol=1e-5, atol=1e-7)
    assert answer["disputed"].tolist() == out.disputed[samples].tolist()
    assert answer["accepted"].tolist() == [out.verdict.accepted]
    assert answer["reason"].tolist() == [out.verdict.reason]
    np.testing.assert_allclose(answer["ratio"][0], out.verdict.ratio, rtol=1e-5)
    assert answer["position"].tolist() == [out.ids[samples][0]]


def in_process(files: Files, images: Sequence[Any]) -> list[Any]:
    """The answers of one stream, by the adapter itself."""
    return list(files.adapter.stream(images))
