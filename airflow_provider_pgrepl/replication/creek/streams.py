"""The streams of creek's wire in one JetStream: events, the schemas before them, answers to
requests, and snapshots on subjects of their own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import nats
from nats.aio.msg import Msg
from nats.js.errors import APIError, NotFoundError

from airflow_provider_pgrepl.errors import TargetError
from airflow_provider_pgrepl.replication.avro.codec import unique_long
from airflow_provider_pgrepl.replication.events.event import Event, EventNumbers
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publish.publisher import StopRequested
from airflow_provider_pgrepl.replication.events.targets.jetstream import (
    JetStream,
    JetStreamReasons,
    NatsMessage,
    UnsendableEventError,
    identity,
    is_too_large,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings

from .events import CreekEvent
from .snapshot import END
from .stream_lake import LAKE, StreamLake
from .stream_reading import PREVIOUS, STAMP, StreamPosition, last_message, place_of, stamp_of
from .wire import KINDS, CreekEnvelope, Wire, framed, largest_payload, unframed

_API_S = 20.0
_SNAPSHOTS_S = 7 * 86_400.0
"""The time, in seconds, for which snapshots are kept: otherwise requests could fill the server's disk with
copies."""
log = logging.getLogger(__name__)
Accept = Callable[[bytes], str | None]
"""Called with a request for a snapshot; returns the subject to which it will be sent, or None."""
_CONNECT_S, _PING_S = 20, 10
_MOST_WAITING, _MOST_BYTES, _LARGEST = 1_000, 1 << 20, 4_096
"""The limits of requests: how many may wait, their total bytes, and the bytes of one."""
_SAY_EVERY_S = 60.0
_ANSWER_S = 60.0
_HEADERS_BYTES = 300
Payloads = tuple[bytes, Iterable[list[bytes]]]
"""A header, and the rows in batches."""


class _UnsendableSchemaError(Exception):
    """A schema is larger than the server, or its stream, accepts."""


def write_as_creek(
    target: JetStream, settings: PublisherSettings, lake: StreamLake, accept: Accept | None = None
) -> None:
    """Make a target write creek's messages. `lake`: the publisher's own lake. `accept`: called with each
    request for a snapshot; returns the subject to which the snapshot will be sent, or None."""
    last_ids: dict[str, str] = {}
    target.messages = lambda: _CreekMessages(target.servers, settings, target.stamps, last_ids, accept, lake)


class _CreekMessages:
    """The messages that one connection sends. `last_ids`: the id of each table's last event, sent on this
    connection or on an earlier one of the same run."""

    def __init__(
        self,
        servers: list[str],
        settings: PublisherSettings,
        stamps: EventNumbers,
        last_ids: dict[str, str],
        accept: Accept | None,
        lake: StreamLake,
    ) -> None:
        self._servers, self._stamps, self._accept, self._lake = servers, stamps, accept, lake
        self._last_ids = last_ids
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
        if event.previous is None:
            # Before anything can reject it: an event that is sent again keeps it, and later ones name this
            # one though it was rejected.
            event.previous = self._last_ids.get(event.table, "")
            self._last_ids[event.table] = event.id
        if event.envelope is not self._announced:
            try:
                await self._streams.announce(event.envelope)
            except _UnsendableSchemaError:
                raise UnsendableEventError(
                    "the event's schema is larger than the largest message that NATS accepts"
                ) from None
            self._announced = event.envelope
        last, stamp = self._stamps.last, self._stamps.next(event.position.commit_lsn)
        sent_at = unique_long(time.time_ns() // 1_000)
        body = event.unstamped.stamped(stamp, sent_at, last)
        headers = {**identity(event), STAMP: str(LSN(stamp)), LAKE: self._lake.id}
        if event.previous:
            headers[PREVIOUS] = event.previous
        if event.missing:
            headers["Creek-Unchanged"] = ",".join(event.missing)
        return NatsMessage(self._wire.subject("wal", event.table), framed(body), headers, len(body))

    def skip(self, event: Event) -> None:
        assert isinstance(event, CreekEvent)
        if self._last_ids.get(event.table) == event.id:
            self._last_ids[event.table] = event.previous or ""

    async def end(self) -> None:
        if self._requests is not None:
            await self._requests.stop()


class Streams:
    """The streams of one database. Methods raise what the NATS client raises."""

    def __init__(self, client: Any, wire: Wire) -> None:
        self._client, self._jetstream = client, client.jetstream(timeout=_API_S)
        self._wire, self._schema = wire, wire.stream("schema")
        self._messages: dict[str, bytes] = {}
        """Schema messages, by fingerprint."""
        self._newest: dict[str, str] = {}
        """The fingerprint of each table's newest schema, by the table's subject."""

    async def make(self) -> None:
        """Create the missing streams. An existing stream is used with the limits that it has; if databases
        share it, this database's subjects are added to it."""
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
        """Create the missing streams, and read the schema messages."""
        await self.make()
        await self._read_schemas()

    async def newest_headers(self) -> Any:
        """Return the headers of the last change in the stream; None if it has none."""
        stream, subjects = self._wire.stream("wal"), self._wire.all_subjects("wal")
        last = await last_message(self._jetstream, stream, subjects)
        return None if last is None else last.headers

    async def announce(self, envelope: CreekEnvelope) -> None:
        """Publish a schema, unless it is the newest of its table already. Raises _UnsendableSchemaError."""
        place, fingerprint = self._wire.subject("schema", str(envelope.table)), envelope.fingerprint_text
        if self._newest.get(place) == fingerprint:
            return
        message = self.find(fingerprint)
        if message is None or json.loads(message)["source"] != envelope.source:
            message = envelope.schema_message(datetime.now(UTC))
        packet = framed(message)
        if len(packet) > self._client.max_payload:
            raise _UnsendableSchemaError
        try:
            await self._jetstream.publish(place, packet)
        except APIError as error:
            if is_too_large({"err_code": error.err_code}):
                raise _UnsendableSchemaError from None
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
        """Return the schema message with a fingerprint; None if the stream never had one."""
        return self._messages.get(fingerprint)


def _fields(packet: bytes) -> dict[str, Any] | None:
    """Return the fields of a schema message; None if another program has written the message."""
    try:
        found = json.loads(unframed([packet]))
        return found if isinstance(found["fingerprint"], str) and isinstance(found["source"], str) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


class RequestResponder:
    """The answers to requests. Any NATS client may send requests, with any content and at any rate. Therefore
    they have a connection of their own, apart from that of events, and a request that fails costs only its
    own answer."""

    def __init__(
        self,
        servers: list[str],
        wire: Wire,
        find_schema: Callable[[str], bytes | None],
        accept: Accept | None,
    ) -> None:
        self._servers, self._wire = servers, wire
        self._reasons = JetStreamReasons(servers)
        self._find_schema, self._accept = find_schema, accept
        self._said_at = -_SAY_EVERY_S

    async def start(self) -> None:
        """Connect, and answer requests from now on. Raises what the NATS client raises."""
        connecting = nats.connect(
            self._servers,
            max_reconnect_attempts=-1,
            ping_interval=_PING_S,
            max_outstanding_pings=2,
            error_cb=self._say,
            name=f"pgrepl requests {self._wire.database}",
        )
        self._client = await asyncio.wait_for(connecting, _CONNECT_S)
        await self._serve("schema", self._schema)
        if self._accept is not None:
            await self._serve("snap", self._snapshot)
        # A ping overtakes the subscriptions that the client has queued: only the second answer follows them.
        for _ in range(2):
            await self._client.flush()

    async def stop(self) -> None:
        """Stop answering requests and close the connection."""
        await self._client.close()

    async def _serve(self, kind: Any, answer: Callable[[bytes], Awaitable[bytes | None]]) -> None:
        async def asked(request: Msg) -> None:
            if not self._may_be_answered(request):
                return
            try:
                found = await answer(request.data)
                if found is not None:
                    await request.respond(found)
            except Exception as error:  # noqa: BLE001 - any request may cause any error
                await self._say(error)

        subject = self._wire.request(kind)
        await self._client.subscribe(
            subject, cb=asked, pending_msgs_limit=_MOST_WAITING, pending_bytes_limit=_MOST_BYTES
        )

    def _may_be_answered(self, request: Msg) -> bool:
        """Return True if the request has a reply subject and an accepted size. A reply subject of a stream is
        not accepted: the requester could otherwise write to a stream without the right to do so."""
        is_ours = request.reply.startswith(("$", *self._wire.own))
        return bool(request.reply) and not is_ours and len(request.data) <= _LARGEST

    async def _schema(self, request: bytes) -> bytes | None:
        """Return the schema message; None, and so no answer, if the fingerprint is unknown, as creek does."""
        return self._find_schema(request.decode(errors="replace"))

    async def _snapshot(self, request: bytes) -> bytes | None:
        assert self._accept is not None
        subject = await asyncio.to_thread(self._accept, request)
        return None if subject is None else subject.encode()

    async def _say(self, error: Exception) -> None:
        """Log an error, at most once in 60 s: requests may be very frequent."""
        if time.monotonic() - self._said_at >= _SAY_EVERY_S:
            self._said_at = time.monotonic()
            said = self._reasons.error_of(error).message
            log.warning("a request for a schema or a snapshot failed: %s", said)
            self._reasons.log_unknown("answering a request for a schema or a snapshot", error)


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
