"""Answers to who asks for schemas and snapshots, on a connection of their own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import nats
from nats.aio.msg import Msg

from airflow_provider_pgrepl.replication.creek.subjects import Wire
from airflow_provider_pgrepl.replication.events.targets.jetstream_reasons import JetStreamReasons

log = logging.getLogger(__name__)

Accept = Callable[[bytes], str | None]
"""Given a request for a snapshot: the subject to which it will be sent, or None."""
_CONNECT_S, _PING_S = 20.0, 10
_MOST_WAITING, _MOST_BYTES, _LARGEST = 1_000, 1 << 20, 4_096
"""Requests that wait, their bytes, and those of one."""
_SAY_EVERY_S = 60.0


class Requests:
    """Anybody may send anything there, odd bytes or very much of it: it reaches no event's connection, and
    costs no more than its asker an answer."""

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
        """Raises what the client raises."""
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
        await self._client.flush()

    async def stop(self) -> None:
        """Answer nobody any more."""
        await self._client.close()

    async def _serve(self, kind: Any, answer: Callable[[bytes], Awaitable[bytes | None]]) -> None:
        async def asked(request: Msg) -> None:
            if not self._may_be_answered(request):
                return
            try:
                found = await answer(request.data)
                if found is not None:
                    await request.respond(found)
            except Exception as error:  # noqa: BLE001 - whatever somebody's request brings about
                await self._say(error)

        subject = self._wire.request(kind)
        await self._client.subscribe(
            subject, cb=asked, pending_msgs_limit=_MOST_WAITING, pending_bytes_limit=_MOST_BYTES
        )

    def _may_be_answered(self, request: Msg) -> bool:
        """Nothing is written into a stream for who may not write there."""
        is_ours = request.reply.startswith(("$", *self._wire.own))
        return bool(request.reply) and not is_ours and len(request.data) <= _LARGEST

    async def _schema(self, request: bytes) -> bytes | None:
        """creek answers nothing to a fingerprint that it does not know."""
        return self._find_schema(request.decode(errors="replace"))

    async def _snapshot(self, request: bytes) -> bytes | None:
        assert self._accept is not None
        subject = await asyncio.to_thread(self._accept, request)
        return None if subject is None else subject.encode()

    async def _say(self, error: Exception) -> None:
        """Not each time: that may be very often."""
        if time.monotonic() - self._said_at >= _SAY_EVERY_S:
            self._said_at = time.monotonic()
            said = self._reasons.error_of(error).message
            log.warning("somebody who asked for a schema or a snapshot: %s", said)
            self._reasons.log_unknown("answering who asks for a schema or a snapshot", error)
