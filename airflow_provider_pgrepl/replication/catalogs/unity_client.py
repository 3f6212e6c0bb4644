"""A client of the REST API of a Unity Catalog server, built on Python's standard library alone.

Source: api/all.yaml and ErrorCode.java of https://github.com/unitycatalog/unitycatalog at 0.6.0.
"""

from __future__ import annotations

import json
import re
from http import HTTPStatus
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from airflow_provider_pgrepl.errors import ConfigError, LakeError, LakeUnavailableError, one_line

TOKEN_VARIABLE = "UNITY_CATALOG_TOKEN"  # noqa: S105 - where it is found

Answer = dict[str, Any]
_API = "/api/2.1/unity-catalog"
_TIMEOUT_S = 60
_MOST_SAID = 300
_RIGHTS = (
    "grant the token's user USE CATALOG and CREATE SCHEMA on the catalog, USE SCHEMA and CREATE TABLE on its"
    " schemas, and CREATE EXTERNAL TABLE on the lake's external location"
)
_TOKEN = re.compile(r"[!-~]+")
_UNKNOWN_PATH = "Couldn't unwrap service"
_MAY_PASS = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)


class UnityRequestError(LakeError):
    """A valid request that the server rejected. `code`: the server's error code, empty if it sent none."""

    def __init__(self, message: str, hint: str = "", code: str = "") -> None:
        super().__init__(message, hint)
        self.code = code


class NoUnityError(LakeError):
    """An answer that is not Unity Catalog's, or is from a server that does not know the path. `status`: the
    HTTP status, 0 if the request succeeded."""

    def __init__(self, message: str, hint: str = "", status: int = 0) -> None:
        super().__init__(message, hint)
        self.status = status


class UnityTemporaryError(LakeUnavailableError):
    """An HTTP status that may be temporary: 5xx, 408 or 429."""

    def __init__(self, message: str, hint: str = "", status: int = 0) -> None:
        super().__init__(message, hint)
        self.status = status


class UnityServer:
    """A Unity Catalog server and the token for it, None for a server without logins."""

    def __init__(self, url: str, token: str | None = None) -> None:
        """Raise ConfigError if `url` is not the URL of a server, or if the token cannot be sent in a
        header."""
        self.url = _checked_url(url)
        if token is not None and not _TOKEN.fullmatch(token):
            raise ConfigError(
                "the token of Unity Catalog is empty, or has characters that a token cannot have",
                f"look for a line's end in {TOKEN_VARIABLE}, or unset it for a server without logins",
            )
        self._token = token
        self._opener = build_opener(_NoRedirect)

    def find(self, kind: str, name: str) -> Answer | None:
        """Return a catalog, schema or table by its full name, or None if there is none. Raises as `_ask`
        does."""
        try:
            return self._ask("GET", f"{kind}/{quote(name)}")
        except UnityRequestError as error:
            if error.code.endswith("NOT_FOUND"):
                return None
            raise

    def create(self, kind: str, what: Answer) -> None:
        """Create a catalog object of this kind. Raises as `_ask` does."""
        self._ask("POST", kind, what)

    def has_delta_api(self, catalog: str) -> bool:
        """Return True if the server has the Delta API, which can change tables (since 0.5). Raises as `_ask`
        does, except for a path that the server does not know."""
        asked = urlencode({"catalog": catalog, "protocol-versions": "1.0"})
        try:
            return "endpoints" in self._ask("GET", f"delta/v1/config?{asked}")
        except UnityTemporaryError as error:
            # A server with logins answers with status 500 to a path that it does not know.
            if error.status != HTTPStatus.INTERNAL_SERVER_ERROR or _UNKNOWN_PATH not in error.message:
                raise
        except UnityRequestError as error:
            if not error.code.endswith("NOT_FOUND"):
                raise
        except LakeUnavailableError:
            raise
        except NoUnityError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
        return False

    def change(self, catalog: str, schema: str, table: str, changes: Answer) -> None:
        """Change a table with the server's Delta API. Raises as `_ask` does."""
        path = "/".join(map(quote, (catalog, "schemas", schema, "tables", table)))
        self._ask("POST", f"delta/v1/catalogs/{path}", changes)

    def delete(self, kind: str, name: str) -> None:
        """Delete a catalog object of this kind. Raises as `_ask` does."""
        self._ask("DELETE", f"{kind}/{quote(name)}")

    def _ask(self, method: str, path: str, body: Answer | None = None) -> Answer:
        """Send a request and return the answer; an empty one for DELETE. Raises UnityRefusalError if the
        server rejects the request, LakeUnavailableError if the server cannot be reached or answers with a
        status that may be temporary, and LakeError if it rejects the token or is not Unity Catalog."""
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        content = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.url}{_API}/{path}", content, headers, method=method)  # noqa: S310 - checked
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                content = answer.read()
        except HTTPError as error:
            with error:
                raise self._refusal(error) from None
        except (OSError, HTTPException) as error:
            raise LakeUnavailableError(
                f"Unity Catalog at {self.url} cannot be reached: {self._plain(str(error))}",
                "look whether its server runs there, and whether this host may connect to it",
            ) from None
        # The answer to DELETE is null, empty or text, depending on the server's version.
        return {} if method == "DELETE" else self._read(content)

    def _read(self, content: bytes) -> Answer:
        try:
            answer = json.loads(content)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._no_catalog()
        return answer

    def _no_catalog(self, status: int = 0) -> NoUnityError:
        return NoUnityError(
            f"what answers at {self.url} is not Unity Catalog{f': status {status}' if status else ''}",
            "give the server's own address, as http://localhost:8080",
            status,
        )

    def _refusal(self, error: HTTPError) -> LakeError:
        said, code = self._said(error)
        if error.code == HTTPStatus.UNAUTHORIZED:
            return LakeError(
                f"Unity Catalog at {self.url} does not know the token{said}"
                if self._token
                else f"Unity Catalog at {self.url} asks for a token{said}",
                f"set {TOKEN_VARIABLE} to a valid token",
            )
        if error.code == HTTPStatus.FORBIDDEN:
            text = f"Unity Catalog at {self.url} rejects the request: a right is missing{said}"
            return UnityRequestError(text, _RIGHTS, code)
        if error.code >= HTTPStatus.INTERNAL_SERVER_ERROR or error.code in _MAY_PASS:
            return UnityTemporaryError(
                f"Unity Catalog at {self.url} failed with status {error.code}{said}",
                "read the log of Unity Catalog for the cause, then run the command again",
                error.code,
            )
        if not code:
            return self._no_catalog(error.code)
        text = f"Unity Catalog at {self.url} rejects the request with status {error.code}{said}"
        return UnityRequestError(text, code=code)

    def _said(self, error: HTTPError) -> tuple[str, str]:
        """Return the server's message, to be appended to the error's text, and its error code. Both are empty
        if the answer cannot be read."""
        try:
            answer = json.loads(error.read())
            # The Delta API nests the error.
            one = answer.get("error", answer)
            said, code = str(one["message"]), str(one["type"] if "error" in answer else one["error_code"])
        except (OSError, HTTPException, ValueError, TypeError, KeyError, AttributeError):
            return "", ""
        return f": {self._plain(said)}", code

    def _plain(self, text: str) -> str:
        text = text.replace(self._token, "***") if self._token else text
        return one_line(text[:_MOST_SAID])


class _NoRedirect(HTTPRedirectHandler):
    """A handler that follows no redirect: urllib would send the token to the redirect's target."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        known = False
    if not known or parts.query or parts.fragment:
        raise ConfigError(
            "the address of Unity Catalog is not the URL of a server", "write it as http://localhost:8080"
        )
    if "@" in parts.netloc:
        raise ConfigError(
            "the address of Unity Catalog holds a login, which others can read there",
            f"leave it out, and set {TOKEN_VARIABLE}",
        )
    return url.rstrip("/").removesuffix(_API)
