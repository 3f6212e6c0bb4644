"""The target RabbitMQ: a connection with one channel, and errors."""

from __future__ import annotations

import logging
import ssl
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import pika
from pika.exceptions import (
    AMQPConnectionError,
    ChannelClosedByBroker,
    IncompatibleProtocolError,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
)

from airflow_provider_pgrepl.errors import PgReplError, TargetError, TargetUnavailableError
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings
from airflow_provider_pgrepl.replication.settings.targets import SHORT_TEXT_BYTES
from airflow_provider_pgrepl.trace import log_unexpected

from .base import (
    RABBITMQ_PREFIX,
    LinkedTarget,
    PendingEvents,
    Refusal,
    UnacknowledgedEvent,
    attributes,
    certificate_refused,
    routing_key,
)

_CHUNK_BYTES = 64 << 10
# Reply codes of AMQP 0-9-1, 1.2.
ACCESS_REFUSED, NOT_FOUND, PRECONDITION_FAILED, _NOT_ALLOWED = 403, 404, 406, 530
_HEADER_BYTES = 100_000
"""The limit of headers in bytes: a frame has 131,072 by default, with more than the headers in it."""
log = logging.getLogger(__name__)
_CONNECT_S, _CLOSE_S = 30.0, 10.0
_WINDOW, _WINDOW_BYTES = 4_000, 16 << 20
"""The limits of unconfirmed messages and of their bytes."""
_HEARTBEAT_S = 20
_SCHEMES = ("amqp://", "amqps://")


class BufferingConnection(pika.SelectConnection):
    """A connection that joins small writes.

    pika writes each of the three frames of a message by its own call. In each call the thread releases the
    interpreter to other threads, and gets it back milliseconds later.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._gathered: list[bytes] | None = None
        super().__init__(*arguments, **named)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Join the data that is sent inside the block to large writes, the last of them at its end."""
        self._gathered, self._size = [], 0
        try:
            yield
        finally:
            self._flush()
            self._gathered = None

    def _adapter_emit_data(self, data: bytes) -> None:
        """Send or buffer bytes. Overrides the method of pika's adapters."""
        if self._gathered is None:
            super()._adapter_emit_data(data)
            return
        self._gathered.append(data)
        self._size += len(data)
        if self._size >= _CHUNK_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._gathered:
            super()._adapter_emit_data(b"".join(self._gathered))
            self._gathered, self._size = [], 0


class RabbitMQReasons:
    """The errors of one connection."""

    def __init__(self, parameters: pika.ConnectionParameters) -> None:
        self._host = parameters.virtual_host
        self._user = getattr(parameters.credentials, "username", "")
        self.where = f"RabbitMQ at {parameters.host}:{parameters.port}"

    def ended_by(self, reason: Any) -> PgReplError:
        """Return the error for the reason that pika reports when a connection ends.

        pika's guess of refused access is used only with the broker's reply code: a connection that is lost
        while it is opened was not refused.
        """
        said = str(reason.args[0]) if isinstance(reason, AMQPConnectionError) and reason.args else ""
        if isinstance(reason, ProbableAuthenticationError) and f"({ACCESS_REFUSED})" in said:
            return self.refused(f"the login of {self._user} was refused")
        is_closed = getattr(reason, "reply_code", None) == _NOT_ALLOWED
        if is_closed or (isinstance(reason, ProbableAccessDeniedError) and f"({_NOT_ALLOWED})" in said):
            return self.refused(f"the virtual host {self._host} was refused to {self._user}")
        cause = _cause(reason)
        if isinstance(cause, ssl.SSLCertVerificationError):
            return certificate_refused(self.where, cause)
        return self.away(text_of(reason))

    def away(self, what: str) -> TargetUnavailableError:
        """Return the error for a temporarily unavailable broker."""
        return TargetUnavailableError(
            f"{self.where}: {what}",
            "check that the broker runs and has free space. Events wait in the changelog until then",
        )

    def refused(self, what: str) -> TargetError:
        """Return the error for a broker that accepts nothing until an administrator changes something."""
        return TargetError(
            f"{self.where}: {what}", "look at the connection's user, its rights and the exchange's settings"
        )


def text_of(reason: Any) -> str:
    """Return the text of a reason of the broker or of pika, which holds neither credentials nor rows."""
    if getattr(reason, "reply_text", ""):
        return f"{reason.reply_code} {reason.reply_text}"
    cause = _cause(reason)
    if isinstance(cause, IncompatibleProtocolError):
        return "it does not speak AMQP 0-9-1 here, or expects TLS (amqps://)"
    if isinstance(cause, ssl.SSLError):
        return f"it does not speak TLS here as amqps:// expects: {cause.reason or 'the connection ended'}"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return "the connection ended" if cause is None else type(cause).__name__


def _cause(reason: Any) -> BaseException | None:
    """Return the innermost of pika's nested exceptions, each kind of which stores others in its own way."""
    inner = getattr(reason, "exception", None) or next(reversed(getattr(reason, "exceptions", ())), None)
    if inner is None and isinstance(reason, BaseException):
        inner = next((one for one in reason.args if isinstance(one, BaseException)), None)
    if inner is not None:
        return _cause(inner)
    return reason if isinstance(reason, BaseException) else None


def unsendable_reason(event: Event, settings: PublisherSettings) -> str:
    """Return the reason why an event can never be sent; an empty string if it can."""
    if len(event.body) > settings.max_event_bytes:
        return f"the event has {len(event.body):,} bytes, and max_event_bytes is less"
    said = event.business
    names = () if said is None else (said.type, said.content_type, *said.headers)
    for what, texts in (("routing key", (routing_key(event, settings),)), ("type or header", names)):
        if any(len(text.encode()) > SHORT_TEXT_BYTES for text in texts):
            return f"its {what} is longer than the {SHORT_TEXT_BYTES} bytes that AMQP allows"
    headers = {} if said is None else said.headers
    if sum(len(name.encode()) + len(value.encode()) for name, value in headers.items()) > _HEADER_BYTES:
        return f"its headers have more than {_HEADER_BYTES:,} bytes, and AMQP has them in one frame"
    return ""


class RabbitMQLink:
    """One connection, from its opening to its end.

    All methods except `start`, `send` and `stop` run in its own thread.
    """

    def __init__(
        self,
        parameters: pika.URLParameters,
        settings: PublisherSettings,
        refused: dict[str, str],
        suspects: set[str],
    ) -> None:
        """`refused` and `suspects` are shared by successive links.

        `refused`: the reasons why the broker refuses events, by id. `suspects`: the ids of events of which
        one closed a channel.
        """
        self._parameters, self._settings = parameters, settings
        self._reasons = RabbitMQReasons(parameters)
        self._refused, self._suspects = refused, suspects
        self._handed_over: list[PendingEvents] = []
        self._waiting: deque[UnacknowledgedEvent] = deque()
        self._on_the_way: dict[int, UnacknowledgedEvent] = {}
        self._bytes = self._tag = 0
        self._returned: set[str] = set()
        self._ready = threading.Event()
        self._error: PgReplError | None = None
        self._lock = threading.Lock()
        self._channel: Any = None
        self._connection: Any = None

    # --- called by the publisher's thread ---

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="pgrepl-rabbitmq", daemon=True)
        self._thread.start()
        if not self._ready.wait(_CONNECT_S):
            self.stop()
            raise self._reasons.away("does not answer")
        if self._error is not None:
            raise self._error

    @property
    def is_open(self) -> bool:
        return self._error is None

    def send(self, sending: PendingEvents) -> None:
        with self._lock:
            if self._error is None:
                self._handed_over.append(sending)
                self._connection.ioloop.add_callback_threadsafe(self._take)
                return
        sending.fail(self._error)

    def stop(self) -> None:
        with self._lock:
            if self._error is None and self._connection is not None:
                self._connection.ioloop.add_callback_threadsafe(self._close)
        self._thread.join(_CLOSE_S)

    # --- opening ---

    def _run(self) -> None:
        try:
            self._connection = BufferingConnection(
                self._parameters,
                on_open_callback=self._opened,
                on_open_error_callback=lambda _, error: self._end(error),
                on_close_callback=lambda _, reason: self._end(reason),
            )
            self._connection.add_on_connection_blocked_callback(self._blocked)
            self._connection.add_on_connection_unblocked_callback(
                lambda *_: log.info("RabbitMQ takes messages again")
            )
            self._connection.ioloop.start()
        except Exception as error:  # noqa: BLE001 - waiting callers must get every error
            log_unexpected(log, "the connection to RabbitMQ ended", error)
            self._end(error)

    def _opened(self, connection: Any) -> None:
        connection.channel(on_open_callback=self._look_for_exchange)

    def _look_for_exchange(self, channel: Any) -> None:
        """Use the exchange if it exists, whatever its type: declaring one needs an additional permission."""
        channel.add_on_close_callback(self._no_exchange)
        channel.exchange_declare(
            self._settings.exchange, passive=True, callback=lambda _: self._make_ready(channel)
        )

    def _no_exchange(self, _: Any, reason: Any) -> None:
        if self._channel is not None or getattr(reason, "reply_code", None) != NOT_FOUND:
            self._channel_closed(_, reason)
            return
        self._connection.channel(on_open_callback=self._declare_exchange)

    def _declare_exchange(self, channel: Any) -> None:
        channel.add_on_close_callback(self._channel_closed)
        channel.exchange_declare(
            self._settings.exchange,
            exchange_type="topic",
            durable=True,
            callback=lambda _: self._make_ready(channel),
        )

    def _make_ready(self, channel: Any) -> None:
        channel.add_on_return_callback(self._unrouted)
        channel.confirm_delivery(self._confirmed, callback=lambda _: self._ready.set())
        self._channel = channel

    # --- sending ---

    def _take(self) -> None:
        with self._lock:
            taken, self._handed_over = self._handed_over, []
        for sending in taken:
            self._waiting += (UnacknowledgedEvent(sending, index) for index in range(len(sending.events)))
        self._pump()

    def _pump(self) -> None:
        if self._channel is None or not self._channel.is_open:
            return
        with self._connection.gathering():
            self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting and self._has_room(self._waiting[0].event):
            one = self._waiting[0]
            reason = unsendable_reason(one.event, self._settings) or self._refused.pop(one.event.id, "")
            self._waiting.popleft()
            if reason:
                one.settle(Refusal(one.event, reason))
            else:
                self._publish(one)

    def _has_room(self, event: Event) -> bool:
        """Return True if an event can be sent now. A suspect is sent alone."""
        if self._suspects and len(self._on_the_way) == 1:
            (alone,) = self._on_the_way.values()
            if alone.event.id in self._suspects:
                return False
        if event.id in self._suspects:
            return not self._on_the_way
        return len(self._on_the_way) < _WINDOW and self._bytes < _WINDOW_BYTES

    def _publish(self, one: UnacknowledgedEvent) -> None:
        event = one.event
        self._tag += 1
        self._on_the_way[self._tag] = one
        self._bytes += len(event.body)
        said = event.business
        more = {} if said is None else dict(said.headers)
        if self._settings.cloudevents:
            found = attributes(event, self._settings)
            more |= {f"{RABBITMQ_PREFIX}{name}": value for name, value in found.items()}
        properties = pika.BasicProperties(
            content_type="application/json" if said is None else said.content_type,
            delivery_mode=2,
            message_id=event.id,
            timestamp=None if event.commit_ts is None else int(event.commit_ts.timestamp()),
            type=event.op if said is None else said.type,
            headers={**more, "generation": event.generation},
        )
        key = routing_key(event, self._settings)
        self._channel.basic_publish(self._settings.exchange, key, event.body, properties, mandatory=True)

    def _unrouted(self, _: Any, __: Any, properties: Any, ___: bytes) -> None:
        """Record a message without a queue. The broker returns it before it confirms it."""
        self._returned.add(properties.message_id)

    def _confirmed(self, frame: Any) -> None:
        if self._error is not None:
            # After a refusal the broker still confirms other messages, several at once, as if they included
            # the refused one.
            return
        if isinstance(frame.method, pika.spec.Basic.Nack):
            self._give_up(self._reasons.away("did not take a message: a queue is full, or failed"))
            return
        tag = frame.method.delivery_tag
        tags = list(takewhile(lambda one: one <= tag, self._on_the_way)) if frame.method.multiple else [tag]
        for number in tags:
            self._settle(self._on_the_way.pop(number))
        self._pump()

    def _settle(self, one: UnacknowledgedEvent) -> None:
        self._bytes -= len(one.event.body)
        self._suspects.discard(one.event.id)
        refusal = None
        if one.event.id in self._returned:
            self._returned.discard(one.event.id)
            key = routing_key(one.event, self._settings)
            what = f"exchange {self._settings.exchange} has no queue for routing key {key}"
            refusal = Refusal(one.event, what, is_unrouted=True)
        one.settle(refusal)

    # --- ending ---

    def _channel_closed(self, _: Any, reason: Any) -> None:
        code = reason.reply_code if isinstance(reason, ChannelClosedByBroker) else None
        if code == PRECONDITION_FAILED and self._on_the_way:
            ids = {one.event.id for one in self._on_the_way.values()}
            if len(ids) == 1:
                self._suspects.difference_update(ids)
                self._refused[ids.pop()] = f"RabbitMQ does not take it: {reason.reply_text}"
            else:
                self._suspects.update(ids)
        elif code in (ACCESS_REFUSED, PRECONDITION_FAILED):
            self._give_up(self._reasons.refused(str(reason.reply_text)))
        self._give_up(self._reasons.away(text_of(reason)))

    def _give_up(self, error: PgReplError) -> None:
        with self._lock:
            self._error = self._error or error
        self._close()

    def _close(self) -> None:
        if self._connection.is_open:
            self._connection.close()
        elif not self._connection.is_closing:
            self._end(None)

    def _end(self, reason: Any) -> None:
        """Fail all unconfirmed sendings, after the connection has ended."""
        with self._lock:
            self._error = self._error or self._reasons.ended_by(reason)
            lost = {id(sending): sending for sending in self._handed_over}
            self._handed_over = []
        lost |= {id(one.sending): one.sending for one in [*self._on_the_way.values(), *self._waiting]}
        self._on_the_way.clear()
        self._waiting.clear()
        for sending in lost.values():
            sending.fail(self._error)
        self._ready.set()
        if self._connection is not None:
            self._connection.ioloop.stop()

    def _blocked(self, _: Any, frame: Any) -> None:
        log.warning(
            "RabbitMQ temporarily accepts no messages (%s); waiting until it does",
            frame.method.reason or "no reason",
        )


class RabbitMQ(LinkedTarget[RabbitMQLink]):
    """A connection with one channel, served by its own thread.

    The thread answers heartbeats while nothing is sent. `uri`: `amqp(s)://user:password@host:port/vhost`; it
    is never logged.

    A message that the broker refuses, for example because it is too large, closes the channel, with all
    unconfirmed messages. These are then sent one at a time, to find the refused one.
    """

    def __init__(self, uri: str, settings: PublisherSettings) -> None:
        self._parameters = _parameters(uri)
        super().__init__(RabbitMQReasons(self._parameters).where)
        self._settings = settings
        self._refused: dict[str, str] = {}
        self._suspects: set[str] = set()

    def connect(self) -> None:
        """Connect, or connect again.

        Raises TargetUnavailableError, and TargetError if the login, virtual host or exchange is refused.
        """
        self.close()
        link = RabbitMQLink(self._parameters, self._settings, self._refused, self._suspects)
        link.start()
        self._link = link


def _parameters(uri: str) -> pika.URLParameters:
    try:
        parameters = pika.URLParameters(uri) if uri.startswith(_SCHEMES) else None
    except Exception:  # noqa: BLE001 - pika raises many, and their texts may hold the password
        parameters = None
    if parameters is None:
        raise TargetError(
            "the URI of RabbitMQ cannot be read",
            "give it as amqp://user:password@host:5672/vhost, with what is special in a name percent-encoded;"
            " a virtual host / is %2F",
        )
    parameters.heartbeat = _HEARTBEAT_S
    parameters.connection_attempts = 1
    return parameters
