"""What the server answers to a replication command, or ends its stream with, as an error of ours."""

from __future__ import annotations

from psycopg import pq

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import (
    BusyError,
    PgReplError,
    PublicationError,
    SlotError,
    SourceConnectionError,
    UnsendableError,
)

_UNCONVERTIBLE = "a text in it cannot be converted from the database's encoding into UTF-8"
_TOO_LARGE = (
    "the values of a row in it are more than 1 GB as text, in which a bytea takes two bytes for each of its"
    " own"
)
_UNSENDABLE = {
    "22021": _UNCONVERTIBLE,
    "22P05": _UNCONVERTIBLE,
    "22": "a value in it, or the publication's row filter on it, is an error to the server",
    "54000": _TOO_LARGE,
    "54": "it is beyond a limit of the server",
    "XX": "the server meets an error of its own while it decodes it",
}
"""By SQLSTATE or its class: what the server meets in a transaction each time that it sends it."""

_ALLOCATION = "invalid memory alloc request size"
"""How mcxt.c begins what it says of more than 1 GB; the messages of internal errors are not translated."""

# The server's words are in its own language; both a slot and a publication that are not there are 42704.
_FINDS_PUBLICATION = "get_publication_oid"


def unsendable(result: pq.abc.PGresult) -> UnsendableError | None:
    """What ended a stream, if it is what the server met in a transaction.

    Its own words may hold values. Where in its sources it was raised holds none, and tells those who know
    them what has happened.
    """
    state = _sqlstate(result)
    why = _UNSENDABLE.get(state) or _UNSENDABLE.get(state[:2])
    if why is None:
        return None
    if _message(result).startswith(_ALLOCATION):
        why = _TOO_LARGE
    function = _field(result, pq.DiagnosticField.SOURCE_FUNCTION)
    file = _field(result, pq.DiagnosticField.SOURCE_FILE)
    line = _field(result, pq.DiagnosticField.SOURCE_LINE)
    place = f", raised by {function} at {file}:{line}" if function else ""
    return UnsendableError(f"{why} (SQLSTATE {state}{place})")


def refusal(result: pq.abc.PGresult) -> PgReplError:
    """The server's refusal, by SQLSTATE: object in use, undefined object, wrong state."""
    state = _sqlstate(result)
    text = _message(result) or "no message"
    if state == "55006":
        return BusyError(
            text,
            "another process reads this slot. It may be a previous run that still ends, or one whose host has"
            " vanished, which the server notices after a minute; this ends its sender at once: select"
            " pg_terminate_backend(active_pid) from pg_replication_slots where active and slot_name = 'SLOT'",
        )
    if state == "42704" and _field(result, pq.DiagnosticField.SOURCE_FUNCTION) == _FINDS_PUBLICATION:
        return PublicationError(text, hints.NEW_EPOCH)
    if state in ("42704", "55000"):
        return SlotError(text, hints.prove_source())
    return SourceConnectionError(f"the replication stream failed: {text} (SQLSTATE {state})")


def _sqlstate(result: pq.abc.PGresult) -> str:
    return _field(result, pq.DiagnosticField.SQLSTATE)


def _message(result: pq.abc.PGresult) -> str:
    return _field(result, pq.DiagnosticField.MESSAGE_PRIMARY)


def _field(result: pq.abc.PGresult, field: pq.DiagnosticField) -> str:
    return (result.error_field(field) or b"").decode(errors="replace")
