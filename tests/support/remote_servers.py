"""Servers on loopback: an S3 store (moto), and a web server that counts the bytes that it sends."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest


@contextmanager
def s3_server() -> Iterator[str]:
    """Yield the endpoint of an S3 store that runs during the block."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


class Received:
    """Counts at the store's server: bytes of request bodies, requests for data, and bytes sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication

        self.nbytes = self.sent = self.requests = 0
        plain = DomainDispatcherApplication.__call__

        def counted(application: Any, environ: Any, answer: Any) -> Any:
            self.nbytes += int(environ.get("CONTENT_LENGTH") or 0)
            parts = [bytes(part) for part in plain(application, environ, answer)]
            if environ["REQUEST_METHOD"] == "GET" and "list-type" not in environ.get(
                "QUERY_STRING", ""
            ):
                self.requests += 1
                self.sent += sum(map(len, parts))
            return parts

        monkeypatch.setattr(DomainDispatcherApplication, "__call__", counted)


class WebServer(ThreadingHTTPServer):
    """Serve `files` by path; `sent` counts the bytes of all answers. Without `ranges` it ignores
    Range headers.

    Each item of `failures` makes one of the next requests fail: a status, ``cut`` (connection lost
    within the body), ``reset`` (no answer), ``short`` (a complete answer that is too short).
    """

    def __init__(self, files: dict[str, bytes], ranges: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.ranges, self.sent = files, ranges, 0
        self.failures: list[int | str] = []

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: a client may hang up early."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def web_server(files: dict[str, bytes], ranges: bool = True) -> Iterator[WebServer]:
    """Run the server during the block."""
    server = WebServer(files, ranges)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: WebServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        data = self.server.files.get(self.path)
        failure = self.server.failures.pop(0) if self.server.failures else None
        if failure == "reset":
            self.close_connection = True
            return
        if isinstance(failure, int):
            self._send(failure, b"", body)
            return
        if data is None:
            self._send(404 if "secret" not in self.path else 403, b"", body)
            return
        byte_range = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if byte_range is None or not self.server.ranges:
            self._send(200, data, body)
            return
        start, last = int(byte_range[1]), min(int(byte_range[2]), len(data) - 1)
        part = data[start : last + 1]
        part, cut = (part[:-1], failure == "cut") if failure in ("short", "cut") else (part, False)
        self._send(
            206, part, body, ("Content-Range", f"bytes {start}-{last}/{len(data)}"), more=int(cut)
        )

    def _send(
        self, status: int, data: bytes, body: bool, *headers: tuple[str, str], more: int = 0
    ) -> None:
        """Send the answer; `more` bytes are promised in its length but never sent."""
        self.close_connection = self.close_connection or bool(more)
        self.send_response(status)
        for name, value in (
            ("Content-Length", str(len(data) + more)),
            ("Accept-Ranges", "bytes"),
            *headers,
        ):
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.server.sent += len(data)  # before sending, because the client may look at once
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass
