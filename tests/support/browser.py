"""A real browser: headless Chromium, driven through its debugging pipe, and pages for it."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.packages import installed

RUNTIME = "onnxruntime-web@1.30.0"
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # root has none, nor has a container; the pages are our own
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--enable-unsafe-webgpu",
    "--use-webgpu-adapter=swiftshader",
)
SECONDS = 60.0
HAS_WEBGPU = "navigator.gpu?.requestAdapter().then(Boolean)"


@cache
def onnxruntime_web() -> Path:
    """The folder of onnxruntime-web's modules: $ONNXRUNTIME_WEB, or npm's package, cached."""
    given = os.environ.get("ONNXRUNTIME_WEB")
    if given:
        return Path(given)
    npm = ["npm", "install", "--ignore-scripts", "--prefix"]
    folder = installed("ONNX Runtime for browsers", RUNTIME, npm)
    return folder / "node_modules" / "onnxruntime-web" / "dist"


class Handler(SimpleHTTPRequestHandler):
    """Serve a folder, onnxruntime-web under /ort/, and an empty page; isolated, for threads."""

    extensions_map = {  # noqa: RUF012 as in the base class
        **SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def translate_path(self, path: str) -> str:
        name = urlsplit(path).path
        if name.startswith("/ort/"):
            return str(onnxruntime_web() / Path(name).name)
        return super().translate_path(path)

    def do_GET(self) -> None:
        if self.path != "/blank":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b'<!DOCTYPE html><link rel="icon" href="data:,">')

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving_folder(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine and yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


class Page:
    """One page of a browser: `errors` are those it logged, threw, or met while loading."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._buffer = b""
        self._sent = 0
        self._session: dict[str, str] = {}
        self.errors: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, seconds: float = SECONDS, **params: Any) -> Any:
        """Call a method of the DevTools protocol and wait for its result."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": params, **self._session}
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + seconds
        while (answer := self._receive(deadline, method)).get("id") != self._sent:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, url: str) -> None:
        """Open a page and wait until it is parsed."""
        self.send("Page.navigate", url=url)
        self.evaluate(
            "document.readyState === 'loading'"
            " && new Promise(done => addEventListener('DOMContentLoaded', () => done()))"
        )

    def evaluate(self, expression: str, seconds: float = SECONDS) -> Any:
        """The JSON value of an expression, or of the promise it returns."""
        options = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        result = self.send("Runtime.evaluate", seconds, expression=expression, **options)
        if "exceptionDetails" in result:
            raise RuntimeError(_thrown(result["exceptionDetails"]))
        return result["result"].get("value")

    def wait_for(self, condition: str, seconds: float = SECONDS) -> None:
        """Wait until an expression is true; fail at once if the page reports an error."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({condition})"):
            assert not self.errors, self.errors
            assert time.monotonic() < deadline, f"still false after {seconds} s: {condition}"
            time.sleep(0.05)

    def resize(self, width: int, height: int, scale: float = 1.0, dark: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, whole: bool = True) -> bytes:
        """The page as a PNG file."""
        taken = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(taken["data"])

    def _receive(self, deadline: float, method: str) -> Any:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reads], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no answer from the browser to {method}; it saw {self.errors}")
            received = os.read(self._reads, 1 << 20)
            if not received:
                raise RuntimeError(f"the browser stopped during {method}")
            self._buffer += received
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: Any) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(_thrown(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.errors.append(" ".join(str(arg.get("value", arg)) for arg in params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


def _thrown(details: Any) -> str:
    return details.get("exception", {}).get("description") or details["text"]


@contextmanager
def browsing() -> Iterator[Page]:
    """Start Chromium with an empty page, or skip the test if there is none."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("no chromium on the PATH to open a page with")
    to_browser, writes = os.pipe()
    reads, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The protocol is spoken on the descriptors 3 and 4.
        script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", chromium, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Page(reads, writes)
        finally:
            os.close(writes)  # the browser ends with its pipe
            os.close(reads)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
