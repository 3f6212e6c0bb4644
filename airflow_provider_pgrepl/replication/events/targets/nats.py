"""One connection to NATS, from when it is opened until it has ended."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any, NamedTuple

import nats
from nats.aio.msg import Msg

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.events.sent import Sent
from airflow_provider_pgrepl.replication.events.targets.base import OnTheWay, Refusal, Sending
from airflow_provider_pgrepl.replication.events.targets.jetstream_messages import (
    Message,
    Messages,
    UnsendableError,
)
from airflow_provider_pgrepl.replication.events.targets.jetstream_reasons import (
    JetStreamReasons,
    is_too_large,
)
from airflow_provider_pgrepl.replication.settings.publisher_settings import PublisherSettings
from airflow_provider_pgrepl.trace import trace_of

log = logging.getLogger(__name__)


_CONNECT_S, _CLOSE_S, _PING_S = 30.0, 10.0, 10
_ANSWER_S = 60.0
"""How long the server may take to acknowledge; one that stalls is found by its pings before."""
_LOOK_S = 1.0
_WINDOW, _WINDOW_BYTES = 4_000, 16 << 20
"""How much may be on the way, unacknowledged."""


class _OnTheWire(NamedTuple):
    one: OnTheWay
    subject: str
    size: int
    sent_at: float


class JetStreamLink:
    """All but `start`, `send` and `stop` runs in its thread."""

    def __init__(
        self, servers: list[str], settings: PublisherSettings, messages: Messages, sent: Sent
    ) -> None:
        """`messages`: of this connection alone."""
        self._servers, self._settings, self._sent = servers, settings, sent
        self._reasons = JetStreamReasons(servers)
        self._messages = messages
        self._waiting: deque[OnTheWay] = deque()
        self._on_the_way: dict[str, _OnTheWire] = {}
        self._sendings: dict[int, Sending] = {}
        self._bytes = self._tag = 0
        self._error: PgReplError | None = None
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._wake = asyncio.Event()
        self._client: Any = None
        self._is_connected = False

    # --- called by the publisher's thread ---

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="pgrepl-nats", daemon=True)
        self._thread.start()
        if not self._ready.wait(_CONNECT_S):
            self.stop()
            raise self._reasons.away("the server does not answer")
        if self._error is not None:
            raise self._error

    @property
    def is_open(self) -> bool:
        return self._error is None

    def send(self, sending: Sending) -> None:
        if not sending.events:
            return
        with self._lock:
            if self._error is None:
                # Here, so that who ends the connection knows of it, though its loop takes nothing any more.
                self._sendings[id(sending)] = sending
                self._loop.call_soon_threadsafe(self._take, sending)
                return
        sending.fail(self._error)

    def stop(self) -> None:
        with self._lock:
            if self._error is None:
                self._loop.call_soon_threadsafe(self._fail, self._reasons.away("the connection was closed"))
        self._thread.join(_CLOSE_S)

    # --- its life ---

    def _run(self) -> None:
        try:
            self._runner.run(self._live())
        except BaseException as error:  # noqa: BLE001 - whatever it is, who waits must be told
            self._reasons.log_unknown("the connection to NATS ended", error)
            self._fail(self._reasons.error_of(error))
        with self._lock:
            self._error = self._error or self._reasons.away("the connection ended")
            lost = [*self._sendings.values()]
            self._sendings.clear()
        # Before the loop is closed, which waits for tasks of the client: the publisher must not wait with it.
        for sending in lost:
            sending.fail(self._error)
        self._ready.set()
        self._runner.close()

    async def _live(self) -> None:
        connecting = nats.connect(
            self._servers,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            connect_timeout=int(_CONNECT_S / 4),
            ping_interval=_PING_S,
            max_outstanding_pings=2,
            error_cb=self._said,
            disconnected_cb=self._disconnected,
            name=f"pgrepl {self._settings.name}",
        )
        # Of several servers one may be away: what is said of it while others are tried is no reason to end.
        self._client = await asyncio.wait_for(connecting, _CONNECT_S * 0.8)
        try:
            self._is_connected = True
            await self._messages.begin(self._client)
            self._inbox = self._client.new_inbox()
            await self._client.subscribe(f"{self._inbox}.*", cb=self._acknowledged)
            self._ready.set()
            while self._error is None:
                await self._send_waiting()
                await self._wait()
        except BaseException as error:
            # Before the connection is closed, which would be another reason.
            self._fail(self._reasons.error_of(error))
            raise
        finally:
            await _quietly(self._messages.end())
            await _quietly(self._client.close())

    async def _wait(self) -> None:
        try:
            await asyncio.wait_for(self._wake.wait(), _LOOK_S)
        except TimeoutError:
            since = next((one.sent_at for one in self._on_the_way.values()), None)
            if since is not None and time.monotonic() - since > _ANSWER_S:
                self._fail(self._reasons.away(f"nothing was acknowledged for {_ANSWER_S:.0f} s"))
        self._wake.clear()

    def _fail(self, error: PgReplError) -> None:
        """The first reason is the one that is told."""
        with self._lock:
            self._error = self._error or error
        self._wake.set()

    async def _said(self, error: Exception) -> None:
        if not self._is_connected:
            return
        self._reasons.log_unknown("the connection to NATS ends", error)
        self._fail(self._reasons.error_of(error))

    async def _disconnected(self) -> None:
        self._fail(self._reasons.away("the connection was lost"))

    # --- sending ---

    def _take(self, sending: Sending) -> None:
        self._waiting += (OnTheWay(sending, index) for index in range(len(sending.events)))
        self._wake.set()

    async def _send_waiting(self) -> None:
        while self._waiting and self._error is None:
            if len(self._on_the_way) >= _WINDOW or self._bytes >= _WINDOW_BYTES:
                return
            await self._publish(self._waiting.popleft())

    async def _publish(self, one: OnTheWay) -> None:
        try:
            message = await self._messages.of(one.event)
            self._check_size(message)
        except UnsendableError as error:
            self._settle(one, Refusal(one.event, str(error)))
            return
        self._tag += 1
        tag = str(self._tag)
        self._on_the_way[tag] = _OnTheWire(one, message.subject, len(message.payload), time.monotonic())
        self._bytes += len(message.payload)
        await self._client.publish(
            message.subject, message.payload, reply=f"{self._inbox}.{tag}", headers=message.headers
        )

    def _check_size(self, message: Message) -> None:
        if message.size > self._settings.max_event_bytes:
            raise UnsendableError(f"the event has {message.size:,} bytes, and max_event_bytes is less")
        room = self._client.max_payload - len(message.payload)
        if room > self._client.max_payload // 2 and message.has_small_headers:
            return
        headers = sum(len(name) + len(value.encode()) + 4 for name, value in message.headers.items())
        if room < 18 + headers:
            raise UnsendableError(
                f"the event has {message.size:,} bytes, more than the server's max_payload has room for"
            )

    async def _acknowledged(self, message: Msg) -> None:
        found = self._on_the_way.pop(message.subject.rpartition(".")[2], None)
        if found is None:
            return
        one = found.one
        self._bytes -= found.size
        answer = _answer(message.data)
        error = answer.get("error")
        if error is None and answer.get("stream") == self._messages.stream and "seq" in answer:
            self._settle(one)
        elif isinstance(error, dict) and is_too_large(error):
            self._settle(one, Refusal(one.event, f"NATS does not take it: {error.get('description')}"))
        elif isinstance(error, dict):
            self._fail(self._reasons.away(f"the stream does not take an event: {error.get('description')}"))
        else:
            stream = self._messages.stream
            self._fail(self._reasons.away(f"stream {stream} does not take {found.subject}"))
        if self._waiting and len(self._on_the_way) < _WINDOW // 2:
            self._wake.set()

    def _settle(self, one: OnTheWay, refusal: Refusal | None = None) -> None:
        if refusal is None:
            event = one.event
            self._sent.counts[event.op, event.table] += 1
            self._sent.commit_ts = event.commit_ts
        one.settle(refusal)
        if one.sending.is_done:
            self._sendings.pop(id(one.sending), None)


def _answer(data: bytes) -> dict[str, Any]:
    """Of JetStream; empty when it is nobody's who has the stream."""
    try:
        found = json.loads(data)
        return found if isinstance(found, dict) else {}
    except ValueError:
        return {}


async def _quietly(closing: Coroutine[Any, Any, None]) -> None:
    """What ended the connection is known already."""
    try:
        await asyncio.wait_for(closing, _CLOSE_S / 2)
    except Exception as error:  # noqa: BLE001 - whatever the client raises
        log.debug("the connection did not close: %s", trace_of(error))
