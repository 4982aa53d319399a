"""A small web server on this machine, with the faults of large ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Serve `content`; `breaks` are numbers of bytes after which it hangs up, one per request."""

    daemon_threads = True

    def __init__(self, content: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = content
        self.breaks: list[int] = []
        self.ranges = True  # whether it supports them
        self.counted = True  # whether it says how long a file is
        self.shift = 0  # bytes by which it goes on at the wrong place
        self.asked: list[str | None] = []  # the ranges of the requests

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        content = self.server.content.get(self.path[1:])
        wanted = self.headers["Range"]
        self.server.asked.append(wanted)
        if content is None:
            self.send_error(404)
            return
        start = 0
        if wanted and self.server.ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self.send_error(416)
                return
            start += self.server.shift
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        if self.server.counted:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        stop = self.server.breaks.pop(0) if self.server.breaks else len(content)
        with suppress(ConnectionError):  # the other side was stopped
            self.wfile.write(content[start : start + stop])

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(content: dict[str, bytes]) -> Iterator[Server]:
    server = Server(content)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
