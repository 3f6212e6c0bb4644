"""A proxy to an S3 store that counts, delays and rejects requests, and loses answers."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import unquote

Fault = Literal[
    "throttled",
    "cut",
    "answer lost",
    "gone",
    "ExpiredToken",
    "RequestTimeTooSkewed",
    "AccessDenied",
    "InvalidObjectState",
]
"""503 SlowDown; the line is cut in the middle of the request; done, but 500 is answered; the line is cut at
once; an answer of S3's."""
CODES = {"ExpiredToken": 400, "RequestTimeTooSkewed": 403, "AccessDenied": 403, "InvalidObjectState": 403}
_TIMEOUT_S = 60
_ERROR = '<?xml version="1.0"?><Error><Code>{}</Code><Message>a fault of the test</Message></Error>'


@dataclass(frozen=True)
class Asked:
    """A request: its method, and its path with the query."""

    method: str
    path: str

    @property
    def is_commit(self) -> bool:
        """Return True if the request writes a version of a Delta table's log."""
        path = unquote(self.path)
        return self.method == "PUT" and "/_delta_log/" in path and path.endswith(".json")


class FaultyStore:
    """A proxy to a server on this host, with configurable delays and faults."""

    def __init__(self, server_port: int) -> None:
        self.server_port = server_port
        self.delay_s = 0.0
        """Added to each request."""
        self.drops_conditions = False
        """Act as a store without If-None-Match. Requests are signed, so the answer is changed instead."""
        self.fault: Callable[[Asked], Fault | None] = lambda _: None
        self.asked: Counter[Asked] = Counter()
        self.faults: Counter[Fault] = Counter()
        self.named: set[tuple[str, str]] = set()
        """The libraries that sent requests, and how each identified itself."""
        self.lock = threading.Lock()
        store = self

        class Handler(_Handler):
            faulty = store

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def next(self, fault: Fault, times: int = 1, when: Callable[[Asked], bool] = lambda _: True) -> None:
        """Let the next `times` requests that match `when` fail; all later ones pass."""
        left = [fault] * times

        def choose(asked: Asked) -> Fault | None:
            return left.pop() if left and when(asked) else None

        self.fault = choose

    def begin(self, asked: Asked) -> Fault | None:
        """Count a request, and return the fault that it gets, or None."""
        time.sleep(self.delay_s)
        with self.lock:
            self.asked[asked] += 1
            fault = self.fault(asked)
            if fault is not None:
                self.faults[fault] += 1
            return fault


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: a client may be killed, or close its connection."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body in one packet: otherwise each answer waits for an acknowledgement.
    wbufsize = 1 << 16
    faulty: FaultyStore

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _handle(self) -> None:
        library = self.headers.get("User-Agent", "").partition("/")[0]
        self.faulty.named.add((library, self.headers.get("Authorization", "").partition(" ")[0]))
        fault = self.faulty.begin(Asked(self.command, self.path))
        if fault == "cut":
            self.rfile.read(int(self.headers.get("Content-Length") or 2) // 2)
            self._cut()
            return
        body = b"".join(self._body())
        if fault == "gone":
            self._cut()
        elif fault in CODES:
            self._answer_error(CODES[fault], fault)
        elif fault == "throttled":
            self._answer_error(503, "SlowDown")
        else:
            self._forward(body, fault)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle  # noqa: N815 - http.server's names

    def _body(self) -> Iterator[bytes]:
        """Yield the body as it was received, each chunk with its length."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            yield self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return
        length = -1
        while length != 0:
            line = self.rfile.readline()
            length = int(line.split(b";")[0], 16)
            yield line + (self.rfile.read(length + 2) if length else b"")
        while (trailer := self.rfile.readline()) not in (b"\r\n", b""):
            yield trailer
        yield b"\r\n"

    def _forward(self, body: bytes, fault: Fault | None) -> None:
        line = http.client.HTTPConnection("127.0.0.1", self.faulty.server_port, timeout=_TIMEOUT_S)
        try:
            line.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "expect":
                    line.putheader(name, value)
            line.endheaders(body)
            answer = line.getresponse()
            content = answer.read()
        finally:
            line.close()
        if answer.status == HTTPStatus.PRECONDITION_FAILED and self.faulty.drops_conditions:
            answer.status, content = HTTPStatus.OK, b""
            answer.headers["ETag"] = '"dropped"'
        if fault == "answer lost":
            self._answer_error(500, "InternalError")
            return
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(content)

    def _answer_error(self, status: int, code: str) -> None:
        content = b"" if self.command == "HEAD" else _ERROR.format(code).encode()
        self.send_response_only(status)
        if content:
            self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _cut(self) -> None:
        self.close_connection = True
        self.connection.close()


@contextmanager
def faulty_store(server_port: int) -> Iterator[FaultyStore]:
    store = FaultyStore(server_port)
    try:
        yield store
    finally:
        store.close()
