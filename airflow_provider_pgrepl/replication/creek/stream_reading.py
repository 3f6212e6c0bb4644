"""Reading of a JetStream stream in order, each message once, across lost connections and server restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import count
from typing import Any

import nats.errors
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from airflow_provider_pgrepl.errors import ConfigError, TargetError, TargetUnavailableError
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.targets.base import NATS_ID
from airflow_provider_pgrepl.replication.postgres.lsn import LSN

from .wire import Wire

_BATCH = 256
_LOOK_S, _PAUSE_S = 1.0, 0.5
_KEPT_S = 300.0
"""The time, in seconds, for which the server keeps a consumer that fetches nothing while its reader is
busy."""
_PASSING = (NotFoundError, ServiceUnavailableError)
_LOST = (nats.errors.Error, APIError, OSError)
_PASSING_OR_AWAY = (*_PASSING, nats.errors.Error, OSError, TimeoutError)
STAMP = "Pgrepl-Stamp"
"""The header of a change with its present stamp."""
PREVIOUS = "Pgrepl-Previous"
"""The header of a change with the id of the table's change that was sent before it in the same run."""
_LOOK_BACK_S = (10.0, 600.0, None)
"""The times, in seconds, to look back, in this order; None: from the beginning."""


async def last_message(jetstream: Any, stream: str, subject: str) -> Any:
    """Return the last message of a subject as a RawStreamMsg; None if there is none. Raises NotFoundError if
    the stream does not exist.

    A stream without messages is not asked for one: nats-server 2.9.10, the version of Debian 12, crashes with
    a nil pointer if it is asked for a message of a stream that has no store yet (jsMsgGetRequest).
    """
    if not (await jetstream.stream_info(stream)).state.messages:
        return None
    try:
        return await jetstream.get_last_msg(stream, subject)
    except NotFoundError:
        return None


async def ordered_messages(
    jetstream: Any, stream: str, subject: str, begin: ConsumerConfig, *, has_to_be_whole: bool = False
) -> AsyncGenerator[list[Msg]]:
    """Yield messages in batches, without an end; a batch is empty if nothing arrived for 1 s. `begin`: the
    start, by its delivery policy.

    Raises TargetUnavailableError if the stream does not exist, or rejects its reader. Raises TargetError if
    the stream was deleted and created again while it was read: its sequences begin again, and messages may be
    lost; and with `has_to_be_whole`, for which `begin` has a sequence, if the stream has dropped the next
    messages when the reader begins, or begins again after it was away.
    """
    made = await _made(jetstream, stream)
    while True:
        last = 0
        try:
            if has_to_be_whole:
                await _check_held(jetstream, stream, begin.opt_start_seq or 0)
            async with aclosing(_consumed(jetstream, stream, subject, begin)) as consumed:
                async for messages in consumed:
                    yield messages
                    if messages:
                        last = messages[-1].metadata.sequence.stream
        except _LOST as error:
            if isinstance(error, APIError) and not isinstance(error, _PASSING):
                raise _refused(stream, error) from None
            while (found := await _made_now(jetstream, stream)) is None:
                yield []
                await asyncio.sleep(_PAUSE_S)
            if found != (made,):
                raise TargetError(
                    f"NATS: stream {stream} was recreated while it was read",
                    "messages of the old stream may be lost: begin with a new snapshot",
                ) from None
        if last:
            begin = after_sequence(last)


async def _check_held(jetstream: Any, stream: str, sequence: int) -> None:
    """Raise TargetError if the stream begins after `sequence`."""
    first = (await jetstream.stream_info(stream)).state.first_seq
    if sequence < first:
        raise lost_messages(stream, sequence, first - 1)


def lost_messages(stream: str, first: int, last: int) -> TargetError:
    """Return the error for a stream that no longer has messages which were not read."""
    return TargetError(
        f"NATS: stream {stream} has lost its messages {first} to {last}",
        "remove the limits of the stream. The changes in these messages are lost: take new snapshots of the"
        " tables",
    )


async def stored_messages(
    jetstream: Any, stream: str, subject: str, since: datetime | None = None
) -> AsyncGenerator[list[Msg]]:
    """Yield the messages of a stream in batches, to the last one that it has. `since`: begin with the first
    message that arrived at that time or later.

    That nothing arrived for a while is no end: the server may be slow, away or electing a leader. Raises
    what `ordered_messages` raises, and ConnectionClosedError if the client does not connect again.
    """
    policy = DeliverPolicy.ALL if since is None else DeliverPolicy.BY_START_TIME
    begin, last = ConsumerConfig(deliver_policy=policy, opt_start_time=since), 0
    async with aclosing(ordered_messages(jetstream, stream, subject, begin)) as batches:
        async for messages in batches:
            if messages:
                last = messages[-1].metadata.sequence.stream
                yield messages
            elif not await _may_have_more(jetstream, stream, subject, last, since):
                return


async def _may_have_more(
    jetstream: Any, stream: str, subject: str, last: int, since: datetime | None
) -> bool:
    """Return False if the stream has no message after `last` that arrived at `since` or later."""
    try:
        newest = await last_message(jetstream, stream, subject)
    except nats.errors.ConnectionClosedError:
        raise
    except _PASSING_OR_AWAY:
        return True
    return newest is not None and newest.seq > last and (since is None or newest.time >= since)


def after_sequence(sequence: int) -> ConsumerConfig:
    """Return the configuration of a consumer that begins with the first message after `sequence`."""
    return ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=sequence + 1)


async def _consumed(
    jetstream: Any, stream: str, subject: str, begin: ConsumerConfig
) -> AsyncGenerator[list[Msg]]:
    """Yield the messages of one consumer. Ends if a message is missing, and raises if the consumer no longer
    exists."""
    config = begin.evolve(ack_policy=AckPolicy.NONE, inactive_threshold=_KEPT_S, mem_storage=True)
    consumer = await jetstream.pull_subscribe(subject, stream=stream, config=config)
    expected = 1
    try:
        while True:
            try:
                messages = await consumer.fetch(_BATCH, timeout=_LOOK_S)
            except TimeoutError:
                await consumer.consumer_info()
                messages = []
            numbers = [message.metadata.sequence.consumer for message in messages]
            # The server counts messages as delivered that were lost with a connection.
            whole = sum(1 for number, wanted in zip(numbers, count(expected)) if number == wanted)
            yield messages[:whole]
            if whole < len(messages):
                return
            expected += whole
    finally:
        await _quietly_ended(consumer)


async def _quietly_ended(consumer: Any) -> None:
    try:
        await consumer.unsubscribe()
    except _LOST:
        return


async def _made(jetstream: Any, stream: str) -> datetime | None:
    """Return the creation time of a stream. Raises TargetUnavailableError if the server does not return
    it."""
    try:
        found: datetime | None = (await jetstream.stream_info(stream)).created
    except (*_LOST, TimeoutError) as error:
        raise TargetUnavailableError(
            f"NATS has no stream {stream}, or does not say so ({type(error).__name__})",
            "look at namespace and database, and that its publisher has run",
        ) from None
    return found


async def _made_now(jetstream: Any, stream: str) -> tuple[datetime | None] | None:
    """Return the creation time of a stream that existed, in a tuple; `(None,)` if the stream no longer
    exists, None while the server does not answer."""
    try:
        return ((await jetstream.stream_info(stream)).created,)
    except _PASSING_OR_AWAY as error:
        return (None,) if isinstance(error, NotFoundError) else None


def _refused(stream: str, error: APIError) -> TargetUnavailableError:
    return TargetUnavailableError(
        f"NATS rejects a consumer of stream {stream}: {error.description}",
        "check the limits of the stream and of the account, such as max_consumers",
    )


@dataclass(frozen=True)
class StreamPosition:
    """The place in the stream that corresponds to a position. The table's changes that committed at or before
    the position have stamps of at most `stamp`. Later changes have higher stamps, and arrived at `at` or
    after it."""

    at: datetime
    stamp: LSN


async def place_of(
    jetstream: Any, wire: Wire, table: str, position: EventPosition, published_at: datetime
) -> StreamPosition:
    """Return the place of a position up to which all changes were published before `published_at`, by the
    publisher's clock.

    Changes that are sent again after that time are after the position. Raises what the client raises, and
    TargetUnavailableError.
    """
    stream, subject = wire.stream("wal"), wire.subject("wal", table)
    last = await last_message(jetstream, stream, subject)
    if last is None:
        # The stream has no change of the table. Later changes have stamps above their own LSN.
        made = (await jetstream.stream_info(stream)).created
        return StreamPosition(made, position.commit_lsn)
    if _is_upto(last.headers, position):
        return StreamPosition(last.time, stamp_of(last.headers) or position.commit_lsn)
    for seconds in _LOOK_BACK_S:
        found = await _last_upto(jetstream, stream, subject, position, last.seq, published_at, seconds)
        if found is not None:
            return StreamPosition(found.metadata.timestamp, stamp_of(found.headers) or position.commit_lsn)
    made = (await jetstream.stream_info(stream)).created
    return StreamPosition(made, position.commit_lsn)


async def _last_upto(
    jetstream: Any,
    stream: str,
    subject: str,
    position: EventPosition,
    end: int,
    published_at: datetime,
    seconds: float | None,
) -> Msg | None:
    """Return the last message at or before the position, if one arrived within `seconds` before
    `published_at`."""
    since = None if seconds is None else published_at - timedelta(seconds=seconds)
    found = None
    async with aclosing(stored_messages(jetstream, stream, subject, since)) as batches:
        async for messages in batches:
            for message in messages:
                if _is_upto(message.headers, position):
                    found = message
            if messages[-1].metadata.sequence.stream >= end:
                break
    return found


def _is_upto(headers: Any, position: EventPosition) -> bool:
    """Return True if the message is at or before the position. A message without an id was sent by creek
    itself, before this publisher took over."""
    try:
        return EventPosition.parse((headers or {})[NATS_ID]) <= position
    except (KeyError, ConfigError):
        return True


def stamp_of(headers: Any) -> LSN | None:
    """Return the stamp of a message; None if it has none."""
    try:
        return LSN.parse((headers or {})[STAMP])
    except (KeyError, ValueError):
        return None
