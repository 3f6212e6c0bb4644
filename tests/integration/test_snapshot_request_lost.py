"""A request for a snapshot that is lost with the NATS server before a publisher has answered it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime

import nats
import pytest
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from airflow_provider_pgrepl.replication.creek import client
from airflow_provider_pgrepl.replication.creek.client import CreekClient, Snapshot
from airflow_provider_pgrepl.replication.creek.wire import Wire
from demo.nats import NatsServer
from tests.support.jetstream import running_nats

WIRE = Wire("CREEK", "shop")


def test_request_that_is_lost_with_the_server_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher reconnects after the client, which therefore asks before it can be answered."""
    monkeypatch.setattr(client, "_ANSWER_S", 10.0)
    monkeypatch.setattr(client, "_ASK_AGAIN_S", 0.2)
    with running_nats() as server:
        asyncio.run(asyncio.wait_for(ask(server), 300))


async def ask(server: NatsServer) -> None:
    async with CreekClient(server.uri, "shop") as creek:
        publisher = await nats.connect(server.uri, allow_reconnect=False)
        requested = await publisher.subscribe(WIRE.request("snap"))
        # A ping overtakes the subscription that the client has queued: only the second answer follows it.
        await publisher.flush()
        await publisher.flush()
        asking = asyncio.ensure_future(creek.snapshot("public", "t", 240))
        await next_request(requested, asking)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        while not creek._client.is_connected or not creek._client.stats["reconnects"]:
            await asyncio.sleep(0.05)
        # The client asks in vain: the server says at once that there is no publisher.
        await asyncio.wait([asking], timeout=1)
        assert not asking.done(), asking.exception()
        publisher = await nats.connect(server.uri)
        requested = await publisher.subscribe(WIRE.request("snap"))
        for _ in range(3):
            request = await next_request(requested, asking)
            # The stream of snapshots is not there yet, as after a restart, so that no row can be read.
            await request.respond(WIRE.new_snapshot("public.t", datetime.now(UTC)).encode())
        assert not asking.done(), asking.exception()
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        await publisher.close()


async def next_request(requested: Subscription, asking: asyncio.Future[Snapshot]) -> Msg:
    """Return the next request; fail with the client's error if it gives up instead."""
    waiting = asyncio.ensure_future(requested.next_msg(120))
    await asyncio.wait([waiting, asking], return_when=asyncio.FIRST_COMPLETED)
    assert waiting.done(), asking.exception()
    return await waiting
