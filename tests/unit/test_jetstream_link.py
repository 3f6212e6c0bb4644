"""A connection to NATS that ends."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import TargetUnavailableError
from airflow_provider_pgrepl.replication.events.targets.base import PendingEvents
from airflow_provider_pgrepl.replication.events.targets.jetstream import JetStreamLink, NatsMessage
from tests.unit.test_publisher_parts import SETTINGS

stub: Any = SimpleNamespace


def test_the_publisher_hears_of_the_end_though_a_task_of_the_client_does_not_end(monkeypatch):
    released = threading.Event()

    async def linger() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            while not released.is_set():
                await asyncio.sleep(0.01)

    async def lose_the_server(self: Any) -> None:
        self._task = asyncio.create_task(linger())
        await asyncio.sleep(0)
        raise OSError("connection refused")

    monkeypatch.setattr(JetStreamLink, "_live", lose_the_server)
    link = JetStreamLink(["nats://host:4222"], SETTINGS, stub(), stub())
    try:
        with pytest.raises(TargetUnavailableError, match="OSError"):
            link.start()
    finally:
        released.set()
        link.stop()


@pytest.mark.parametrize(
    ("on_error", "sent", "refused"),
    [("stop_table", [1, 4], [2, 3]), ("skip_and_record", [1, 3, 4], [2])],
)
def test_events_after_a_rejected_one_of_their_table_wait_for_the_next_run(on_error, sent, refused):
    """A consumer would otherwise get the rejected event after them."""
    events = [event(1, 10), event(2, 10, size=5_000), event(3, 10), event(4, 20)]
    link = JetStreamLink(
        ["nats://host:4222"], replace(SETTINGS, on_error=on_error, max_event_bytes=1_000), Stub(), stub()
    )
    published: list[int] = []

    async def publish(subject: str, *_: Any, **__: Any) -> None:
        published.append(int(subject))

    link._client, link._inbox = stub(max_payload=1 << 20, publish=publish), "_INBOX"
    sending = PendingEvents(events)
    link._take(sending)
    asyncio.run(link._send_waiting())
    assert published == sent
    for number in sent:
        sending.settle(number - 1)
    assert [int(refusal.event.id) for refusal in sending.refusals] == refused


class Stub:
    """Messages that have the event's id as their subject."""

    stream = "s"

    async def of(self, event: Any) -> NatsMessage:
        return NatsMessage(event.id, event.body, {}, len(event.body))

    def skip(self, event: Any) -> None:
        """Do nothing."""


def event(number: int, relation_id: int, size: int = 1) -> Any:
    return stub(id=str(number), relation_id=relation_id, body=b"x" * size)
