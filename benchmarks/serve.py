"""What `caster serve` does under load, against the bare model behind the same server.

    python benchmarks/serve.py [load] [streams] [hour] [kills] [--short] [--folder MODEL]

A small convolutional network is trained on synthetic images and fitted; everything runs on the
loopback, with tritonclient over gRPC. `load`: requests/s and latencies with two clients, in turns
with a server that answers with the frozen model (`--frozen`), once the streams rest. `streams`: 200
clients at once, some of them checked against the library. `hour`: as many batches as a client with
one a second sends in an hour, as fast as they go, and the server's memory. `kills`: kill -9 at
random moments; every answer must be the library's. Needs torch, and the extras `onnx` and `serve`.
"""

from __future__ import annotations

import argparse
import io
import queue
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tritonclient.grpc as triton
from torch import nn
from torch.nn.functional import cross_entropy
from tritonclient.utils import InferenceServerException

import caster
from measure import machine

CLASSES, PIXELS = 10, 32
PARTS = ("load", "streams", "hour", "kills")
CPU = "process_cpu_seconds_total"
POOL = 4_096  # images; a stream that repeats few of them is not the same stream


def images(n: int, seed: int, shift: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Noisy patterns, one a class, in other colours and with more noise where they are shifted."""
    patterns = np.random.default_rng(0).normal(size=(CLASSES, 3, PIXELS, PIXELS))
    rng = np.random.default_rng(seed)
    labels = rng.integers(CLASSES, size=n)
    x = patterns[labels] + rng.normal(size=(n, 3, PIXELS, PIXELS)) * (2 + 0.2 * shift)
    scale, offset = 1 - 0.2 * shift, 0.5 * shift * np.array([1.0, -0.8, 0.5]).reshape(3, 1, 1)
    return (scale * x + offset).astype(np.float32), labels


def write_model(folder: Path) -> caster.Adapter:
    """Train, export and fit: model.onnx and model.caster."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after, stride in (
        (3, 32, 1),
        (32, 64, 2),
        (64, 64, 1),
        (64, 128, 2),
        (128, 128, 1),
    ):
        layers += [nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))
    optimiser = torch.optim.AdamW(net.parameters(), 3e-3)
    for step in range(40):
        x, y = images(32, seed=1000 + step, shift=0.0)
        optimiser.zero_grad()
        cross_entropy(net(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimiser.step()
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net.eval(), (torch.zeros(2, 3, PIXELS, PIXELS),), file, dynamo=False,
                          input_names=["x"], dynamic_axes={"x": {0: "rows"}})  # fmt: skip
    (folder / "model.onnx").write_bytes(file.getvalue())
    model = caster.wrap(str(folder / "model.onnx"))
    source, labels = images(600, seed=1, shift=0.0)
    parts = np.split(source, 6), np.split(labels, 6)
    adapter = caster.fit(model, zip(*parts, strict=True))
    adapter.save(folder / "model.caster")
    return adapter


class Server:
    """A server process, which can be killed and started again on the same streams."""

    def __init__(self, folder: Path, streams: str, *options: object) -> None:
        files = ["--model", folder / "model.onnx", folder / "model.caster"]
        fixed = ["--folder", folder / streams, "--http-port", 0, "--grpc-port", 0]
        command = [sys.executable, "-m", "caster", "serve", *files, *fixed, *options]
        self._command = [str(part) for part in command]
        self.start()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        found = re.search(r"REST at (\S+?)/v2.*gRPC at (\S+)\.$", line.strip())
        assert found, line
        self.rest, self.rpc = found.groups()

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()
        self.process.wait()

    def metric(self, name: str) -> float:
        """One of its metrics."""
        text = urllib.request.urlopen(f"{self.rest}/metrics").read().decode()
        found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        return float(found[1])  # type: ignore[index]

    def memory(self) -> float:
        """Resident memory in MB."""
        return self.metric("process_resident_memory_bytes") / 1e6


class Client:
    """One client with its stream."""

    def __init__(self, server: Server, stream: str) -> None:
        self.stream, self.sent = stream, 0
        self._client = triton.InferenceServerClient(server.rpc)

    def __call__(self, x: np.ndarray, **parameters: Any) -> Any:
        """Send a batch."""
        self.sent += 1
        return self._client.infer(
            "model", inputs(x), parameters={"stream": self.stream, **parameters}
        )


def inputs(x: np.ndarray) -> list[Any]:
    tensor = triton.InferInput("x", x.shape, "FP32")
    tensor.set_data_from_numpy(x)
    return [tensor]


def batches(count: int, size: int, seed: int) -> list[np.ndarray]:
    return np.split(images(count * size, seed)[0], count)


def percentiles(seconds: list[float]) -> str:
    p50, p95, p99 = np.percentile(seconds, [50, 95, 99]) * 1000
    return f"p50 {p50:.1f} ms, p95 {p95:.1f} ms, p99 {p99:.1f} ms"


def send(clients: list[Client], data: list[np.ndarray], count: int) -> tuple[float, list[Any]]:
    """Send so many requests by each client at once; requests/s, and (seconds, reason) of each."""
    taken: list[Any] = []

    def run(client: Client) -> None:
        for _ in range(count):
            start = time.perf_counter()
            out = client(data[client.sent % len(data)])
            taken.append((time.perf_counter() - start, out.as_numpy("reason").item()))

    threads = [threading.Thread(target=run, args=(client,)) for client in clients]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(taken) / (time.perf_counter() - start), taken


def warm_up(client: Client) -> list[float]:
    """Bring a stream to rest; the seconds of its batches of 64 until then."""
    taken = []
    for i in range(100):
        (batch,) = batches(1, 64, seed=10_000 + i)
        start = time.perf_counter()
        if client(batch).as_numpy("reason").item() == b"rest":
            return taken
        taken.append(time.perf_counter() - start)
    raise AssertionError("the stream does not rest")


def load(folder: Path, adapter: caster.Adapter, short: bool) -> None:
    servers = {"bare": Server(folder, "bare", "--frozen"), "adapted": Server(folder, "adapted")}
    clients = {
        name: [Client(server, f"client {i}") for i in range(2)] for name, server in servers.items()
    }
    taken = [seconds for client in clients["adapted"] for seconds in warm_up(client)]
    print(f"B=64, {len(taken)} batches before the rests: {percentiles(taken)}", flush=True)
    for size in (8, 64):
        data = batches(POOL // size, size, seed=2)
        send(clients["bare"], data, 2)
        # A rest is as long as the stream before it: about 2,300 samples, for both sizes.
        rounds, count = (8, 64 // size) if short else (16, 64 // size)
        rates: dict[str, list[float]] = {name: [] for name in servers}
        answers: dict[str, list[Any]] = {name: [] for name in servers}
        used = dict.fromkeys(servers, 0.0)  # processor seconds
        for _ in range(rounds):
            for name, server in servers.items():
                before = server.metric(CPU)
                rate, found = send(clients[name], data, count)
                used[name] += server.metric(CPU) - before
                rates[name].append(rate)
                answers[name] += found
        for name in servers:
            latencies = percentiles([seconds for seconds, _ in answers[name]])
            rate, cpu = statistics.median(rates[name]), 1000 * used[name] / len(answers[name])
            print(f"B={size} {name}: {rate:.1f} requests/s, {latencies}, {cpu:.1f} ms of processor")
        pairs = zip(rates["adapted"], rates["bare"], strict=True)
        ratio, cheap = statistics.median(a / b for a, b in pairs), used["bare"] / used["adapted"]
        rest = np.mean([reason == b"rest" for _, reason in answers["adapted"]])
        print(
            f"B={size}: {ratio:.0%} of the bare model's requests/s, {cheap:.0%} by processor time; "
            f"{rest:.0%} of batches at rest",
            flush=True,
        )
    for server in servers.values():
        server.kill()


def streams(folder: Path, adapter: caster.Adapter, short: bool) -> None:
    count, rounds, size = 200, 2 if short else 5, 8
    server = Server(folder, "many", "--streams", 256)
    client = triton.InferenceServerClient(server.rpc)
    data = {i: batches(rounds, size, seed=100 + i) for i in range(count)}
    answers: dict[int, list[Any]] = {i: [] for i in range(count)}
    done: queue.Queue[tuple[int, Any, Any, float]] = queue.Queue()

    def answered(i: int, sent: float, result: Any, error: Any) -> None:
        done.put((i, result, error, time.perf_counter() - sent))

    latencies, start = [], time.perf_counter()
    for r in range(rounds):
        for i in range(count):
            parameters = {"stream": f"client {i}", "position": r * size}
            then = partial(answered, i, time.perf_counter())
            client.async_infer("model", inputs(data[i][r]), then, parameters=parameters)
        for _ in range(count):
            i, result, error, seconds = done.get(timeout=600)
            assert error is None, error
            answers[i].append(result)
            latencies.append(seconds)
    elapsed = time.perf_counter() - start
    checked = range(0, count, 20)
    for i in checked:
        for out, found in zip(adapter.stream(data[i]), answers[i], strict=True):
            check(out, found)
    print(
        f"{count} streams at once, B={size}: {count * rounds / elapsed:.1f} requests/s, "
        f"{percentiles(latencies)} with all of them waiting; {len(checked)} streams checked, all "
        f"answers are the library's; {server.memory():.0f} MB"
    )
    server.kill()


def check(out: Any, found: Any) -> None:
    """An answer of the server is the library's."""
    assert found.as_numpy("labels").tolist() == np.asarray(out.labels).tolist()
    probabilities = np.asarray(out.probabilities)
    np.testing.assert_allclose(found.as_numpy("probabilities"), probabilities, atol=1e-5)
    assert found.as_numpy("reason").item().decode() == out.verdict.reason


def hour(folder: Path, adapter: caster.Adapter, short: bool) -> None:
    total, size = 600 if short else 3600, 8
    server = Server(folder, "hour")
    client, data = Client(server, "camera"), batches(POOL // size, size, seed=3)
    memory, start = [], time.perf_counter()
    for i in range(total):
        client(data[i % len(data)])
        if i % 20 == 19:
            memory.append(server.memory())
    minutes = (time.perf_counter() - start) / 60
    quarter = len(memory) // 4
    marks = [statistics.median(memory[k * quarter : (k + 1) * quarter]) for k in range(4)]
    print(
        f"{total:,} batches of {size} in {minutes:.1f} minutes: memory in the four quarters "
        + ", ".join(f"{mark:.0f}" for mark in marks)
        + " MB"
    )
    server.kill()


def kills(folder: Path, adapter: caster.Adapter, short: bool) -> None:
    wanted, size = 5 if short else 30, 8
    server = Server(folder, "killed", "--snapshot-every", 8)
    data = batches(POOL // size, size, seed=4)
    stream = adapter.new_stream()
    expected: list[Any] = []
    rng, killed, repeated, i = random.Random(0), 0, 0, 0
    client, left, timer = Client(server, "camera"), rng.randrange(1, 12), None
    while killed < wanted:
        try:
            found = client(data[i % len(data)], position=i * size)
        except InferenceServerException as error:
            place = re.search(r"is at position (\d+)", str(error))
            if place:  # resumed from its snapshot: repeat from there
                back = int(place[1]) // size
                repeated, i = repeated + i - back, back
                continue
            if timer is None:
                raise
            timer.join()
            killed += 1
            server.start()
            client, left, timer = Client(server, "camera"), rng.randrange(1, 12), None
            continue
        while len(expected) <= i:
            expected.append(stream(data[len(expected) % len(data)]))
        check(expected[i], found)
        i, left = i + 1, left - 1
        if left <= 0 and timer is None:  # while one of the next requests is answered
            timer = threading.Timer(rng.uniform(0, 0.1), server.kill)
            timer.start()
    server.kill()
    print(f"{killed} kills, {i:,} batches, {repeated:,} repeated, all answers are the library's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="|".join(PARTS), default=PARTS)
    parser.add_argument("--short", action="store_true", help="a fraction of the work")
    parser.add_argument("--folder", type=Path, help="keep the model here, or take it from here")
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    print(machine())
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        if (folder / "model.caster").exists():
            model = caster.wrap(str(folder / "model.onnx"))
            adapter = caster.Adapter(model, folder / "model.caster")
        else:
            adapter = write_model(folder)
        for name in ("model.onnx", "model.caster"):
            (Path(temporary) / name).write_bytes((folder / name).read_bytes())
        for part in args.parts:
            globals()[part](Path(temporary), adapter, args.short)


if __name__ == "__main__":
    main()
