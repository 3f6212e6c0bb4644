"""The schema registry, in which consumers look up the schemas of messages by number."""

from __future__ import annotations

import logging
import struct
from urllib.parse import unquote, urlsplit, urlunsplit

from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.error import SchemaRegistryError

from airflow_provider_pgrepl.errors import TargetError, TargetUnavailableError, one_line
from airflow_provider_pgrepl.replication.events.formats.avro import ChangeSchema
from airflow_provider_pgrepl.replication.settings.publisher_sections import SubjectNames
from airflow_provider_pgrepl.trace import log_unexpected

log = logging.getLogger(__name__)

_MAGIC = b"\0"
_TIMEOUT_S = 10.0
_MOST = 10_000
_LOGIN, _NEVER = (401, 403), (404, 409, 422)


class RefusedSchemaError(Exception):
    """The registry permanently rejects a schema. The text says why."""


class SchemaRegistry:
    """A registry with the interface of Confluent's.

    `uri`: `http(s)://user:password@host:port/path`; it is never logged. Raises TargetError for an invalid
    URI.
    """

    def __init__(self, uri: str, names: SubjectNames) -> None:
        configuration = _configuration(uri)
        self._client, self._names = SchemaRegistryClient(configuration), names
        self._where = f"the schema registry at {configuration['url']}"
        self._known: dict[tuple[str, str], bytes] = {}

    def prefix(self, schema: ChangeSchema, topic: str) -> bytes:
        """Return the bytes before a body: the number under which the schema is registered for the topic.

        Raises RefusedSchemaError, TargetError if the login is refused, TargetUnavailableError.
        """
        subject = self._subject(schema, topic)
        known = subject, schema.text
        if known not in self._known:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[known] = _MAGIC + struct.pack(">I", self._register(subject, schema.text))
        return self._known[known]

    def _subject(self, schema: ChangeSchema, topic: str) -> str:
        if self._names == "record":
            return schema.name
        return f"{topic}-value" if self._names == "topic" else f"{topic}-{schema.name}"

    def _register(self, subject: str, text: str) -> int:
        try:
            return self._client.register_schema(subject, Schema(text, "AVRO"))
        except SchemaRegistryError as error:
            status, said = error.http_status_code, one_line(error.error_message or "")
        except Exception as error:  # noqa: BLE001 - its HTTP client's, of many kinds; they may show the URI
            log_unexpected(log, f"asking {self._where}", error, logging.WARNING)
            status, said = 0, type(error).__name__
        if status in _NEVER:
            raise RefusedSchemaError(f"subject {subject}: {self._where} refuses the schema: {said}")
        if status in _LOGIN:
            raise TargetError(
                f"{self._where}: the login was refused, or may not register schemas",
                "look at the registry's connection, and at the rights of its user",
            )
        raise TargetUnavailableError(
            f"{self._where} does not answer: {said}",
            "check that the registry runs. Events wait in the changelog until then",
        )


def _configuration(uri: str) -> dict[str, object]:
    try:
        parts = urlsplit(uri)
        readable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        readable = False
    if not readable:
        raise TargetError(
            "the URI of the schema registry cannot be read",
            "give it as http://host:8081 or https://user:password@host; what is special in a password is"
            " percent-encoded",
        )
    login, _, place = parts.netloc.rpartition("@")
    found: dict[str, object] = {
        "url": urlunsplit((parts.scheme, place, parts.path, "", "")),
        "timeout": _TIMEOUT_S,
        "max.retries": 0,
    }
    if login:
        user, _, password = login.partition(":")
        found["basic.auth.user.info"] = f"{unquote(user)}:{unquote(password)}"
    return found
