"""Messages of a JetStream stream in order, each once, over lost connections and servers that restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import nats.errors
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from airflow_provider_pgrepl.errors import TargetUnavailableError

_BATCH = 256
_LOOK_S, _PAUSE_S = 5.0, 0.5
_KEPT_S = 300.0
"""How long the server keeps a consumer that fetches nothing, while its reader is busy."""
_LOST = (nats.errors.Error, APIError, NotFoundError, ServiceUnavailableError, OSError)


async def ordered_messages(
    jetstream: Any, stream: str, subject: str, policy: DeliverPolicy, since: datetime | None = None
) -> AsyncIterator[Msg]:
    """Endless. `policy`: ALL, or BY_START_TIME with `since`. Raises TargetUnavailableError when the stream is
    not there at the beginning."""
    last = 0
    config = ConsumerConfig(deliver_policy=policy, opt_start_time=since)
    await _check(jetstream, stream)
    while True:
        try:
            async for message in _consumed(jetstream, stream, subject, config):
                last = message.metadata.sequence.stream
                yield message
        except _LOST:
            await asyncio.sleep(_PAUSE_S)
        if last:
            config = ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=last + 1)


async def _consumed(jetstream: Any, stream: str, subject: str, begin: ConsumerConfig) -> AsyncIterator[Msg]:
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
                continue
            for message in messages:
                # What a lost connection has swallowed, the server takes for delivered.
                if message.metadata.sequence.consumer != expected:
                    return
                expected += 1
                yield message
    finally:
        await _quietly_ended(consumer)


async def _quietly_ended(consumer: Any) -> None:
    try:
        await consumer.unsubscribe()
    except _LOST:
        return


async def _check(jetstream: Any, stream: str) -> None:
    try:
        await jetstream.stream_info(stream)
    except (*_LOST, TimeoutError) as error:
        raise TargetUnavailableError(
            f"NATS has no stream {stream}, or does not say so ({type(error).__name__})",
            "look at namespace and database, and that its publisher has run",
        ) from None
