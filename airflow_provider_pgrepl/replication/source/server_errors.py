"""The translation of PostgreSQL's errors into this package's, without text that may hold row values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg2

from airflow_provider_pgrepl.errors import (
    BusyError,
    PgReplError,
    PrivilegeError,
    ServerSettingError,
    SourceConnectionError,
    SourceError,
    one_line,
)

ROLLED_BACK = "40"
"""The SQLSTATE class of transactions that the server ended in favor of another one: deadlocks, and conflicts
with replay on a standby (https://www.postgresql.org/docs/current/hot-standby.html#HOT-STANDBY-CONFLICT)."""
LOCKS_SETTING = "max_locks_per_transaction"
_RETRIED_CLASSES = ("08", "53", "57", "58")
"""The SQLSTATE classes of temporary errors: lost connection, lack of resources, shutdown, system error.

https://www.postgresql.org/docs/current/errcodes-appendix.html
"""
# fmt: off
_NAMES_AND_NUMBERS = frozenset((
    "08", "0A", "0L", "0P", "25", "26", "28", "2B", "2D", "2F", "34", "3B", "3D", "3F", "40", "42", "53",
    "54", "55", "57", "58", "F0", "XX",
))
# fmt: on
"""The SQLSTATE classes whose messages, if the server's own, hold names and numbers but no values of rows.

Errors of data (22), constraints (23, 44), functions (38, 39, P0) and foreign servers (HV) are not among them.
"""
_LANGUAGES = frozenset(("plpy_elog.c", "plperl.c", "pltcl.c"))
"""PostgreSQL's source files in which procedural languages forward the errors that functions raise."""


_LOST = "check the network and the server. Airflow retries the task; a command must be run again"


@contextmanager
def source_errors(doing: str) -> Iterator[None]:
    """Translate psycopg2's errors of the block into this package's. `doing`: the action, for the message."""
    try:
        yield
    except psycopg2.Error as error:
        # Suppress the cause: the DETAIL of PostgreSQL's error may hold row values, and tracebacks are logged.
        raise translate(error, doing) from None


def translate(error: Any, doing: str) -> PgReplError:
    """Return this package's error for a psycopg2 error of an open connection, without row values."""
    code = error.pgcode or ""
    text, hint = f"{doing}: {describe(error)}", _server_hint(error)
    if code == "42501":
        return PrivilegeError(
            text,
            "grant the role the right that PostgreSQL names. For the source, pgrepl doctor FILE.json --script"
            " self-hosted prints the statements",
        )
    if code == "53400" or (code == "53200" and LOCKS_SETTING in hint):
        return ServerSettingError(text, hint or "raise the setting that the server names")
    if code[:2] == ROLLED_BACK:
        return BusyError(
            text,
            "run the command again: the server canceled the statement for another session or for WAL replay",
        )
    if code[:2] in _RETRIED_CLASSES:
        return SourceConnectionError(text, hint)
    lost = isinstance(error, psycopg2.OperationalError | psycopg2.InterfaceError)
    if not code and (lost or type(error) is psycopg2.DatabaseError):
        return SourceConnectionError(text, _LOST)
    return SourceError(text, hint)


def _server_hint(error: Any) -> str:
    """Return PostgreSQL's hint, or "" for an error whose text may quote values."""
    if _may_hold_values(error) or not error.diag:
        return ""
    return one_line(" ".join((error.diag.message_hint or "").split()))


def describe(error: Any) -> str:
    """Return PostgreSQL's message and SQLSTATE. If the message may quote values, return no message."""
    code = error.pgcode or ""
    if _may_hold_values(error):
        return describe_by_code(error)
    message = (error.diag.message_primary if error.diag else None) or str(error)
    return one_line(" ".join(message.split())) + (f" (SQLSTATE {code})" if code else "")


def describe_by_code(error: Any) -> str:
    """Return psycopg2's name of an error, and its SQLSTATE."""
    return f"{type(error).__name__} (SQLSTATE {error.pgcode})"


def _may_hold_values(error: Any) -> bool:
    """Return True unless the text is the client's, or the server's own of a class that quotes no values.

    A function can raise any text and any hint with any SQLSTATE.
    """
    if not error.pgcode:
        return False
    diag = error.diag
    is_raised = diag.source_function == "exec_stmt_raise" or diag.source_file in _LANGUAGES
    return is_raised or error.pgcode[:2] not in _NAMES_AND_NUMBERS
