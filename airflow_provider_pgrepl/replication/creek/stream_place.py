"""Where in the stream of changes a snapshot belongs: after which of its table's messages."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig, DeliverPolicy

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.creek.last_message import last_message
from airflow_provider_pgrepl.replication.creek.stream_reading import ordered_messages
from airflow_provider_pgrepl.replication.creek.subjects import Wire
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.targets.cloud_events import NATS_ID
from airflow_provider_pgrepl.replication.postgres.lsn import LSN

STAMP = "Pgrepl-Stamp"
"""Header of a change: the stamp that it has this time."""
_LOOK_BACK_S = (10.0, 600.0, None)
"""How far back it looks, first and then; None: to the beginning."""


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
