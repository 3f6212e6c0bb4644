"""Events on creek's wire in JetStream: their stamps, schemas that precede them, and answers to requests."""

from __future__ import annotations

import time
from typing import Any

from airflow_provider_pgrepl.replication.avro.codec import unique_long
from airflow_provider_pgrepl.replication.creek.events import CreekEvent
from airflow_provider_pgrepl.replication.creek.stream_lake import LAKE, StreamLake
from airflow_provider_pgrepl.replication.creek.stream_reading import STAMP, stamp_of
from airflow_provider_pgrepl.replication.creek.streams import (
    Accept,
    RequestResponder,
    Streams,
    UnsendableSchemaError,
)
from airflow_provider_pgrepl.replication.creek.wire import CreekEnvelope, Wire, framed
from airflow_provider_pgrepl.replication.events.event import Event, EventNumbers
from airflow_provider_pgrepl.replication.events.targets.jetstream import JetStream
from airflow_provider_pgrepl.replication.events.targets.nats import (
    NatsMessage,
    UnsendableEventError,
    identity,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings


def write_as_creek(
    target: JetStream, settings: PublisherSettings, lake: StreamLake, accept: Accept | None = None
) -> None:
    """Make a target write creek's messages. `lake`: the publisher's own lake. `accept`: called with each
    request for a snapshot; returns the subject to which the snapshot will be sent, or None."""
    target.messages = lambda: CreekMessages(target.servers, settings, target.stamps, accept, lake)


class CreekMessages:
    """The messages that one connection sends."""

    def __init__(
        self,
        servers: list[str],
        settings: PublisherSettings,
        stamps: EventNumbers,
        accept: Accept | None,
        lake: StreamLake,
    ) -> None:
        self._servers, self._stamps, self._accept, self._lake = servers, stamps, accept, lake
        self._wire = Wire(settings.namespace, settings.database, settings.wire)
        self.stream = self._wire.stream("wal")
        self._requests: RequestResponder | None = None
        self._announced: CreekEnvelope | None = None

    async def begin(self, client: Any) -> None:
        self._streams = Streams(client, self._wire)
        await self._streams.prepare()
        newest = await self._streams.newest_headers()
        self._lake.check(self.stream, newest)
        # Continue above the stream's last stamp: this publisher may have lost its record, or have been
        # renamed, after it wrote higher stamps to the stream.
        self._stamps.last = max(self._stamps.last, stamp_of(newest) or 0)
        self._requests = RequestResponder(self._servers, self._wire, self._streams.find, self._accept)
        await self._requests.start()

    async def of(self, event: Event) -> NatsMessage:
        assert isinstance(event, CreekEvent)
        if event.envelope is not self._announced:
            try:
                await self._streams.announce(event.envelope)
            except UnsendableSchemaError:
                raise UnsendableEventError(
                    "the event's schema is larger than the largest message that NATS accepts"
                ) from None
            self._announced = event.envelope
        last, stamp = self._stamps.last, self._stamps.next(event.position.commit_lsn)
        sent_at = unique_long(time.time_ns() // 1_000)
        body = event.unstamped.stamped(stamp, sent_at, last)
        headers = {**identity(event), STAMP: str(LSN(stamp)), LAKE: self._lake.id}
        if event.missing:
            headers["Creek-Unchanged"] = ",".join(event.missing)
        return NatsMessage(self._wire.subject("wal", event.table), framed(body), headers, len(body))

    async def end(self) -> None:
        if self._requests is not None:
            await self._requests.stop()
