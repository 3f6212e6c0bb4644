"""Messages of a JetStream stream in order, each once, over lost connections and servers that restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import datetime
from itertools import count
from typing import Any

import nats.errors
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from airflow_provider_pgrepl.errors import TargetError, TargetUnavailableError

_BATCH = 256
_LOOK_S, _PAUSE_S = 1.0, 0.5
_KEPT_S = 300.0
"""How long the server keeps a consumer that fetches nothing, while its reader is busy."""
_PASSING = (NotFoundError, ServiceUnavailableError)
_LOST = (nats.errors.Error, APIError, OSError)
_PASSING_OR_AWAY = (*_PASSING, nats.errors.Error, OSError, TimeoutError)


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
