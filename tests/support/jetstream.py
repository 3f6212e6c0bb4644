"""A real NATS server with JetStream for tests, and a consumer of creek's wire with another decoder."""

from __future__ import annotations

import asyncio
import io
import json
import os
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastavro
import nats
import pytest
from nats.js.errors import NotFoundError

from airflow_provider_pgrepl.replication.avro.codec import fingerprint_text
from airflow_provider_pgrepl.replication.creek.wire import unframed
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from demo.nats import NatsServer, program

_REQUIRED = "PGREPL_REQUIRE_DEBIAN"
_WHY = "needs NATS: sh setup/nats.sh, or apt-get install nats-server"


@contextmanager
def running_nats(settings: str = "") -> Iterator[NatsServer]:
    """A private server. Skips the test where NATS is missing, unless it is required."""
    if program() is None:
        assert not os.environ.get(_REQUIRED), _WHY
        pytest.skip(_WHY)
    with tempfile.TemporaryDirectory(prefix="pgrepl-test-nats-") as folder:
        server = NatsServer(Path(folder), settings)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@dataclass(frozen=True)
class CreekMessage:
    """A message of the stream of changes, decoded by fastavro with the schema that the consumer requested."""

    subject: str
    headers: dict[str, str]
    value: dict[str, Any]

    @property
    def id(self) -> str:
        return self.headers["Pgrepl-Id"]

    @property
    def generation(self) -> int:
        id_, _, generation = self.headers["Nats-Msg-Id"].rpartition("-")
        assert id_ == self.id
        return int(generation)

    @property
    def position(self) -> EventPosition:
        return EventPosition.parse(self.id)

    @property
    def stamp(self) -> int:
        return int(LSN.parse(self.value["source"]["lsn"]))

    @property
    def op(self) -> str:
        return str(self.value["op"])


class CreekStream:
    """The streams of one database in a server, read from the beginning at each `take`."""

    def __init__(self, uri: str, database: str, namespace: str = "CREEK") -> None:
        self._uri = uri
        self.wal, self.schema = f"{namespace}_wal_{database}", f"{namespace}_schema_{database}"

    def messages(self) -> list[CreekMessage]:
        """Return all messages of the stream of changes, decoded with the schemas of the schema stream."""
        return self.decoded(self.raw(self.wal))

    def decoded(self, raw: list[Any]) -> list[CreekMessage]:
        """Messages of the stream of changes."""
        schemas = {
            fields["fingerprint"]: fastavro.parse_schema(json.loads(fields["schema"]))
            for fields in self.schemas()
        }
        return [
            CreekMessage(one.subject, dict(one.headers or {}), _decode(unframed([one.data]), schemas))
            for one in raw
        ]

    def schemas(self) -> list[dict[str, Any]]:
        return [json.loads(unframed([one.data])) for one in self.raw(self.schema) if len(one.data) > 6]

    def raw(self, stream: str) -> list[Any]:
        """The messages of a stream as they are."""
        return self._run(_all(self._uri, stream))

    def is_read(self, stream: str, subject: str) -> bool:
        """Return True if the server has a consumer of this subject alone."""

        async def look(client: Any) -> bool:
            found = await client.jetstream().consumers_info(stream)
            return any(one.config.filter_subject == subject for one in found)

        return bool(self._run(_with_client(self._uri, look)))

    def newest(self, stream: str, subject: str) -> CreekMessage | None:
        """The newest message of a subject; None if there is none."""

        async def look(client: Any) -> list[Any]:
            try:
                return [await client.jetstream().get_last_msg(stream, subject)]
            except NotFoundError:
                return []

        found = self.decoded(self._run(_with_client(self._uri, look)))
        return found[0] if found else None

    def ask(self, fingerprint: str) -> dict[str, Any]:
        """The schema of a fingerprint, from the publisher itself."""

        answer = self._run(
            _with_client(
                self._uri, lambda client: client.request(self.schema, fingerprint.encode(), timeout=10)
            )
        )
        found: dict[str, Any] = json.loads(answer.data)
        return found

    def make(self, name: str = "", **settings: Any) -> None:
        """Make a stream as another program would; by default the stream of changes."""
        name = name or self.wal

        given = {"name": name, "subjects": [f"{name}.>"], **settings}
        self._run(_with_client(self._uri, lambda client: client.jetstream().add_stream(**given)))

    def change(self, **settings: Any) -> None:
        """Give the stream of changes other settings."""
        given = {"name": self.wal, "subjects": [f"{self.wal}.>"], **settings}
        self._run(_with_client(self._uri, lambda client: client.jetstream().update_stream(**given)))

    def purge(self) -> None:
        self._run(_with_client(self._uri, lambda client: client.jetstream().purge_stream(self.wal)))

    def delete(self) -> None:
        """Delete the stream of changes."""
        self._run(_with_client(self._uri, lambda client: client.jetstream().delete_stream(self.wal)))

    def put(self, subject: str, data: bytes, reply: str = "") -> None:
        """Publish a message, as any client may."""
        self._run(_with_client(self._uri, lambda client: client.publish(subject, data, reply=reply)))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(work)


async def _with_client(uri: str, work: Callable[[Any], Awaitable[Any]]) -> Any:
    client = await nats.connect(uri)
    try:
        found = await work(client)
        await client.flush()
        return found
    finally:
        await client.close()


async def _all(uri: str, stream: str) -> list[Any]:
    client = await nats.connect(uri)
    try:
        jetstream = client.jetstream()
        try:
            left = (await jetstream.stream_info(stream)).state.messages
        except NotFoundError:
            return []
        found = []
        if left:
            subscription = await jetstream.subscribe(">", stream=stream, ordered_consumer=True)
        while left:
            found.append(await subscription.next_msg(timeout=10))
            left = found[-1].metadata.num_pending
        return found
    finally:
        await client.close()


def _decode(payload: bytes, schemas: dict[str, Any]) -> dict[str, Any]:
    assert payload[:2] == b"\xc3\x01"
    stream = io.BytesIO(payload[10:])
    found: dict[str, Any] = fastavro.schemaless_reader(stream, schemas[fingerprint_text(payload[2:10])])
    assert stream.read() == b""
    assert found["fingerprint"] == fingerprint_text(payload[2:10])
    return found


def creek_applied(messages: list[CreekMessage]) -> list[CreekMessage]:
    """Return the messages that a consumer applies: those above the last stamp that it has of their table."""
    kept: list[CreekMessage] = []
    last: dict[str, int] = {}
    for message in messages:
        if message.stamp > last.get(message.subject, -1):
            last[message.subject] = message.stamp
            kept.append(message)
    return kept
