"""A slot that is made while transactions run and DDL commits: what it sends later is decoded rightly.

The server builds its view of the catalog in phases, each of which waits for the transactions before it, and
does not track what commits in the first: a transaction that begins in the second would be decoded by a
catalog from before that, with columns missing and no error.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg2
import psycopg2.extensions
import pytest

from airflow_provider_pgrepl.replication.source.connection import Connection
from tests.conftest import closing_connection
from tests.support.received import Received
from tests.support.replicated import execute, wait_until

# DDL, and the rows written after it: by a transaction that the phases leave in doubt, and by a later one.
CASES = {
    "one_more": ("alter table {t} add c int", "(2, 'y', 3)", "(3, 'z', 4)"),
    "one_more_with_default": ("alter table {t} add c int default 7", "(2, 'y', 3)", "(3, 'z', 4)"),
    "another_of_the_same_name": ("alter table {t} drop b, add b text", "(2, 'y')", "(3, 'z')"),
    "emptied": ("truncate {t}", "(2, 'y')", "(3, 'z')"),
    "rewritten": ("alter table {t} alter a type bigint", "(2, 'y')", "(3, 'z')"),
}
"""By the name of a table."""


@contextmanager
def transaction(dsn: str, statement: str | None = None) -> Iterator[tuple[Connection, str]]:
    """An open transaction that has a number, and the number."""
    with closing(psycopg2.connect(dsn)) as connection, connection.cursor() as cursor:
        if statement is not None:
            cursor.execute(statement)
        cursor.execute("select pg_current_xact_id()::xid::text")
        yield connection, cursor.fetchone()[0]


class Awaited:
    """A check of whether the creation of a slot waits for a transaction."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def __call__(self, xid: str) -> bool:
        with closing_connection(self._dsn) as connection, connection.cursor() as cursor:
            cursor.execute(
                "select exists (select from pg_locks where locktype = 'transactionid' and not granted"
                " and transactionid::text = %s)",
                (xid,),
            )
            return bool(cursor.fetchone()[0])


def begin_amid_ddl(received: Received, ddl: list[str], insert: str) -> None:
    """Begin an epoch while DDL commits in the server's first phase, and INSERTs run in its second."""
    dsn, awaited, failed = received.dsn, Awaited(received.dsn), []

    def begin() -> None:
        try:
            received.begin(amid_transactions=True)
        except BaseException as error:
            failed.append(error)

    beginning = threading.Thread(target=begin)
    with transaction(dsn) as (first, first_xid):
        beginning.start()
        wait_until(lambda: awaited(first_xid))
        with transaction(dsn) as (second, second_xid):
            execute(dsn, *ddl)
            first.commit()
            wait_until(lambda: awaited(second_xid))
            with transaction(dsn, insert) as (doubtful, doubtful_xid):
                second.commit()
                wait_until(lambda: awaited(doubtful_xid) or not beginning.is_alive())
                doubtful.commit()
    beginning.join(300)
    assert not beginning.is_alive()
    assert failed == []


def rows(dsn: str, table: str) -> list[tuple[Any, ...]]:
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute(f"select * from {table} order by a")
        return [tuple(None if value is None else str(value) for value in row) for row in cursor.fetchall()]


def oid(dsn: str, table: str) -> int:
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select %s::regclass::oid::bigint", (table,))
        return int(cursor.fetchone()[0])


@pytest.mark.differs_by_major(
    "each major builds its view of the catalog in its own way; since 14.18, 15.13, 16.9 and 17.5 open"
    " transactions hear of DDL that commits"
)
def test_rows_written_during_slot_creation_and_ddl_are_decoded_correctly(dsn: str, tmp_path: Path) -> None:
    for table in CASES:
        execute(
            dsn, f"create table {table} (a int primary key, b text)", f"insert into {table} values (1, 'x')"
        )
    received = Received(dsn, tmp_path, tuple(f"public.{table}" for table in CASES))
    begin_amid_ddl(
        received,
        [ddl.format(t=table) for table, (ddl, _, _) in CASES.items()],
        "; ".join(f"insert into {table} values {doubtful}" for table, (_, doubtful, _) in CASES.items()),
    )
    execute(dsn, *(f"insert into {table} values {later}" for table, (_, _, later) in CASES.items()))
    received.receive()
    changes = received.changelog_rows("I")
    for table in CASES:
        sent = [tuple(row["new"]) for row in changes if row["relation_id"] == oid(dsn, table)]
        assert sent == [row for row in rows(dsn, table) if row[0] in ("2", "3")][-len(sent) :], table
        assert sent, table
