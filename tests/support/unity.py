"""Unity Catalog for tests: a stand-in, or a real server where there is one.

Its server is in no package registry that the tests can rely on. So they run against a small double that
holds itself to the source of 0.6.0 (ValidationUtils, NormalizedURL, ColumnUtils, TableRepository, ErrorCode),
and against the real one with its address in PGREPL_TEST_UNITY_URL, and PGREPL_TEST_UNITY_TOKEN when it has
logins. When this was written, all tests passed with both.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote
from urllib.request import Request, urlopen

URL_VARIABLE, TOKEN_VARIABLE = "PGREPL_TEST_UNITY_URL", "PGREPL_TEST_UNITY_TOKEN"
_API = "/api/2.1/unity-catalog/"
_NAME = re.compile(r"[a-zA-Z0-9_@-]{1,255}")
_NO_URI = re.compile(r"[^!-~]|[<>\"{}|\\^`]|%(?![0-9A-Fa-f]{2})")
_PRIMITIVES = (
    "boolean byte short integer long float double date timestamp timestamp_ntz string binary variant"
)
_PARENTS = {"catalogs": (), "schemas": ("catalog_name",), "tables": ("catalog_name", "schema_name")}


class Unity:
    """A server, and a catalog in it of the test's own. Its requests do not use the code under test."""

    def __init__(self, url: str, token: str | None, catalog: str) -> None:
        self.url, self.token, self.catalog = url, token, catalog
        self.ask("POST", "catalogs", {"name": catalog})

    def table(self, name: str) -> dict[str, Any]:
        """Return a table by schema and name. Raises HTTPError if it does not exist."""
        return self.ask("GET", f"tables/{self.catalog}.{name}")

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        with urlopen(Request(self.url + _API + path, content, headers, method=method), timeout=60) as answer:
            return {} if method == "DELETE" else json.loads(answer.read())

    def tables(self, schema: str) -> set[str]:
        found = self.ask("GET", f"tables?catalog_name={self.catalog}&schema_name={schema}")
        return {one["name"] for one in found["tables"]}


@contextmanager
def running_unity() -> Iterator[Unity]:
    """Yield a server with logins, unless it is a real one without."""
    if url := os.environ.get(URL_VARIABLE):
        yield Unity(url, os.environ.get(TOKEN_VARIABLE), _any_name())
        return
    with stand_in() as unity:
        yield unity


@contextmanager
def stand_in(*, has_delta_api: bool = True) -> Iterator[Unity]:
    """Yield the stand-in. Without `has_delta_api` it acts as servers before 0.5."""
    server = _StandIn(("127.0.0.1", 0), _Handler)
    server.has_delta_api = has_delta_api
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield Unity(f"http://127.0.0.1:{server.server_port}", server.token, _any_name())
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _any_name() -> str:
    return f"test_{uuid.uuid4().hex[:12]}"


class _RefusedError(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class _StandIn(ThreadingHTTPServer):
    """The stand-in's server, which holds the registered objects by kind and full name."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.token, self.has_delta_api = uuid.uuid4().hex, True
        self.found: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in _PARENTS}

    def one(self, kind: str, name: str) -> dict[str, Any]:
        self.parents(kind, name.split(".")[:-1])
        if name not in self.found[kind]:
            raise self.missing(kind, name)
        return self.found[kind][name]

    def parents(self, kind: str, names: list[str]) -> None:
        """Raise an error for the outermost missing parent, as the server does."""
        for depth, parent in enumerate(list(_PARENTS)[: len(_PARENTS[kind])], 1):
            name = ".".join(names[:depth])
            if name not in self.found[parent]:
                raise self.missing(parent, name)

    def change(self, name: str, asked: dict[str, Any]) -> dict[str, Any]:
        """Apply the updates of the Delta API that are used, as DeltaUpdateTableMapper and ColumnUtils do."""
        table = self.one("tables", name)
        if asked["requirements"] != [{"type": "assert-table-uuid", "uuid": table["table_id"]}]:
            raise _RefusedError(409, "UPDATE_REQUIREMENT_CONFLICT", "assert-table-uuid")
        wanted = {one["action"]: one for one in asked["updates"]}
        parts = wanted["set-partition-columns"]["partition-columns"]
        columns = []
        for place, field in enumerate(wanted["set-columns"]["columns"]["fields"]):
            _check_type(field["type"], "element-type", "key-type", "value-type")
            column = {"name": field["name"], "nullable": field["nullable"], "position": place}
            column |= {"comment": field["metadata"].get("comment"), "type_text": _text(field["type"])}
            if field["name"] in parts:
                column["partition_index"] = parts.index(field["name"])
            columns.append(column)
        table["columns"], table["updated_at"] = columns, time.time_ns()
        table["comment"] = wanted.get("set-table-comment", table)["comment"]
        return {}

    def missing(self, kind: str, name: str) -> _RefusedError:
        word = kind.removesuffix("s")
        return _RefusedError(404, f"{word.upper()}_NOT_FOUND", f"{word.title()} not found: {name}")

    def add(self, kind: str, what: dict[str, Any]) -> dict[str, Any]:
        if not _NAME.fullmatch(what["name"]):
            raise _invalid("Name cannot contain a period, space, forward-slash, or control characters")
        parents = [what[key] for key in _PARENTS[kind]]
        made = _checked_table(what) if kind == "tables" else dict(what)
        self.parents(kind, parents)
        name = ".".join([*parents, what["name"]])
        if name in self.found[kind]:
            word = kind.removesuffix("s")
            raise _RefusedError(
                400, f"{word.upper()}_ALREADY_EXISTS", f"{word.title()} already exists: {name}"
            )
        made["table_id" if kind == "tables" else "id"] = str(uuid.uuid4())
        self.found[kind][name] = made
        return made


def _invalid(message: str) -> _RefusedError:
    return _RefusedError(400, "INVALID_ARGUMENT", message)


def _checked_table(what: dict[str, Any]) -> dict[str, Any]:
    location = what["storage_location"]
    if _NO_URI.search(location):
        raise _invalid(f"Unsupported path: {location}")
    if not location.startswith(("file:/", "s3://", "/")):
        raise _invalid(f"Unsupported URI scheme: {location.split(':')[0]}")
    for column in what["columns"]:
        _check_column(column, what["data_source_format"])
    columns = [{**column, "type_text": column["type_text"].lower()} for column in what["columns"]]
    path = "/" + location.removeprefix("file:").strip("/")
    place = location.rstrip("/") if location.startswith("s3:") else f"file://{path}"
    return {"comment": None, **what, "columns": columns, "storage_location": place}


def _check_column(column: dict[str, Any], table_format: str) -> None:
    field = json.loads(column["type_json"])
    if (field["name"], field["nullable"]) != (column["name"], column["nullable"]):
        raise _invalid(f"Invalid type_json for column {column['name']}")
    if table_format == "DELTA":
        _check_type(field["type"])


def _text(kind: Any) -> str:
    """Return a type of the Delta API as toCatalogString spells it."""
    if isinstance(kind, str):
        return {"long": "bigint", "integer": "int", "short": "smallint", "byte": "tinyint"}.get(kind, kind)
    if kind["type"] == "struct":
        inner = [f"{field['name']}:{_text(field['type'])}" for field in kind["fields"]]
    else:
        inner = [_text(kind[key]) for key in ("element-type", "key-type", "value-type") if key in kind]
    return f"{kind['type']}<{','.join(inner)}>"


def _check_type(
    kind: Any, element: str = "elementType", key: str = "keyType", value: str = "valueType"
) -> None:
    if isinstance(kind, str):
        if kind not in _PRIMITIVES.split() and not re.fullmatch(r"decimal\(\d+,\d+\)", kind):
            raise _invalid(f"Unsupported Delta primitive type: {kind}")
        return
    for name in {"array": (element,), "map": (key, value), "struct": ()}[kind["type"]]:
        _check_type(kind[name], element, key, value)
    for field in kind.get("fields", ()):
        _check_type(field["type"], element, key, value)


class _Handler(BaseHTTPRequestHandler):
    server: _StandIn

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def log_message(self, *_: Any) -> None:
        """Log nothing: a test's output is its own."""

    def _get(self, kind: str, name: str) -> dict[str, Any]:
        if kind not in _PARENTS:
            self._known(kind)
            return {"endpoints": [], "protocol-version": "1.0"}
        if name:
            return self.server.one(kind, name)
        given = dict(pair.split("=") for pair in self.path.split("?")[1].split("&"))
        within = f"{given['catalog_name']}.{given['schema_name']}."
        found = self.server.found["tables"]
        return {"tables": [table for name, table in found.items() if name.startswith(within)]}

    def _post(self, kind: str, name: str) -> dict[str, Any]:
        body = self._body()
        if kind in _PARENTS:
            return self.server.add(kind, body)
        self._known(kind)
        _, _, catalog, _, schema, _, table = name.split("/")
        return self.server.change(f"{catalog}.{schema}.{table}", body)

    def _known(self, kind: str) -> None:
        if kind != "delta" or not self.server.has_delta_api:
            raise _RefusedError(500, "INTERNAL", "Couldn't unwrap service.")

    def _delete(self, kind: str, name: str) -> None:
        self.server.one(kind, name)
        del self.server.found[kind][name]

    def _body(self) -> dict[str, Any]:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, work: Any) -> None:
        try:
            status, said = 200, work(*self._asked())
        except _RefusedError as refused:
            status, said = refused.status, {"error_code": refused.code, "message": str(refused)}
        content = b"200 OK" if said is None else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _asked(self) -> tuple[str, str]:
        if self.headers["Authorization"] != f"Bearer {self.server.token}":
            raise _RefusedError(401, "UNAUTHENTICATED", "Invalid access token.")
        kind, _, name = self.path.split("?")[0].removeprefix(_API).partition("/")
        return kind, unquote(name)
