"""The target NATS JetStream, which acknowledges each event: a connection, the conversion of events to
messages, and errors. Events are JSON unless `messages` is replaced.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote, urlsplit

import nats
import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from airflow_provider_pgrepl.errors import PgReplError, TargetError, TargetUnavailableError
from airflow_provider_pgrepl.replication.events.event import Event, EventNumbers, PublishedCounts
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings
from airflow_provider_pgrepl.trace import log_unexpected, trace_of

from .base import (
    NATS_ID,
    NATS_PREFIX,
    LinkedTarget,
    PendingEvents,
    Refusal,
    Target,
    UnacknowledgedEvent,
    attributes,
    certificate_refused,
    subject,
)

_API_S = 20.0
_LONGEST_SUBJECT = 1_024
"""In bytes. A server closes a connection with commands of more than 4,096 bytes (max_control_line)."""
_NAME = re.compile(r"[!-9;-~]+")
"""The name of a header: printable ASCII without the colon, as in HTTP."""
_NATS = "nats-"
"""The prefix of headers that JetStream interprets (Nats-Rollup, Nats-TTL, …)."""
_PRINTABLE = "".join(map(chr, range(0x21, 0x7F))).replace('"', "").replace("%", "")
log = logging.getLogger(__name__)
_DENIED = "permissions violation"
_TOO_LARGE = 10054
"""JetStream's error code for a message that is larger than the stream accepts."""
_SAID: dict[type[BaseException], str] = {
    TimeoutError: "it does not answer in time",
    nats.errors.TimeoutError: "it does not answer in time",
    nats.errors.NoServersError: "no server answers",
    nats.errors.NoRespondersError: "JetStream does not answer: is it switched on?",
    nats.errors.StaleConnectionError: "the connection went silent",
    nats.errors.ConnectionClosedError: "the connection was closed",
    nats.errors.SecureConnRequiredError: "it expects TLS: tls://",
    nats.errors.SecureConnWantedError: "it does not speak TLS: nats://",
}
_HINT = (
    "look at the rights of the connection's user: to publish and subscribe on the streams, `$JS.API.>` and"
    " `_INBOX.>`"
)
_CONNECT_S, _CLOSE_S, _PING_S = 30.0, 10.0, 10
_ANSWER_S = 60.0
"""The time limit for an acknowledgment. The pings detect a stalled server earlier."""
_LOOK_S = 1.0
_WINDOW, _WINDOW_BYTES = 4_000, 16 << 20
"""The limits of unacknowledged messages and of their bytes."""
_SCHEMES = ("nats", "tls")


class UnsendableEventError(Exception):
    """An event cannot be sent until a person fixes the cause. The text says why."""


class NatsMessage(NamedTuple):
    """The message of one event.

    `size`: the bytes of the body, which limits apply to. `has_small_headers`: True if only the publisher
    determines the headers.
    """

    subject: str
    payload: bytes
    headers: dict[str, str]
    size: int
    has_small_headers: bool = True


class Messages(Protocol):
    """The conversion from events to messages, for one connection.

    `begin` and `end` raise the client's errors.
    """

    stream: str
    """The stream that must acknowledge the messages."""

    async def begin(self, client: Any) -> None:
        """Create the missing streams."""

    async def of(self, event: Event) -> NatsMessage:
        """Return the message of an event. Raises UnsendableEventError."""

    def skip(self, event: Event) -> None:
        """Forget an event that is not sent, now or later."""

    async def end(self) -> None:
        """Clean up after the connection has ended."""


class PlainMessages:
    """Sends bodies unchanged to one stream.

    A missing stream is created with all subjects below its name.
    """

    def __init__(self, settings: PublisherSettings) -> None:
        self._settings, self.stream = settings, settings.stream

    async def begin(self, client: Any) -> None:
        jetstream = client.jetstream(timeout=_API_S)
        try:
            await jetstream.stream_info(self.stream)
        except NotFoundError:
            await jetstream.add_stream(name=self.stream, subjects=[f"{self.stream}.>"])

    async def of(self, event: Event) -> NatsMessage:
        place = subject(event, self._settings)
        if place == self.stream:
            raise UnsendableEventError(
                "the event's subject is only the stream's name: the event has no route"
            )
        if len(place.encode()) > _LONGEST_SUBJECT:
            raise UnsendableEventError(f"the event's subject has more than {_LONGEST_SUBJECT:,} bytes")
        return NatsMessage(place, event.body, self._headers(event), len(event.body), event.business is None)

    def skip(self, event: Event) -> None:
        """Do nothing: no message names an earlier one."""

    async def end(self) -> None:
        """Do nothing."""

    def _headers(self, event: Event) -> dict[str, str]:
        said = event.business
        found = {} if said is None else _checked(dict(said.headers))
        if self._settings.cloudevents:
            given = attributes(event, self._settings) | {
                "datacontenttype": "application/json" if said is None else said.content_type
            }
            found |= {f"{NATS_PREFIX}{name}": _encoded(value) for name, value in given.items()}
        # The publisher's own headers come last, so that no other header can replace them.
        own = {"Pgrepl-Op": event.op, "Content-Type": "application/json"}
        if said is not None:
            own = _checked({"Pgrepl-Type": said.type, "Content-Type": said.content_type})
        return found | own | identity(event) | {"Pgrepl-Generation": str(event.generation)}


def identity(event: Event) -> dict[str, str]:
    """Return the headers that identify an event.

    JetStream drops a message whose id it received recently. An event that is sent again must not be dropped:
    JetStream would drop what it has, and accept what it refused before, out of order. The message id
    therefore has the generation.
    """
    return {"Nats-Msg-Id": f"{event.id}-{event.generation}", NATS_ID: event.id}


def _checked(headers: dict[str, str]) -> dict[str, str]:
    """Return the headers. Raises UnsendableEventError for those that NATS would change or interpret."""
    for name, value in headers.items():
        if not _NAME.fullmatch(name) or name.lower().startswith(_NATS):
            raise UnsendableEventError(
                f"the event's header {name!r} has a name that NATS rejects or reserves"
            )
        if value != value.strip() or any(sign in value for sign in "\r\n"):
            raise UnsendableEventError(
                f"the event's header {name} has a line break, or begins or ends with white space"
            )
    return headers


@lru_cache(1_000)
def _encoded(value: str) -> str:
    """Percent-encode a value as the HTTP binding of CloudEvents (3.1.3.2) and its NATS binding do."""
    return quote(value, safe=_PRINTABLE)


class JetStreamReasons:
    """The errors of one connection. `servers`: URIs, whose credentials are never shown."""

    def __init__(self, servers: Iterable[str]) -> None:
        parts = [urlsplit(server) for server in servers]
        # A name without a password is a token.
        self._user = next((one.username for one in parts if one.username and one.password), "")
        self.where = f"NATS at {', '.join(one.netloc.rpartition('@')[2] for one in parts)}"

    def error_of(self, reason: BaseException) -> PgReplError:
        """Return the error for an exception of the client, without text that may hold credentials."""
        if isinstance(reason, PgReplError):
            return reason
        if isinstance(reason, ssl.SSLCertVerificationError):
            return certificate_refused(self.where, reason)
        if isinstance(reason, nats.js.errors.APIError):
            return self.away(reason.description or f"error {reason.err_code}")
        said = str(reason).lower()
        if "authorization violation" in said or "authentication expired" in said:
            return TargetError(
                f"{self.where}: the login{f' of {self._user}' if self._user else ''} was refused",
                "look at login and password of the connection",
            )
        if _DENIED in said:
            return self.refused("the user lacks a right")
        return self.away(_text_of(reason))

    def log_unknown(self, doing: str, reason: BaseException) -> None:
        """Log the trace of an exception that is neither the client's nor a network error."""
        if not isinstance(reason, nats.errors.Error | OSError | asyncio.CancelledError):
            log_unexpected(log, doing, reason)

    def away(self, what: str) -> TargetUnavailableError:
        """Return the error for a temporarily unavailable server."""
        return TargetUnavailableError(
            f"{self.where}: {what}",
            "check that the server runs with JetStream and has free space. Events wait in the changelog"
            " until then",
        )

    def refused(self, what: str) -> TargetError:
        """Return the error for a server that accepts nothing until an administrator changes something."""
        return TargetError(f"{self.where}: {what}", _HINT)


def _text_of(reason: BaseException) -> str:
    if isinstance(reason, ssl.SSLError):
        return f"it does not speak TLS here as tls:// expects: {reason.reason or 'the connection ended'}"
    for kind, said in _SAID.items():
        if isinstance(reason, kind):
            return said
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return type(reason).__name__


def is_too_large(error: dict[str, Any]) -> bool:
    """Return True if JetStream rejected a message because of its size."""
    return error.get("err_code") == _TOO_LARGE


class _OnTheWire(NamedTuple):
    one: UnacknowledgedEvent
    subject: str
    size: int
    sent_at: float


class JetStreamLink:
    """One connection. All methods except `start`, `send` and `stop` run in its own thread."""

    def __init__(
        self, servers: list[str], settings: PublisherSettings, messages: Messages, sent: PublishedCounts
    ) -> None:
        """`messages`: the converter, for this connection only."""
        self._servers, self._settings, self._sent = servers, settings, sent
        self._reasons = JetStreamReasons(servers)
        self._messages = messages
        self._waiting: deque[UnacknowledgedEvent] = deque()
        self._on_the_way: dict[str, _OnTheWire] = {}
        self._sendings: dict[int, PendingEvents] = {}
        self._refused: set[int] = set()
        """The relations of rejected events, by oid."""
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

    def send(self, sending: PendingEvents) -> None:
        if not sending.events:
            return
        with self._lock:
            if self._error is None:
                # Register here, so that the sending fails if the connection ends before its loop accepts the
                # call.
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
        except BaseException as error:  # noqa: BLE001 - waiting callers must get every error
            self._reasons.log_unknown("the connection to NATS ended", error)
            self._fail(self._reasons.error_of(error))
        with self._lock:
            self._error = self._error or self._reasons.away("the connection ended")
            lost = [*self._sendings.values()]
            self._sendings.clear()
        # Fail the sendings before closing the loop: closing waits for tasks of the client, and the publisher
        # must not.
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
        # One of several servers may be unavailable: its error, while others are tried, must not end the
        # connection.
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
            # Record this error first: closing the connection would report another one.
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
        """End the connection. Only the first error is kept and reported."""
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

    def _take(self, sending: PendingEvents) -> None:
        self._waiting += (UnacknowledgedEvent(sending, index) for index in range(len(sending.events)))
        self._wake.set()

    async def _send_waiting(self) -> None:
        while self._waiting and self._error is None:
            if len(self._on_the_way) >= _WINDOW or self._bytes >= _WINDOW_BYTES:
                return
            await self._publish(self._waiting.popleft())

    async def _publish(self, one: UnacknowledgedEvent) -> None:
        is_skipping = self._settings.on_error == "skip_and_record"
        if one.event.relation_id in self._refused and not is_skipping:
            # The next run sends it after the rejected one: consumers then get both in order.
            self._settle(one, Refusal(one.event, "an earlier event of its table was rejected"))
            return
        try:
            message = await self._messages.of(one.event)
            self._check_size(message)
        except UnsendableEventError as error:
            if is_skipping:
                self._messages.skip(one.event)
            self._settle(one, Refusal(one.event, str(error)))
            return
        self._tag += 1
        tag = str(self._tag)
        self._on_the_way[tag] = _OnTheWire(one, message.subject, len(message.payload), time.monotonic())
        self._bytes += len(message.payload)
        await self._client.publish(
            message.subject, message.payload, reply=f"{self._inbox}.{tag}", headers=message.headers
        )

    def _check_size(self, message: NatsMessage) -> None:
        if message.size > self._settings.max_event_bytes:
            raise UnsendableEventError(f"the event has {message.size:,} bytes, and max_event_bytes is less")
        room = self._client.max_payload - len(message.payload)
        if room > self._client.max_payload // 2 and message.has_small_headers:
            return
        headers = sum(len(name) + len(value.encode()) + 4 for name, value in message.headers.items())
        if room < 18 + headers:
            raise UnsendableEventError(
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

    def _settle(self, one: UnacknowledgedEvent, refusal: Refusal | None = None) -> None:
        if refusal is not None:
            self._refused.add(one.event.relation_id)
        else:
            event = one.event
            self._sent.counts[event.op, event.table] += 1
            self._sent.commit_ts = event.commit_ts
        one.settle(refusal)
        if one.sending.is_done:
            self._sendings.pop(id(one.sending), None)


def _answer(data: bytes) -> dict[str, Any]:
    """Parse an acknowledgment of JetStream. Returns an empty dictionary for an answer of another program."""
    try:
        found = json.loads(data)
        return found if isinstance(found, dict) else {}
    except ValueError:
        return {}


async def _quietly(closing: Coroutine[Any, Any, None]) -> None:
    """Wait until the connection is closed, and only log errors: the cause of its end is known already."""
    try:
        await asyncio.wait_for(closing, _CLOSE_S / 2)
    except Exception as error:  # noqa: BLE001 - whatever the client raises
        log.debug("the connection did not close: %s", trace_of(error))


class JetStream(LinkedTarget[JetStreamLink]):
    """A connection to NATS, served by its own thread.

    `uri`: `nats://user:password@host:port`, or `tls://…`; several are separated by commas. It is never
    logged. Raises TargetError for an invalid URI.
    """

    def __init__(self, uri: str, settings: PublisherSettings) -> None:
        self.servers = uri.split(",")
        if not all(map(_is_readable, self.servers)):
            raise TargetError(
                "the URI of NATS cannot be read",
                "give it as nats://user:password@host:4222, or tls://…, several servers with commas between;"
                " what is special in a password is percent-encoded",
            )
        super().__init__(JetStreamReasons(self.servers).where)
        self._settings, self.stamps = settings, EventNumbers()
        self.sent = PublishedCounts()
        self.messages: Callable[[], Messages] = lambda: PlainMessages(settings)
        """Returns, for each connection, the converter from events to messages."""

    @property
    def stamp(self) -> int:
        return self.stamps.last

    @stamp.setter
    def stamp(self, stamp: int) -> None:
        self.stamps.last = stamp

    def connect(self) -> None:
        """Connect. Raises TargetUnavailableError, and TargetError if the login or a permission is refused."""
        self.close()
        link = JetStreamLink(self.servers, self._settings, self.messages(), self.sent)
        link.start()
        self._link = link


def jetstream_of(target: Target) -> JetStream:
    """Return the target of a publisher whose format has snapshots: only JetStream serves them."""
    assert isinstance(target, JetStream)
    return target


def _is_readable(server: str) -> bool:
    try:
        parts = urlsplit(server)
        # Reading the port checks it: an invalid one raises ValueError.
        return parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0 and not parts.fragment
    except ValueError:
        return False
