"""Why NATS does not take what it is sent, and whether to try again."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import nats.errors
import nats.js.errors

from airflow_provider_pgrepl.errors import PgReplError, TargetError, TargetUnavailableError
from airflow_provider_pgrepl.replication.events.targets.base import certificate_refused
from airflow_provider_pgrepl.trace import log_unexpected

log = logging.getLogger(__name__)

_DENIED = "permissions violation"
_TOO_LARGE = 10054
"""JetStream's error code for a message larger than the stream takes."""
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


class JetStreamReasons:
    """Of one connection. `servers`: their URIs, of which no credentials are shown."""

    def __init__(self, servers: Iterable[str]) -> None:
        parts = [urlsplit(server) for server in servers]
        # A name alone is a token.
        self._user = next((one.username for one in parts if one.username and one.password), "")
        self.where = f"NATS at {', '.join(one.netloc.rpartition('@')[2] for one in parts)}"

    def error_of(self, reason: BaseException) -> PgReplError:
        """The error for what the client raised, without what may hold credentials."""
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
        """Log the trace of an exception that is none of the client's, nor of the network."""
        if not isinstance(reason, nats.errors.Error | OSError | asyncio.CancelledError):
            log_unexpected(log, doing, reason)

    def away(self, what: str) -> TargetUnavailableError:
        """The server takes nothing just now."""
        return TargetUnavailableError(
            f"{self.where}: {what}",
            "is the server there, with JetStream, and has it room? Events wait in the changelog meanwhile",
        )

    def refused(self, what: str) -> TargetError:
        """The server takes nothing before somebody has changed something."""
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
    """Whether JetStream does not take a message for its size."""
    return error.get("err_code") == _TOO_LARGE
