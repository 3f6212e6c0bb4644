"""catalogs/unity_client.py: what a server may answer becomes a helpful sentence; the token stays with it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import ConfigError, LakeError, LakeUnavailableError
from airflow_provider_pgrepl.replication.catalogs.unity_client import (
    NoUnityError,
    UnityRequestError,
    UnityServer,
    UnityTemporaryError,
)

TOKEN = "s3cret-token"


class Answering(HTTPServer):
    """A server that gives every request the same answer, and keeps the requests."""

    status, content, more = 200, b"{}", {}

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.sent: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Answering

    def do_GET(self) -> None:
        self.server.sent.append(dict(self.headers) | {"path": self.path})
        self.send_response(self.server.status)
        for name, value in {"Content-Length": str(len(self.server.content)), **self.server.more}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(self.server.content)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@contextmanager
def answering(status: int, content: bytes = b"{}", **more: str) -> Iterator[Answering]:
    server = Answering()
    server.status, server.content, server.more = status, content, more
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def said(code: str, message: str) -> bytes:
    return json.dumps({"error_code": code, "message": message}).encode()


@pytest.mark.parametrize(
    ("status", "content", "kind", "sentence", "hint"),
    [
        (401, said("UNAUTHENTICATED", "no"), LakeError, "does not know the token: no", "UNITY_CATALOG_TOKEN"),
        (403, said("PERMISSION_DENIED", "Access denied."), UnityRequestError, "a right is missing", "grant"),
        (400, said("INVALID_ARGUMENT", f"of {TOKEN}"), UnityRequestError, r"status 400: of \*\*\*$", ""),
        (404, b"Status: 404", NoUnityError, "is not Unity Catalog: status 404", "own address"),
        (
            409,
            b'{"error": {"message": "not this table", "type": "UpdateConflict", "code": 409}}',
            UnityRequestError,
            "status 409: not this table",
            "",
        ),
        (200, b"<html>", NoUnityError, "is not Unity Catalog", "own address"),
        (500, said("INTERNAL", "out of\nmemory"), UnityTemporaryError, r"500: out of\\nmemory", "again"),
        (503, b"", UnityTemporaryError, "failed with status 503", "again"),
        (429, b"", UnityTemporaryError, "failed with status 429", "again"),
    ],
)
def test_each_answer_is_told_for_what_it_is(status, content, kind, sentence, hint) -> None:
    with answering(status, content) as server, pytest.raises(LakeError, match=sentence) as refused:
        UnityServer(server.url, TOKEN).find("tables", "a.b.c")
    assert type(refused.value) is kind
    assert hint in refused.value.hint
    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize(
    ("status", "content", "has"),
    [
        (200, b'{"endpoints": []}', True),
        (404, b"Status: 404", False),
        (500, said("INTERNAL", "Couldn't unwrap service."), False),
    ],
)
def test_a_server_has_the_delta_api_or_has_none(status, content, has) -> None:
    with answering(status, content) as server:
        assert UnityServer(server.url, TOKEN).has_delta_api("main") is has


@pytest.mark.parametrize(
    ("status", "content"),
    [
        (503, b""),
        (500, said("INTERNAL", "connection is not available, request timed out")),
        (403, said("PERMISSION_DENIED", "no")),
        (200, b"<html>"),
    ],
)
def test_a_server_in_trouble_is_not_taken_for_an_older_one(status, content) -> None:
    """The table would be deleted and made again, without the grants on it."""
    with answering(status, content) as server, pytest.raises(LakeError):
        UnityServer(server.url, TOKEN).has_delta_api("main")


def test_finding_missing_object_returns_none_and_url_encodes_name() -> None:
    with answering(404, said("TABLE_NOT_FOUND", "Table not found")) as server:
        assert UnityServer(f"{server.url}/api/2.1/unity-catalog/").find("tables", "a b.c?d.e#f") is None
    assert server.sent[0]["path"] == "/api/2.1/unity-catalog/tables/a%20b.c%3Fd.e%23f"
    assert "Authorization" not in server.sent[0]


def test_a_token_does_not_follow_to_another_server() -> None:
    with answering(200) as other, answering(302, Location=other.url) as server:
        with pytest.raises(LakeError, match="is not Unity Catalog: status 302"):
            UnityServer(server.url, TOKEN).find("tables", "a.b.c")
        assert server.sent[0]["Authorization"] == f"Bearer {TOKEN}"
        assert other.sent == []


def test_a_server_that_is_not_there_may_come_back() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(LakeUnavailableError, match=r"cannot be reached: .*refused"):
            UnityServer(f"http://127.0.0.1:{taken.getsockname()[1]}").find("tables", "a.b.c")


@pytest.mark.parametrize(
    "url", ["", "localhost:8080", "file:///etc/passwd", "http://", "http://host:port", "http://host/?x=1"]
)
def test_malformed_server_url_is_rejected(url: str) -> None:
    with pytest.raises(ConfigError, match="not the URL of a server"):
        UnityServer(url)


def test_a_login_in_the_address_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        UnityServer("http://me:s3cret@host:8080")
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("token", ["", "s3cret\n", "s3 cret", "s3crét"])
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ConfigError, match="the token") as refused:
        UnityServer("http://host:8080", token)
    assert "cret" not in str(refused.value)
