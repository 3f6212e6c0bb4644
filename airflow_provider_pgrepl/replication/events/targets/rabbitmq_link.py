"""One connection to RabbitMQ with one channel, from when it is opened until it has ended."""

from __future__ import annotations

import logging
import threading
from collections import deque
from itertools import takewhile
from typing import Any

import pika
from pika.exceptions import ChannelClosedByBroker

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.targets.base import OnTheWay, Refusal, Sending
from airflow_provider_pgrepl.replication.events.targets.cloud_events import RABBITMQ_PREFIX, attributes
from airflow_provider_pgrepl.replication.events.targets.gathering_connection import GatheringConnection
from airflow_provider_pgrepl.replication.events.targets.rabbitmq_reasons import (
    ACCESS_REFUSED,
    NOT_FOUND,
    PRECONDITION_FAILED,
    RabbitMQReasons,
    text_of,
    unfit,
)
from airflow_provider_pgrepl.replication.events.targets.routing import routing_key
from airflow_provider_pgrepl.replication.settings.publisher_settings import PublisherSettings
from airflow_provider_pgrepl.trace import log_unexpected

log = logging.getLogger(__name__)

_CONNECT_S, _CLOSE_S = 30.0, 10.0
_WINDOW, _WINDOW_BYTES = 4_000, 16 << 20
"""How much may be on the way, unconfirmed."""


class RabbitMQLink:
    """One connection, from when it is opened until it has ended; all but `start`, `send` and `stop` runs in
    its thread."""

    def __init__(
        self,
        parameters: pika.URLParameters,
        settings: PublisherSettings,
        refused: dict[str, str],
        suspects: set[str],
    ) -> None:
        """Both are kept from one link to the next: `refused`, why the broker does not take events, by id;
        `suspects`, ids of events of which one ended a channel."""
        self._parameters, self._settings = parameters, settings
        self._reasons = RabbitMQReasons(parameters)
        self._refused, self._suspects = refused, suspects
        self._handed_over: list[Sending] = []
        self._waiting: deque[OnTheWay] = deque()
        self._on_the_way: dict[int, OnTheWay] = {}
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

    def send(self, sending: Sending) -> None:
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
            self._connection = GatheringConnection(
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
        except Exception as error:  # noqa: BLE001 - whatever it is, who waits must be told
            log_unexpected(log, "the connection to RabbitMQ ended", error)
            self._end(error)

    def _opened(self, connection: Any) -> None:
        connection.channel(on_open_callback=self._look_for_exchange)

    def _look_for_exchange(self, channel: Any) -> None:
        """One that is there is taken as it is, of whichever type; to declare it takes a right more."""
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
            self._waiting += (OnTheWay(sending, index) for index in range(len(sending.events)))
        self._pump()

    def _pump(self) -> None:
        if self._channel is None or not self._channel.is_open:
            return
        with self._connection.gathering():
            self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting and self._has_room(self._waiting[0].event):
            one = self._waiting[0]
            reason = unfit(one.event, self._settings) or self._refused.pop(one.event.id, "")
            self._waiting.popleft()
            if reason:
                one.settle(Refusal(one.event, reason))
            else:
                self._publish(one)

    def _has_room(self, event: Event) -> bool:
        """One of which it is suspected that the broker does not take it goes alone."""
        if self._suspects and len(self._on_the_way) == 1:
            (alone,) = self._on_the_way.values()
            if alone.event.id in self._suspects:
                return False
        if event.id in self._suspects:
            return not self._on_the_way
        return len(self._on_the_way) < _WINDOW and self._bytes < _WINDOW_BYTES

    def _publish(self, one: OnTheWay) -> None:
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
        """Comes before the confirmation."""
        self._returned.add(properties.message_id)

    def _confirmed(self, frame: Any) -> None:
        if self._error is not None:
            # After a refusal others are still confirmed, several at once, as if the refused were among them.
            return
        if isinstance(frame.method, pika.spec.Basic.Nack):
            self._give_up(self._reasons.away("did not take a message: a queue is full, or failed"))
            return
        tag = frame.method.delivery_tag
        tags = list(takewhile(lambda one: one <= tag, self._on_the_way)) if frame.method.multiple else [tag]
        for number in tags:
            self._settle(self._on_the_way.pop(number))
        self._pump()

    def _settle(self, one: OnTheWay) -> None:
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
        """The connection is over: all that is not confirmed has failed."""
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
            "RabbitMQ takes no messages just now (%s): they wait until it does",
            frame.method.reason or "no reason",
        )
