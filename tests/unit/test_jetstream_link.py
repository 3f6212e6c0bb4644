"""A connection to NATS that ends."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import TargetUnavailableError
from airflow_provider_pgrepl.replication.events.targets.jetstream_link import JetStreamLink
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
