"""The sender of a table's snapshot to NATS, on a subject of its own: header, rows, end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import nats

from airflow_provider_pgrepl.errors import TargetError
from airflow_provider_pgrepl.replication.creek.snapshot import END
from airflow_provider_pgrepl.replication.creek.stream_lake import StreamLake
from airflow_provider_pgrepl.replication.creek.stream_reading import StreamPosition, place_of
from airflow_provider_pgrepl.replication.creek.streams import Streams
from airflow_provider_pgrepl.replication.creek.wire import Wire, framed, largest_payload
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publish.publisher import StopRequested
from airflow_provider_pgrepl.replication.events.targets.nats import JetStreamReasons
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings

log = logging.getLogger(__name__)

_CONNECT_S, _ANSWER_S, _PING_S = 20, 60.0, 10
_HEADERS_BYTES = 300
Payloads = tuple[bytes, Iterable[list[bytes]]]
"""A header, and the rows in batches."""


@dataclass(frozen=True)
class SnapshotRequest:
    """A requested snapshot of a lake's table as of `position`. All changes up to it were published at
    `published_at`. `read`: called with the corresponding place in the stream of changes; returns the header
    and the rows."""

    lake: StreamLake
    table: TableName
    position: EventPosition
    published_at: datetime
    read: Callable[[StreamPosition], Payloads]


def send_snapshot(
    servers: Sequence[str],
    settings: PublisherSettings,
    subject: str,
    wanted: SnapshotRequest,
) -> None:
    """Send a snapshot to a subject. A snapshot that fails has no end.

    Raises what reading its rows raises, TargetUnavailableError and TargetError.
    """
    reasons = JetStreamReasons(servers)
    try:
        asyncio.run(_Sender(settings, subject, reasons).send(list(servers), wanted))
    except StopRequested:
        raise
    except Exception as error:  # noqa: BLE001 - the client raises many, and none is to be shown as it is
        reasons.log_unknown("sending a snapshot", error)
        raise reasons.error_of(error) from None


class _Sender:
    def __init__(self, settings: PublisherSettings, subject: str, reasons: JetStreamReasons) -> None:
        self._name, self._subject, self._reasons = settings.name, subject, reasons
        self._wire = Wire(settings.namespace, settings.database, settings.wire)
        self._sent = 0

    async def send(self, servers: list[str], wanted: SnapshotRequest) -> None:
        self._client = await nats.connect(
            servers,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            connect_timeout=_CONNECT_S,
            ping_interval=_PING_S,
            max_outstanding_pings=2,
            disconnected_cb=self._disconnected,
            error_cb=self._said,
            name=f"pgrepl snapshot {self._name}",
        )
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            self._streams = Streams(self._client, self._wire)
            self._jetstream = self._client.jetstream()
            await self._streams.make()
            wanted.lake.check(self._wire.stream("wal"), await self._streams.newest_headers())
            place = await place_of(
                self._jetstream, self._wire, str(wanted.table), wanted.position, wanted.published_at
            )
            header, rows = await asyncio.to_thread(wanted.read, place)
            await self._publish([header])
            for some in rows:
                await self._publish(some)
            await self._publish([END])
        finally:
            await self._client.close()

    async def _publish(self, payloads: list[bytes]) -> None:
        """Send payloads and wait until they are acknowledged. Raises TargetError for one that is too large,
        TargetUnavailableError."""
        room = largest_payload(self._client.max_payload) - _HEADERS_BYTES - len(self._subject)
        if (longest := max(map(len, payloads))) > room:
            raise TargetError(
                f"a row has {longest:,} bytes, more than the server's max_payload has room for",
                "give the server a larger max_payload (64 MB at most)",
            )
        sending = [await self._start(payload) for payload in payloads]
        answers = asyncio.gather(*sending)
        both: list[asyncio.Future[Any]] = [answers, self._lost]
        await asyncio.wait(both, timeout=_ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
        if not answers.done():
            raise self._reasons.away("the connection was lost, or nothing was acknowledged for a minute")
        stream = self._wire.stream("snap")
        if any(answer.stream != stream for answer in answers.result()):
            raise self._reasons.away(f"stream {stream} does not take snapshots")

    async def _start(self, payload: bytes) -> asyncio.Future[Any]:
        self._sent += 1
        headers = {"Nats-Msg-Id": f"{self._subject}-{self._sent}"}
        return await self._jetstream.publish_async(
            self._subject, framed(payload), wait_stall=_ANSWER_S, headers=headers
        )

    async def _disconnected(self) -> None:
        if not self._lost.done():
            self._lost.set_result(None)

    async def _said(self, error: Exception) -> None:
        log.warning("%s", self._reasons.error_of(error).message)
