"""Why NATS does not take what it is sent, and whether to try again."""

from __future__ import annotations

import ssl
from typing import Any

import nats.errors
import nats.js.errors

from airflow_provider_pgrepl.errors import PgReplError, TargetError, TargetUnavailableError

_DENIED = "permissions violation"
_TOO_LARGE = 10054
"""JetStream's error code for a message larger than the stream takes."""
_HINT = (
    "look at the rights of the connection's user: to publish and subscribe on the streams, `$JS.API.>` and"
    " `_INBOX.>`"
)


def error_of(reason: BaseException) -> PgReplError:
    """The error for what the client raised, without what may hold credentials."""
    if isinstance(reason, PgReplError):
        return reason
    if isinstance(reason, ssl.SSLCertVerificationError):
        return TargetError(
            f"NATS: its certificate was refused: {reason.verify_message}",
            "name the host as its certificate does, and give the authority's certificate in a file that"
            " SSL_CERT_FILE names",
        )
    if isinstance(reason, nats.js.errors.APIError):
        return away(reason.description or f"error {reason.err_code}")
    said = str(reason).lower()
    if "authorization violation" in said or "authentication expired" in said:
        return TargetError("NATS: the login was refused", "look at login and password of the connection")
    if _DENIED in said:
        return refused("the user lacks a right")
    if isinstance(reason, OSError) and reason.strerror:
        return away(reason.strerror)
    return away(type(reason).__name__)


def away(what: str) -> TargetUnavailableError:
    """The server takes nothing just now."""
    return TargetUnavailableError(
        f"NATS: {what}",
        "is the server there, with JetStream, and has it room? Events wait in the changelog meanwhile",
    )


def refused(what: str) -> TargetError:
    """The server takes nothing before somebody has changed something."""
    return TargetError(f"NATS: {what}", _HINT)


def is_too_large(error: dict[str, Any]) -> bool:
    """Whether JetStream does not take a message for its size."""
    return error.get("err_code") == _TOO_LARGE
