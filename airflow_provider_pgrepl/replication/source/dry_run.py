"""A trial run of SQL, in a transaction that is rolled back and that the SQL itself cannot end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg2

from airflow_provider_pgrepl.errors import BusyError, ConfigError, PgReplError

from .connection import ANSWER_LIMIT_S, Connection, limit_idleness, patience, pin_statement, row
from .server_errors import describe, describe_by_code, source_errors, translate

_RUN = "DO 'BEGIN EXECUTE pg_catalog.current_setting(''pgrepl.migration''); END'"
"""A text that EXECUTE runs cannot end the transaction that it runs in."""

_SKIPPED = r"(?:\s|--[^\n]*\n|/\*(?:[^*]|\*(?!/))*\*/)*"
_BEGIN = re.compile(
    _SKIPPED + r"(?:BEGIN|START\s+TRANSACTION)(?:\s+(?:WORK|TRANSACTION))?\s*;", re.IGNORECASE
)
_COMMIT = re.compile(r";\s*(COMMIT(?:\s+(?:WORK|TRANSACTION))?\s*;?)" + _SKIPPED + r"\Z", re.IGNORECASE)

_HINTS = {
    "0A000": "take BEGIN, COMMIT, ROLLBACK and SAVEPOINT out, or try the parts between them one by one",
    "2D000": "no block or procedure of it may end the transaction: take that part out of what is tried",
    "25001": "it cannot be undone, so it cannot be tried: take it out of what is tried",
    "42501": "the role that tries it needs the rights of the one that will run it",
    "57014": "it took longer than the check may take: give it more time, or a smaller database",
}
_MAKES_UNLOGGED = "ATPrepChangePersistence"
"""PostgreSQL's function that rejects SET UNLOGGED of a published table. Its message may be translated."""


@contextmanager
def undone(connection: Connection) -> Iterator[None]:
    """Run the block in a transaction that is always rolled back, and check that it was.

    Raises ConfigError if the block has ended the transaction.
    """
    with source_errors("trying a migration"):
        _execute(connection, "BEGIN")
        limit_idleness(connection)
        number = _transaction(connection)
    try:
        yield
        with source_errors("trying a migration"):
            same = _transaction(connection) == number
    finally:
        if not connection.closed:
            with source_errors("undoing the migration"):
                _execute(connection, "ROLLBACK")
    with source_errors("undoing the migration"):
        ended = row(connection, "SELECT pg_catalog.pg_xact_status(%s::pg_catalog.xid8)", (number,))[0]
    if not same or ended != "aborted":
        raise ConfigError("the migration has ended the transaction that it was tried in, and was not undone")


def _transaction(connection: Connection) -> str:
    return str(row(connection, "SELECT pg_catalog.pg_current_xact_id()::text")[0])


def run_on_trial(connection: Connection, sql: str, wait_s: float, timeout_s: float) -> None:
    """Run SQL of any number of statements inside `undone`, with the settings of a plain session.

    `wait_s`: the seconds to wait for each lock. `timeout_s`: the seconds that the SQL may take. Raises
    ConfigError, with the line if known, if the SQL fails or cannot be tried; BusyError if it does not get a
    lock. Neither error holds text that may be a value.
    """
    with source_errors("preparing to try a migration"):
        _execute(connection, "SET LOCAL search_path TO DEFAULT")
        for setting, seconds in (("lock_timeout", wait_s), ("statement_timeout", timeout_s)):
            row(
                connection,
                "SELECT pg_catalog.set_config(%s, %s, true)",
                (setting, str(max(1, int(seconds * 1000)))),
            )
        row(connection, "SELECT pg_catalog.set_config('pgrepl.migration', %s, true)", (_bare(sql),))
    try:
        with patience(connection, timeout_s + ANSWER_LIMIT_S):
            _execute(connection, _RUN)
    except psycopg2.Error as error:
        raise _failure(error, sql) from None
    with source_errors("reading what a migration did"):
        # The migration may have changed role and settings, and only its tables are to be checked.
        _execute(connection, "RESET SESSION AUTHORIZATION")
        _execute(connection, "RESET ROLE")
        _execute(connection, pin_statement())
        limit_idleness(connection)


def _bare(sql: str) -> str:
    """Return the SQL without a BEGIN and COMMIT around all of it. Positions in the text stay the same."""
    begin, commit = _BEGIN.match(sql), _COMMIT.search(sql)
    if begin is None or commit is None:
        return sql
    start = begin.end()
    return re.sub(r"[^\n]", " ", sql[:start]) + sql[start : commit.start(1)]


def _failure(error: Any, sql: str) -> PgReplError:
    """Return the error with PostgreSQL's message, without text that may be a value, and the position."""
    code = error.pgcode or ""
    if code in ("55P03", "40P01"):
        return BusyError(
            f"the migration could not be tried: {describe(error)}",
            "other sessions hold locks on its tables: try again when they have ended",
        )
    if not code or code[:2] in ("08", "53", "58") or code.startswith("57P"):
        return translate(error, "trying a migration")
    place, found = _place(error, sql)
    said = _said(error, sql)
    hint = _HINTS.get(code, "")
    if code == "42601" and found == "\\":
        hint = "this is a command of psql, which the server does not know: take it out of what is tried"
    if error.diag.source_function == _MAKES_UNLOGGED:
        hint = "remove the table first: pgrepl remove FILE.json TABLE, or PgRemoveTablesOperator"
    if code == "0A000" and not _is_about_transactions(error):
        hint = ""
    return ConfigError(f"the migration fails{place}: {said}", hint)


_SAME_EVERYWHERE = ("40P01", "55P03", "57014")
"""The SQLSTATEs whose messages, if they are the server's own, name nothing from the statement."""


def _said(error: Any, sql: str) -> str:
    """Return PostgreSQL's message if it is about the migration's own text, otherwise only the SQLSTATE.

    The text near a syntax error may be a value, and so may a name in a statement that a function composes.
    """
    code = error.pgcode
    if code == "42601":
        return f"syntax error (SQLSTATE {code})"
    if code in _SAME_EVERYWHERE or (code[:2] != "XX" and not _is_of_a_function(error, sql)):
        return describe(error)
    return f"{describe_by_code(error)}; its text is not shown, because it may hold values"


def _is_of_a_function(error: Any, sql: str) -> bool:
    """Return True if a function, trigger or DO block of the migration, or a function they call, raised it.

    The context has a line for each of these, in the language of the server. It has one or two more for the
    execution of the migration: the statement, whose text may have several lines, and `_RUN`.
    """
    context = error.diag.context or ""
    return len(context.replace(_bare(sql), "", 1).splitlines()) > 2


def _is_about_transactions(error: Any) -> bool:
    """Return True if EXECUTE rejected a transaction command.

    EXECUTE also rejects SELECT INTO, but gives a hint only for that.
    """
    return error.diag.source_function == "exec_stmt_dynexecute" and error.diag.message_hint is None


def _place(error: Any, sql: str) -> tuple[str, str]:
    """Return line and column in the migration, and the character there.

    Both are empty if the error's position is not in the migration's text.
    """
    position = error.diag.internal_position
    if not position or (error.diag.internal_query or "").strip() != _bare(sql).strip():
        return "", ""
    before = sql[: int(position) - 1]
    column = len(before) - before.rfind("\n")
    return f" at line {before.count(chr(10)) + 1}, column {column}", sql[len(before) : len(before) + 1]


def _execute(connection: Connection, command: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(command)
