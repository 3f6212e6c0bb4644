"""The streams of creek's wire in one JetStream: that they are there, and what schemas they have."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from nats.aio.msg import Msg
from nats.js.errors import APIError, NotFoundError

from airflow_provider_pgrepl.replication.events.creek.envelope import Envelope
from airflow_provider_pgrepl.replication.events.creek.framing import framed, unframed
from airflow_provider_pgrepl.replication.events.creek.subjects import stream_name, subject
from airflow_provider_pgrepl.replication.events.publishing.jetstream_reasons import is_too_large
from airflow_provider_pgrepl.replication.publisher_settings import PublisherSettings

_API_S = 20.0


class UnsendableSchemaError(Exception):
    """A schema is larger than the server, or its stream, takes."""


class Streams:
    """Methods raise what the client raises. `names`: of the changes, the schemas and the snapshots."""

    def __init__(self, client: Any, settings: PublisherSettings) -> None:
        self._client, self._jetstream = client, client.jetstream(timeout=_API_S)
        self.names = [
            stream_name(settings.namespace, kind, settings.database) for kind in ("wal", "schema", "snap")
        ]
        self._schema = self.names[1]
        self._places: dict[str, int] = {}
        """Where in the stream a schema is, by fingerprint."""
        self._newest: dict[str, str] = {}
        """Of each table, by its subject, the fingerprint of its newest schema."""

    async def make(self) -> None:
        """Make the streams that are not there. One that is there is taken as it is, with whatever limits
        somebody gave it."""
        for stream in self.names:
            try:
                await self._jetstream.stream_info(stream)
            except NotFoundError:
                await self._jetstream.add_stream(
                    name=stream, subjects=[f"{stream}.>"], description=f"Creek stream relating to {stream}"
                )

    async def prepare(self) -> None:
        """Make the streams, and read which schemas there are."""
        await self.make()
        await self._read_schemas()
        await self._client.subscribe(self._schema, cb=self._answer)

    async def serve(self, ask: Callable[[bytes, str], None]) -> None:
        """Have `ask` called for whoever asks for a snapshot, with the request and where the answer goes."""

        async def asked(request: Msg) -> None:
            if self._may_be_answered(request):
                ask(request.data, request.reply)

        await self._client.subscribe(self.names[2], cb=asked)

    async def newest_change_at(self) -> datetime:
        """By the server's clock, when the last change came that the stream has, or the stream was made: none
        that comes after is from before."""
        wal = self.names[0]
        try:
            last = await self._jetstream.get_last_msg(wal, f"{wal}.>")
            found: datetime | None = last.time
        except NotFoundError:
            found = (await self._jetstream.stream_info(wal)).created
        assert found is not None
        return found

    async def announce(self, envelope: Envelope) -> None:
        """Publish a schema, unless it is the newest of its table already. Raises UnsendableSchemaError."""
        place, fingerprint = subject(self._schema, str(envelope.table)), envelope.fingerprint_text
        if self._newest.get(place) == fingerprint:
            return
        message = await self._find(fingerprint)
        if message is None or json.loads(message)["source"] != envelope.source:
            message = envelope.schema_message(datetime.now(UTC))
        packet = framed(message)
        if len(packet) > self._client.max_payload:
            raise UnsendableSchemaError
        try:
            found = await self._jetstream.publish(place, packet)
        except APIError as error:
            if is_too_large({"err_code": error.err_code}):
                raise UnsendableSchemaError from None
            raise
        self._places[fingerprint], self._newest[place] = found.seq, fingerprint

    async def _read_schemas(self) -> None:
        pattern = f"{self._schema}.>"
        try:
            await self._jetstream.get_last_msg(self._schema, pattern)
        except NotFoundError:
            return
        subscription = await self._jetstream.subscribe(pattern, ordered_consumer=True)
        left = 1
        while left:
            message = await subscription.next_msg(timeout=_API_S)
            left = message.metadata.num_pending
            if (fields := _fields(message.data)) is not None:
                self._places[fields["fingerprint"]] = message.metadata.sequence.stream
                self._newest[message.subject] = fields["fingerprint"]
        await subscription.unsubscribe()

    async def _find(self, fingerprint: str) -> bytes | None:
        """The schema message with a fingerprint, if the stream has one."""
        if fingerprint not in self._places:
            return None
        try:
            found = await self._jetstream.get_msg(self._schema, self._places[fingerprint])
        except NotFoundError:
            return None
        fields = _fields(found.data or b"")
        return None if fields is None or fields["fingerprint"] != fingerprint else unframed([found.data])

    def _may_be_answered(self, request: Msg) -> bool:
        """Nothing is written into a stream for who may not write there."""
        return bool(request.reply) and not request.reply.startswith(("$", *self.names))

    async def _answer(self, request: Msg) -> None:
        """creek answers nothing to a fingerprint that it does not know."""
        if not self._may_be_answered(request):
            return
        message = await self._find(request.data.decode(errors="replace"))
        if message is not None:
            await request.respond(message)


def _fields(packet: bytes) -> dict[str, Any] | None:
    """Of a schema message; None for what is somebody else's."""
    try:
        found = json.loads(unframed([packet]))
        return found if isinstance(found["fingerprint"], str) and isinstance(found["source"], str) else None
    except (ValueError, KeyError, TypeError):
        return None
