"""The streams of creek's wire in one JetStream: that they are there, and what schemas they have."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from nats.js.errors import APIError, NotFoundError

from airflow_provider_pgrepl.replication.creek.framing import framed, unframed
from airflow_provider_pgrepl.replication.creek.last_message import last_message
from airflow_provider_pgrepl.replication.creek.subjects import KINDS, Wire
from airflow_provider_pgrepl.replication.creek.wire import Envelope
from airflow_provider_pgrepl.replication.events.targets.jetstream_reasons import is_too_large

_API_S = 20.0
_SNAPSHOTS_S = 7 * 86_400.0
"""How long snapshots are kept: whoever may ask for one could else fill the server's disk with copies."""


class UnsendableSchemaError(Exception):
    """A schema is larger than the server, or its stream, takes."""


class Streams:
    """Methods raise what the client raises."""

    def __init__(self, client: Any, wire: Wire) -> None:
        self._client, self._jetstream = client, client.jetstream(timeout=_API_S)
        self._wire, self._schema = wire, wire.stream("schema")
        self._messages: dict[str, bytes] = {}
        """Schema messages, by fingerprint."""
        self._newest: dict[str, str] = {}
        """Of each table, by its subject, the fingerprint of its newest schema."""

    async def make(self) -> None:
        """Make the streams that are not there. One that is there is taken as it is, with whatever limits
        somebody gave it; where databases share one, this one's subjects are added to it."""
        for kind in KINDS:
            stream, subjects = self._wire.stream(kind), self._wire.all_subjects(kind)
            try:
                found = (await self._jetstream.stream_info(stream)).config
            except NotFoundError:
                await self._jetstream.add_stream(
                    name=stream,
                    subjects=[subjects],
                    description=f"Creek stream relating to {stream}",
                    max_age=_SNAPSHOTS_S if kind == "snap" else None,
                )
                continue
            if self._wire.version == "v1" and subjects not in (known := found.subjects or []):
                await self._jetstream.update_stream(found.evolve(subjects=[*known, subjects]))

    async def prepare(self) -> None:
        """Make the streams, and read which schemas there are."""
        await self.make()
        await self._read_schemas()

    async def newest_headers(self) -> Any:
        """Those of the last change in the stream; None without one."""
        stream, subjects = self._wire.stream("wal"), self._wire.all_subjects("wal")
        last = await last_message(self._jetstream, stream, subjects)
        return None if last is None else last.headers

    async def announce(self, envelope: Envelope) -> None:
        """Publish a schema, unless it is the newest of its table already. Raises UnsendableSchemaError."""
        place, fingerprint = self._wire.subject("schema", str(envelope.table)), envelope.fingerprint_text
        if self._newest.get(place) == fingerprint:
            return
        message = self.find(fingerprint)
        if message is None or json.loads(message)["source"] != envelope.source:
            message = envelope.schema_message(datetime.now(UTC))
        packet = framed(message)
        if len(packet) > self._client.max_payload:
            raise UnsendableSchemaError
        try:
            await self._jetstream.publish(place, packet)
        except APIError as error:
            if is_too_large({"err_code": error.err_code}):
                raise UnsendableSchemaError from None
            raise
        self._messages[fingerprint], self._newest[place] = message, fingerprint

    async def _read_schemas(self) -> None:
        pattern = self._wire.all_subjects("schema")
        if await last_message(self._jetstream, self._schema, pattern) is None:
            return
        subscription = await self._jetstream.subscribe(pattern, ordered_consumer=True)
        left = 1
        while left:
            message = await subscription.next_msg(timeout=_API_S)
            left = message.metadata.num_pending
            if (fields := _fields(message.data)) is not None:
                self._messages[fields["fingerprint"]] = unframed([message.data])
                self._newest[message.subject] = fields["fingerprint"]
        await subscription.unsubscribe()

    def find(self, fingerprint: str) -> bytes | None:
        """The schema message with a fingerprint, if the stream has, or had, one."""
        return self._messages.get(fingerprint)


def _fields(packet: bytes) -> dict[str, Any] | None:
    """Of a schema message; None for what is somebody else's."""
    try:
        found = json.loads(unframed([packet]))
        return found if isinstance(found["fingerprint"], str) and isinstance(found["source"], str) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
