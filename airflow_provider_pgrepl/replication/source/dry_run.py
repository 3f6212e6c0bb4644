"""SQL on trial: run in a transaction that is undone, and that the SQL itself cannot end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg2

from airflow_provider_pgrepl.errors import BusyError, ConfigError, PgReplError
from airflow_provider_pgrepl.replication.source.connection import (
    ANSWER_LIMIT_S,
    Connection,
    limit_idleness,
    patience,
    pin_statement,
    row,
)
from airflow_provider_pgrepl.replication.source.server_errors import (
    describe,
    describe_by_code,
    source_errors,
    translate,
)

_RUN = "DO 'BEGIN EXECUTE pg_catalog.current_setting(''pgrepl.migration''); END'"
"""A text that is executed as one cannot end the transaction that it runs in, however it tries."""

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
"""Where PostgreSQL refuses SET UNLOGGED of a published table; its messages are in the server's language."""


@contextmanager
def undone(connection: Connection) -> Iterator[None]:
    """A transaction that is rolled back, whatever happens, and seen to have been."""
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
    """Run SQL of any number of statements inside `undone`; with the settings of a plain session.

    `wait_s`: how long each lock is waited for. Raises ConfigError, with the line where known, if it fails or
    cannot be tried; BusyError when it does not get a lock. Neither carries texts that may be values.
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
        # It may have changed them, and only its tables are to be judged.
        _execute(connection, "RESET SESSION AUTHORIZATION")
        _execute(connection, "RESET ROLE")
        _execute(connection, pin_statement())
        limit_idleness(connection)


def _bare(sql: str) -> str:
    """Without a BEGIN and COMMIT around the whole, which tools write; every other place stays where it is."""
    begin, commit = _BEGIN.match(sql), _COMMIT.search(sql)
    if begin is None or commit is None:
        return sql
    start = begin.end()
    return re.sub(r"[^\n]", " ", sql[:start]) + sql[start : commit.start(1)]


def _failure(error: Any, sql: str) -> PgReplError:
    """What PostgreSQL said, without texts that may be values; and where, if it said that."""
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
"""SQLSTATEs whose texts, if they are the server's own, name nothing of the statement."""


def _said(error: Any, sql: str) -> str:
    """PostgreSQL's text if it is about the migration's own text, which is known; else the SQLSTATE alone.

    What is near a syntax error may be a value, and so may a name in a statement that a function composes.
    """
    code = error.pgcode
    if code == "42601":
        return f"syntax error (SQLSTATE {code})"
    if code in _SAME_EVERYWHERE or (code[:2] != "XX" and not _is_of_a_function(error, sql)):
        return describe(error)
    return f"{describe_by_code(error)}; its text is not shown, because it may hold values"


def _is_of_a_function(error: Any, sql: str) -> bool:
    """Whether a function, a trigger or a DO block of the migration raised it, or what it calls.

    The context has a line for each of these, in the language of the server, and one or two for how the
    migration is run: the statement, whose text may have lines of its own, and `_RUN`.
    """
    context = error.diag.context or ""
    return len(context.replace(_bare(sql), "", 1).splitlines()) > 2


def _is_about_transactions(error: Any) -> bool:
    """EXECUTE refuses commands of transactions, and SELECT INTO; only with the latter does it give a hint."""
    return error.diag.source_function == "exec_stmt_dynexecute" and error.diag.message_hint is None


def _place(error: Any, sql: str) -> tuple[str, str]:
    """Line and column in the migration, and the character that is there; empty when it is not of its text."""
    position = error.diag.internal_position
    if not position or (error.diag.internal_query or "").strip() != _bare(sql).strip():
        return "", ""
    before = sql[: int(position) - 1]
    column = len(before) - before.rfind("\n")
    return f" at line {before.count(chr(10)) + 1}, column {column}", sql[len(before) : len(before) + 1]


def _execute(connection: Connection, command: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(command)
