"""Messages of a JetStream stream in order, each once, over lost connections and servers that restart."""

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
from airflow_provider_pgrepl.replication.creek.wire import Wire
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.targets.routing import NATS_ID
from airflow_provider_pgrepl.replication.postgres.lsn import LSN

_BATCH = 256
_LOOK_S, _PAUSE_S = 1.0, 0.5
_KEPT_S = 300.0
"""How long the server keeps a consumer that fetches nothing, while its reader is busy."""
_PASSING = (NotFoundError, ServiceUnavailableError)
_LOST = (nats.errors.Error, APIError, OSError)
_PASSING_OR_AWAY = (*_PASSING, nats.errors.Error, OSError, TimeoutError)
STAMP = "Pgrepl-Stamp"
"""Header of a change: the stamp that it has this time."""
_LOOK_BACK_S = (10.0, 600.0, None)
"""How far back it looks, first and then; None: to the beginning."""


async def last_message(jetstream: Any, stream: str, subject: str) -> Any:
    """A RawStreamMsg; None when there is none. Raises NotFoundError when there is no such stream.

    A stream that is just being made is asked for nothing but what it holds: nats-server 2.9.10, as Debian 12
    has it, ends itself by a nil pointer when it is asked for a message of a stream without a store yet
    (jsMsgGetRequest).
    """
    if not (await jetstream.stream_info(stream)).state.messages:
        return None
    try:
        return await jetstream.get_last_msg(stream, subject)
    except NotFoundError:
        return None


async def ordered_messages(
    jetstream: Any, stream: str, subject: str, begin: ConsumerConfig
) -> AsyncGenerator[list[Msg]]:
    """Endless: some messages at a time, none when none came for a second. `begin`: where, by its policy of
    delivery.

    Raises TargetUnavailableError when the stream is not there, or refuses its reader; TargetError when it was
    made anew meanwhile: its numbers begin again, and what it had may be lost.
    """
    made = await _made(jetstream, stream)
    while True:
        last = 0
        try:
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
                    f"NATS: stream {stream} was made anew while it was read",
                    "what it had may be lost: begin with a new snapshot",
                ) from None
        if last:
            begin = after_sequence(last)


def after_sequence(sequence: int) -> ConsumerConfig:
    """With the first message after one."""
    return ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=sequence + 1)


async def _consumed(
    jetstream: Any, stream: str, subject: str, begin: ConsumerConfig
) -> AsyncGenerator[list[Msg]]:
    """Of one consumer, until one is missing, or the consumer."""
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
            # What a lost connection has swallowed, the server takes for delivered.
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
    """When a stream was made."""
    try:
        found: datetime | None = (await jetstream.stream_info(stream)).created
    except (*_LOST, TimeoutError) as error:
        raise TargetUnavailableError(
            f"NATS has no stream {stream}, or does not say so ({type(error).__name__})",
            "look at namespace and database, and that its publisher has run",
        ) from None
    return found


async def _made_now(jetstream: Any, stream: str) -> tuple[datetime | None] | None:
    """The same of a stream that was there; None while the server does not answer."""
    try:
        return ((await jetstream.stream_info(stream)).created,)
    except _PASSING_OR_AWAY as error:
        return (None,) if isinstance(error, NotFoundError) else None


def _refused(stream: str, error: APIError) -> TargetUnavailableError:
    return TargetUnavailableError(
        f"NATS: stream {stream} does not let itself be read: {error.description}",
        "look at its limits, and the rights of the user",
    )


@dataclass(frozen=True)
class StreamPlace:
    """All of a table that committed at or before some position has a stamp of at most `stamp`, and all that
    came later a higher one, and was put into the stream at `at` or after it."""

    at: datetime
    stamp: LSN


async def place_of(
    jetstream: Any, wire: Wire, table: str, position: EventPosition, published_at: datetime
) -> StreamPlace:
    """Of a position up to which all was published before `published_at`, by the publisher's clock.

    What is sent again after that is from after the position. Raises what the client raises,
    TargetUnavailableError.
    """
    stream, subject = wire.stream("wal"), wire.subject("wal", table)
    last = await last_message(jetstream, stream, subject)
    if last is None:
        # Nothing of it is there; what comes has a stamp above its own LSN.
        made = (await jetstream.stream_info(stream)).created
        return StreamPlace(made, position.commit_lsn)
    if _is_upto(last.headers, position):
        return StreamPlace(last.time, stamp_of(last.headers) or position.commit_lsn)
    for seconds in _LOOK_BACK_S:
        found = await _last_upto(jetstream, stream, subject, position, last.seq, published_at, seconds)
        if found is not None:
            return StreamPlace(found.metadata.timestamp, stamp_of(found.headers) or position.commit_lsn)
    made = (await jetstream.stream_info(stream)).created
    return StreamPlace(made, position.commit_lsn)


async def _last_upto(
    jetstream: Any,
    stream: str,
    subject: str,
    position: EventPosition,
    end: int,
    published_at: datetime,
    seconds: float | None,
) -> Msg | None:
    """The last message at or before the position, if one came within the seconds before `published_at`."""
    begin = ConsumerConfig(deliver_policy=DeliverPolicy.ALL)
    if seconds is not None:
        since = published_at - timedelta(seconds=seconds)
        begin = ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_TIME, opt_start_time=since)
    found = None
    async with aclosing(ordered_messages(jetstream, stream, subject, begin)) as batches:
        async for messages in batches:
            for message in messages:
                if _is_upto(message.headers, position):
                    found = message
            if not messages or messages[-1].metadata.sequence.stream >= end:
                break
    return found


def _is_upto(headers: Any, position: EventPosition) -> bool:
    """What creek itself has sent, which has no id, is from before us."""
    try:
        return EventPosition.parse((headers or {})[NATS_ID]) <= position
    except (KeyError, ConfigError):
        return True


def stamp_of(headers: Any) -> LSN | None:
    """The stamp that a message has; None where it does not say."""
    try:
        return LSN.parse((headers or {})[STAMP])
    except (KeyError, ValueError):
        return None
