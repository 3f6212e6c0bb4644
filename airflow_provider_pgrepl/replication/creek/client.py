"""CreekClient, a reader of creek's wire in Python, with the methods of creek's own client.

async with CreekClient("nats://nats.example.com:4222", "shop") as creek:
    snapshot = await creek.snapshot("public", "orders")
    async for row in snapshot:
        ...
    async for change in creek.stream_wal_from("public", "orders", snapshot.header.at, snapshot.header.lsn):
        ...
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

import nats
import nats.errors
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from airflow_provider_pgrepl.errors import MessageError, TargetError, TargetUnavailableError
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName

from .messages import (
    Row,
    Schema,
    SnapshotHeader,
    UnreadableChange,
    WalChange,
    change_of,
    fingerprint_of,
    parsed_schema,
    row_of,
)
from .snapshot import END
from .stream_reading import (
    after_sequence,
    last_message,
    lost_messages,
    ordered_messages,
    stored_messages,
)
from .wire import TOPIC_FORM, TOPIC_SUFFIX, Kind, PacketDecoder, Version, Wire, unframed

_CONNECT_S, _ANSWER_S = 10.0, 30.0
"""Timeouts in seconds. A publisher answers at once with the subject to which it will send a snapshot."""
_ASK_AGAIN_S = 10.0
_NEXT_S = 60.0
"""The timeout, in seconds, for the next row of a snapshot that has begun."""


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A snapshot in the snapshot stream.

    :param topic: the subject of its messages
    :param at: the time at which it began
    :param rows: the number of its messages without header and end; -1 if only the header is there
    """

    topic: str
    at: datetime
    rows: int


@dataclass(frozen=True, slots=True)
class StreamBounds:
    """The bounds of a stream.

    :param made: the creation time of the stream
    :param first: the sequence of its first message
    :param last: the sequence of its last message
    :param newest: the sequence of the database's last change, 0 if it has none
    """

    made: str
    first: int
    last: int
    newest: int


class Snapshot:
    """A snapshot's header, and its rows by asynchronous iteration, once.

    Iteration raises TargetUnavailableError if no row arrives for `timeout_s`: the publisher has failed, and
    the snapshot has no end. It raises MessageError if rows are missing. The rows that were read are
    incomplete then.
    """

    def __init__(self, header: SnapshotHeader, payloads: AsyncIterator[bytes]) -> None:
        self.header = header
        self._payloads, self._schema = payloads, parsed_schema(header.schema)
        self._read, self._is_at_end = 0, False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Row:
        if self._is_at_end:
            raise StopAsyncIteration
        payload = await anext(self._payloads)
        if payload == END:
            self._is_at_end = True
            # creek's own headers have only an estimate of the number of rows.
            if self.header.position and self._read != self.header.approx_rows:
                raise MessageError(
                    f"{self.header.topic} has {self._read:,} of {self.header.approx_rows:,} rows",
                    "raise the limits of the stream of snapshots, and request a new snapshot",
                )
            raise StopAsyncIteration
        self._read += 1
        return row_of(payload, self._schema)


class CreekClient:
    """A client for one database's streams. Use it with `async with`.

    :param uri: the address of the NATS server, such as `nats://127.0.0.1:4222`
    :param database: the database's name in the subjects
    :param namespace: the first word of the subjects and of the streams' names
    :param wire: the version of creek's wire format, `v1` or `v2`
    :param options: passed to nats.connect, such as `user` and `password`

    Methods raise TargetUnavailableError if the server does not answer or has no such stream, and MessageError
    for messages that are not creek's.
    """

    def __init__(
        self, uri: str, database: str, namespace: str = "CREEK", wire: Version = "v2", **options: Any
    ) -> None:
        self._uri, self._database, self._options = uri, database, options
        self._wire = Wire(namespace, database, wire)
        self._schema_stream, self._snap = self._wire.stream("schema"), self._wire.stream("snap")
        self._schemas: dict[str, Any] = {}
        self._texts: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        said: list[str] = []

        async def say(error: Exception) -> None:
            said[:] = [str(error) or type(error).__name__]

        options = {"max_reconnect_attempts": -1, "error_cb": say, **self._options}
        try:
            # Without a timeout it retries forever, as it does later when the connection is lost.
            self._client = await asyncio.wait_for(nats.connect(self._uri, **options), _CONNECT_S)
        except (nats.errors.Error, OSError, TimeoutError) as error:
            why = said[0] if said else type(error).__name__
            raise _unavailable(f"cannot be reached: {why}") from None
        self._jetstream = self._client.jetstream()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    def stream_wal(self, schema: str, table: str) -> AsyncIterator[WalChange]:
        """Yield a table's changes, from the oldest in the stream, and continue with new ones.

        :param schema: the table's schema
        :param table: the table's name
        """
        return self._changes(schema, table)

    async def stream_wal_from(
        self, schema: str, table: str, timestamp: datetime, lsn: LSN | str
    ) -> AsyncIterator[WalChange]:
        """Yield a table's changes that arrived at or after `timestamp` and have a stamp above `lsn`.

        To continue, pass the values of the last change that was read.

        :param schema: the table's schema
        :param table: the table's name
        :param timestamp: a time with time zone, by the NATS server's clock
        :param lsn: the stamp of the last change that was read
        """
        above = LSN.parse(lsn) if isinstance(lsn, str) else lsn
        async for change in self._changes(schema, table, timestamp):
            if change.lsn > above:
                yield change

    async def stream_wal_after(
        self, schema: str, table: str, snapshot: SnapshotHeader
    ) -> AsyncIterator[WalChange]:
        """Yield a table's changes that are not in a snapshot of it.

        :param schema: the table's schema
        :param table: the table's name
        :param snapshot: the header of the snapshot
        """
        async for change in self._changes(schema, table, snapshot.at):
            if not snapshot.has(change):
                yield change

    async def changes_after(
        self, sequence: int, wanted: Callable[[str], bool] = lambda _: True
    ) -> AsyncIterator[tuple[list[WalChange | UnreadableChange], int]]:
        """Yield the tables' changes in batches, each with the sequence up to which the stream was read.

        A batch is empty if nothing arrived for 1 s.

        :param sequence: the sequence of the stream after which to begin
        :param wanted: returns True for the tables to read; its argument is the last two words of a table's
            subjects
        :raises TargetError: if the stream has lost messages
        """
        place, unframing = self._wire.all_subjects("wal"), PacketDecoder()
        stream, begin = self._wire.stream("wal"), after_sequence(sequence)
        batches = ordered_messages(self._jetstream, stream, place, begin, has_to_be_whole=True)
        async for messages in batches:
            found: list[WalChange | UnreadableChange] = []
            for message in messages:
                number = message.metadata.sequence.stream
                # In v1 the stream also has messages of other databases.
                if self._wire.version == "v2" and number != sequence + 1:
                    raise lost_messages(stream, sequence + 1, number - 1)
                sequence = number
                found += await self._readable(unframing, message, wanted(_words(message)))
            yield found, sequence

    async def sequence_before(self, moment: datetime) -> int | None:
        """Return the sequence before the first change that arrived at or after a time.

        Returns None if every change arrived earlier.

        :param moment: a time with time zone, by the NATS server's clock
        """
        stream, place = self._wire.stream("wal"), self._wire.all_subjects("wal")
        async with aclosing(stored_messages(self._jetstream, stream, place, moment)) as batches:
            async for messages in batches:
                return int(messages[0].metadata.sequence.stream) - 1
        return None

    async def stream_bounds(self) -> StreamBounds:
        """Return the bounds of the stream of changes."""
        stream = self._wire.stream("wal")
        try:
            info = await self._jetstream.stream_info(stream)
        except NotFoundError:
            raise _unavailable(f"has no stream {stream}") from None
        found = await last_message(self._jetstream, stream, self._wire.all_subjects("wal"))
        newest = 0 if found is None else found.seq or 0
        return StreamBounds(str(info.created), info.state.first_seq, info.state.last_seq, newest)

    async def get_schema(self, fingerprint: str, timeout_s: float = 10.0) -> Schema:
        """Return the schema with a fingerprint, from a publisher.

        :param fingerprint: the fingerprint in a message
        :param timeout_s: seconds to wait for an answer
        :raises TargetUnavailableError: if no publisher has it
        """
        asked = f"the schema {fingerprint}"
        return Schema.parse(await self._request("schema", fingerprint.encode(), timeout_s, asked))

    async def get_last_schema(self, schema: str, table: str) -> Schema | None:
        """Return the newest schema of a table, or None if it has none yet.

        :param schema: the table's schema in the database
        :param table: the table's name
        """
        place = self._subject("schema", schema, table)
        found = None
        with suppress(NotFoundError):
            found = await last_message(self._jetstream, self._schema_stream, place)
        if found is None:
            return None
        try:
            payload = unframed([found.data or b""])
        except ValueError as error:
            raise MessageError(f"{place}: {error}") from None
        return Schema.parse(payload)

    async def list_snapshots(self, schema: str, table: str) -> list[StoredSnapshot]:
        """Return the stored snapshots of a table, oldest first.

        :param schema: the table's schema
        :param table: the table's name
        """
        pattern = f"{self._subject('snap', schema, table)}.*"
        try:
            info = await self._jetstream.stream_info(self._snap, subjects_filter=pattern)
        except NotFoundError:
            raise _unavailable(f"has no stream {self._snap}") from None
        found = []
        for topic, messages in sorted((info.state.subjects or {}).items()):
            with suppress(ValueError):
                moment = topic.rpartition(".")[2][:-TOPIC_SUFFIX]
                at = datetime.strptime(moment, TOPIC_FORM).replace(tzinfo=UTC)
                found.append(StoredSnapshot(topic, at, messages - 2))
        return found

    async def get_snapshot(self, topic: str, timeout_s: float = 60.0) -> Snapshot:
        """Return a stored snapshot.

        :param topic: the topic of a StoredSnapshot
        :param timeout_s: seconds to wait for each row
        """
        payloads = self._payloads(self._snap, topic, timeout_s)
        return Snapshot(SnapshotHeader.parse(topic, await anext(payloads)), payloads)

    async def snapshot(self, schema: str, table: str, timeout_s: float = 60.0) -> Snapshot:
        """Request a new snapshot from the publisher and return it.

        The request is repeated until the header arrives: a publisher or a server that was restarted has lost
        earlier requests. If no publisher answers, that is an error at once, unless the connection was lost
        since the first request.

        :param schema: the table's schema
        :param table: the table's name
        :param timeout_s: seconds to wait for the header
        :raises TargetUnavailableError: if the publisher does not send one; its log has the reason
        """
        loop, waiting = (
            asyncio.get_running_loop(),
            dict[str, tuple[AsyncGenerator[bytes], asyncio.Task[bytes]]](),
        )
        end, reconnects = loop.time() + timeout_s, self._client.stats["reconnects"]
        try:
            while (left := end - loop.time()) > 0:
                try:
                    topic = await self._snapshot_topic(schema, table, min(left, _ANSWER_S))
                except TargetUnavailableError:
                    # After a restart of the server the publisher may reconnect later than this client.
                    if not waiting and not self._was_cut_off(reconnects):
                        raise
                else:
                    if topic not in waiting:
                        payloads = self._payloads(
                            self._snap, topic, min(timeout_s, _NEXT_S), first_s=timeout_s
                        )
                        waiting[topic] = payloads, asyncio.ensure_future(anext(payloads))
                await self._wait_for_any([task for _, task in waiting.values()])
                for topic, (payloads, task) in waiting.items():
                    if task.done():
                        del waiting[topic]
                        if self._has_to_ask_again(task, reconnects):
                            await asyncio.sleep(_ASK_AGAIN_S)
                            break
                        return Snapshot(SnapshotHeader.parse(topic, task.result()), payloads)
            raise _unavailable(f"has no snapshot of {schema}.{table} after {timeout_s:g} s")
        finally:
            for payloads, task in waiting.values():
                task.cancel()
                await asyncio.wait([task])
                await payloads.aclose()

    async def _wait_for_any(self, tasks: list[asyncio.Task[bytes]]) -> None:
        """Wait until a task ends, or until it is time to ask again."""
        if tasks:
            await asyncio.wait(tasks, timeout=_ASK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(_ASK_AGAIN_S)

    def _has_to_ask_again(self, task: asyncio.Task[bytes], reconnects: int) -> bool:
        """Return True if a task has failed because the server was away."""
        return isinstance(task.exception(), TargetUnavailableError) and self._was_cut_off(reconnects)

    def _was_cut_off(self, reconnects: int) -> bool:
        """Return True if the connection was lost since it had been renewed `reconnects` times."""
        return not self._client.is_connected or self._client.stats["reconnects"] > reconnects

    async def _snapshot_topic(self, schema: str, table: str, timeout_s: float) -> str:
        request = {"database": self._database, "namespace": schema, "table": table}
        asked = f"a snapshot of {schema}.{table}"
        topic = await self._request("snap", json.dumps(request).encode(), timeout_s, asked)
        if not topic.startswith(f"{self._subject('snap', schema, table)}.".encode()):
            raise MessageError("NATS: the answer to a snapshot request names no subject of snapshots")
        return topic.decode()

    async def _request(self, kind: Kind, data: bytes, timeout_s: float, asked: str) -> bytes:
        try:
            found = await self._client.request(self._wire.request(kind), data, timeout=timeout_s)
        except (nats.errors.Error, TimeoutError):
            raise TargetUnavailableError(
                f"NATS: no publisher answered the request for {asked}",
                "check that the publisher is running and publishes that table; its log has the"
                " reason of a rejected request",
            ) from None
        return bytes(found.data)

    async def _changes(
        self, schema: str, table: str, since: datetime | None = None
    ) -> AsyncIterator[WalChange]:
        place = self._subject("wal", schema, table)
        async for payload, message in self._messages(self._wire.stream("wal"), place, since):
            yield await self._change(payload, message)

    async def _readable(
        self, unframing: PacketDecoder, message: Msg, is_wanted: bool
    ) -> list[WalChange | UnreadableChange]:
        """Return the change in a message; nothing for an incomplete payload, or if the table is not
        wanted."""
        try:
            payload = _payload(unframing, message)
            return [] if payload is None or not is_wanted else [await self._change(payload, message)]
        except (MessageError, TargetUnavailableError) as error:
            # An unknown schema concerns only its table. A lost connection to NATS concerns all tables.
            if not self._client.is_connected:
                raise
            return [UnreadableChange(_words(message), message.metadata.sequence.stream, error.message)]

    async def _change(self, payload: bytes, message: Msg) -> WalChange:
        fingerprint = fingerprint_of(payload)
        if fingerprint not in self._schemas:
            self._schemas[fingerprint] = parsed_schema(await self.schema_text(fingerprint, _words(message)))
        sequence = message.metadata.sequence.stream
        return change_of(payload, self._schemas[fingerprint], message.headers or {}, sequence)

    async def schema_text(self, fingerprint: str, words: str) -> str:
        """Return an Avro schema from the schema stream, or from a publisher if the stream lacks it.

        :param fingerprint: the fingerprint in a message
        :param words: the last two words of the table's subjects
        """
        if fingerprint not in self._texts:
            self._texts[fingerprint] = await self._find(fingerprint, words)
        return self._texts[fingerprint]

    async def _find(self, fingerprint: str, words: str) -> str:
        place = f"{self._wire.all_subjects('schema')[:-1]}{words}"
        begin = ConsumerConfig(deliver_policy=DeliverPolicy.ALL)
        with suppress(TargetUnavailableError):
            batches = ordered_messages(self._jetstream, self._schema_stream, place, begin)
            async with aclosing(batches):
                async for messages in batches:
                    for message in messages:
                        # Another program may write other messages to the stream.
                        with suppress(ValueError, MessageError):
                            found = Schema.parse(unframed([message.data]))
                            if found.fingerprint == fingerprint:
                                return found.text
                    if not messages:
                        break
        return (await self.get_schema(fingerprint)).text

    async def _payloads(
        self, stream: str, place: str, timeout_s: float, first_s: float | None = None
    ) -> AsyncGenerator[bytes]:
        """Yield payloads. Raises TargetUnavailableError if the next one does not arrive within `timeout_s`
        seconds, the first one within `first_s`."""
        messages, limit_s = self._messages(stream, place), first_s or timeout_s
        while True:
            try:
                payload, _ = await asyncio.wait_for(anext(messages), limit_s)
            except TimeoutError:
                raise _unavailable(f"has sent nothing more of {place} for {limit_s:g} s") from None
            limit_s = timeout_s
            yield payload

    def _subject(self, kind: Kind, schema: str, table: str) -> str:
        return self._wire.subject(kind, str(TableName(schema, table)))

    async def _messages(
        self, stream: str, place: str, since: datetime | None = None
    ) -> AsyncGenerator[tuple[bytes, Msg]]:
        """Yield payloads, each with the last of its messages."""
        unframing = PacketDecoder()
        policy = DeliverPolicy.ALL if since is None else DeliverPolicy.BY_START_TIME
        begin = ConsumerConfig(deliver_policy=policy, opt_start_time=since)
        async for messages in ordered_messages(self._jetstream, stream, place, begin):
            for message in messages:
                if (payload := _payload(unframing, message)) is not None:
                    yield payload, message


def _words(message: Msg) -> str:
    """Return the last two words of a subject, which identify the table in all streams."""
    return ".".join(message.subject.split(".")[-2:])


def _payload(unframing: PacketDecoder, message: Msg) -> bytes | None:
    try:
        return unframing.add(message.data)
    except ValueError as error:
        raise MessageError(f"{message.subject}: {error}") from None


def _unavailable(what: str) -> TargetError:
    return TargetUnavailableError(
        f"NATS {what}", "check that the server runs, with JetStream and creek's streams"
    )
