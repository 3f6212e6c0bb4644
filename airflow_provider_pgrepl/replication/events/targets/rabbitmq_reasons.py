"""Why a connection to RabbitMQ ended, and whether to try again; why an event is not sent."""

from __future__ import annotations

import ssl
from typing import Any

import pika
from pika.exceptions import (
    AMQPConnectionError,
    IncompatibleProtocolError,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
)

from airflow_provider_pgrepl.errors import PgReplError, TargetError, TargetUnavailableError
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.targets.base import certificate_refused
from airflow_provider_pgrepl.replication.events.targets.routing import routing_key
from airflow_provider_pgrepl.replication.settings.publisher_settings import (
    SHORT_TEXT_BYTES,
    PublisherSettings,
)

# Reply codes of AMQP 0-9-1, 1.2.
ACCESS_REFUSED, NOT_FOUND, PRECONDITION_FAILED, _NOT_ALLOWED = 403, 404, 406, 530

_HEADER_BYTES = 100_000
"""A frame has 131,072 at RabbitMQ, unless configured; and there is more in it."""


class RabbitMQReasons:
    """Of one connection."""

    def __init__(self, parameters: pika.ConnectionParameters) -> None:
        self._host = parameters.virtual_host
        self._user = getattr(parameters.credentials, "username", "")
        self.where = f"RabbitMQ at {parameters.host}:{parameters.port}"

    def ended_by(self, reason: Any) -> PgReplError:
        """The error for what pika gives as the reason of a connection's end.

        Who only lost the connection while it was being opened was not refused, whatever pika supposes.
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
        """The broker takes nothing just now."""
        return TargetUnavailableError(
            f"{self.where}: {what}",
            "is the broker there, and has it room? Events wait in the changelog meanwhile",
        )

    def refused(self, what: str) -> TargetError:
        """The broker takes nothing before somebody has changed something."""
        return TargetError(
            f"{self.where}: {what}", "look at the connection's user, its rights and the exchange's settings"
        )


def text_of(reason: Any) -> str:
    """Of a broker's or pika's reason, which holds neither credentials nor rows."""
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
    """The innermost of pika's exceptions, each of which holds others in its own way."""
    inner = getattr(reason, "exception", None) or next(reversed(getattr(reason, "exceptions", ())), None)
    if inner is None and isinstance(reason, BaseException):
        inner = next((one for one in reason.args if isinstance(one, BaseException)), None)
    if inner is not None:
        return _cause(inner)
    return reason if isinstance(reason, BaseException) else None


def unfit(event: Event, settings: PublisherSettings) -> str:
    """Why an event cannot be sent at all; empty when it can."""
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
